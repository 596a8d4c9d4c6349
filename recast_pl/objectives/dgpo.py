"""DGPO: direct group preference optimisation, one preference for each group instead of one for each pair.

Shape suffixes: N trained (sample, step) pairs, C H W latent.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from recast_pl.objectives.base import (
    check_velocities,
    checked,
    pair_mean,
    policy_velocity,
    scaled_advantage,
    target_velocity,
)
from recast_pl.objectives.noised import NoisedObjective
from recast_pl.types import Loss, NoisedSamples, Velocities

Baseline = Literal["reference", "old"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DGPOTerms:
    """The loss before its reduction, and the quantities worth a curve; each over N pairs."""

    policy_N: Tensor  # the loss of the pair's group
    margin_N: Tensor  # s of the pair's group, detached
    residual_N: Tensor  # mean squared distance to the target velocity u, detached


def set_means(values_N: Tensor, samples: NoisedSamples) -> Tensor:
    """The mean of each pair's set: the pairs of its group at its step; N.

    Pairs of one step were given one and the same number t, so that equality is safe.

    Raises:
        ValueError: without the pairs' groups.

    >>> four = NoisedSamples(x0_NCHW=torch.zeros(4, 1, 1, 1), noise_NCHW=torch.zeros(4, 1, 1, 1),
    ...                      t_N=torch.tensor([0.5, 1.0, 0.5, 1.0]), advantage_N=torch.zeros(4),
    ...                      group_N=torch.tensor([7, 7, 7, 8]))
    >>> set_means(torch.tensor([1.0, 2.0, 3.0, 4.0]), four)
    tensor([2., 2., 2., 4.])
    """
    if samples.group_N is None:
        raise ValueError("DGPO needs the group of each pair")
    group_N, t_N = samples.group_N, samples.t_N
    same_NN = ((group_N[:, None] == group_N) & (t_N[:, None] == t_N)).to(values_N)
    return same_NN @ values_N / same_NN.sum(1)


def dgpo_terms(
    velocities: Velocities,
    samples: NoisedSamples,
    *,
    beta: float,
    advantage_clip: float,
    baseline: Baseline,
) -> DGPOTerms:
    """The negative log-likelihood that a group's better samples are preferred to its worse ones.

        L = −1/β log σ(β s),  s = mean_i A_i (e_base,i − e_θ,i),  e = ‖v − u‖²,  u = ε − x0

    over the samples i of one group at one step, with A = clip(advantage, ±clip) less its mean over the set, and
    e a mean over dimensions. The gradient of the set's loss in v_θ,i is σ(−β s) A_i ∇e_θ,i / k: regression
    weighted by the advantage, and by how far the set's preference is from met.

    Why the better and the worse samples need no partition: with implicit rewards β log p_θ/p_base + β log Z of
    each sample, Σ over better of |A| R − Σ over worse of |A| R = Σ A R, and log Z cancels because A sums to 0;
    −e stands for log p. Clipping may break that sum, hence the mean is taken off after it.

    Args:
        velocities: predictions of the trained policy and of `baseline`, N C H W.
        samples: x0, noise, t in (0, 1], advantage and group of each pair; sets are whole.
        beta: sharpness of the preference, above 0.
        advantage_clip: where advantages saturate, above 0.
        baseline: against whose error the trained policy's is measured.

    Raises:
        ValueError: without the baseline's velocity or the pairs' groups.

    Reference: Luo, Hu and Tang, "Reinforcing diffusion models by direct group preference optimization", 2025
    (arXiv 2510.08425). The mean over a group instead of the sum, 1/β in front (the released code's gradient has
    no β, either), and the clip before centring are our reading. The released code's additional clip of the
    ratio is left out.
    """
    check_velocities(velocities, samples.x0_NCHW, samples.advantage_N)
    current, target = velocities.current_NCHW, target_velocity(samples)
    error_N = pair_mean((current - target).square())
    base_N = pair_mean((policy_velocity(velocities, baseline) - target).square())
    A_N = scaled_advantage(samples.advantage_N, scale=1.0, clip=advantage_clip)
    A_N = A_N - set_means(A_N, samples)
    margin_N = set_means(A_N * (base_N - error_N), samples)
    return DGPOTerms(
        policy_N=-logsigmoid(beta * margin_N) / beta,
        margin_N=margin_N.detach(),
        residual_N=error_N.detach(),
    )


class DGPO(NoisedObjective):
    """The group preference of `dgpo_terms`, and a penalty on the distance to the reference.

    A gradient needs whole groups at one step: steps are drawn for each group, and micro-batches hold whole
    sets. What keeps it bounded: the loss is above 0, and its pull fades as a preference is met.

    Args:
        beta: sharpness. Above 0; the released code: 100 against the reference, 2000 against a moving average.
        advantage_clip: where advantages saturate. Above 0; the released code: 5.
        baseline: reference (the paper's) or old.
        reference_coefficient: weight of ‖v_θ − v_ref‖². The released code: 1e-3.
        shared_noise: noise the samples of a group at one step alike, so that they differ by x0 alone. The paper
            does; there one noise serves all steps of an iteration, here each step has its own.
    """

    whole_groups = True

    def __init__(
        self,
        *,
        beta: float = 100.0,
        advantage_clip: float = 5.0,
        baseline: Baseline = "reference",
        reference_coefficient: float = 1.0e-3,
        shared_noise: bool = True,
    ) -> None:
        self.beta = checked("beta", beta, above=0)
        self.advantage_clip = checked("advantage_clip", advantage_clip, above=0)
        self.reference_coefficient = checked("reference_coefficient", reference_coefficient, at_least=0)
        if baseline not in ("reference", "old"):
            raise ValueError(f"model.objective.init_args.baseline: expected reference or old, got {baseline}")
        self.baseline, self.shared_noise = baseline, shared_noise
        self.needs_old = baseline == "old"

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is the baseline or anchors."""
        return self.baseline == "reference" or self.reference_coefficient > 0

    def loss(self, velocities: Velocities, samples: NoisedSamples) -> Loss:
        """See `dgpo_terms`; the mean over sets, plus the weighted penalty."""
        terms = dgpo_terms(
            velocities,
            samples,
            beta=self.beta,
            advantage_clip=self.advantage_clip,
            baseline=self.baseline,
        )
        policy = terms.policy_N.mean()  # sets are equally large, so this is the mean over sets
        distance = torch.zeros_like(policy)
        if self.needs_reference:
            reference = policy_velocity(velocities, "reference")
            distance = pair_mean((velocities.current_NCHW - reference).square()).mean()
        parts = {
            "policy": policy.detach(),
            "margin": terms.margin_N.mean(),
            "residual": terms.residual_N.mean(),
            "distance_to_reference": distance.detach(),
        }
        return Loss(total=policy + self.reference_coefficient * distance, parts=parts)
