"""AWM: advantage-weighted matching, a policy gradient whose likelihood is the pre-training loss.

Shape suffixes: N trained (sample, step) pairs, C H W latent.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

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

Weighting = Literal["uniform", "t", "t_squared", "huber"]

LARGEST_LOG_RATIO = 20.0  # ours: exp of more says nothing and overflows in float32 from 88 on
HUBER_FLOOR = 1e-10  # of the squared error under a root, whose slope at 0 is infinite; the released code's


def matching_likelihood(
    velocity_NCHW: Tensor, samples: NoisedSamples, *, weighting: Weighting, power: float
) -> Tensor:
    """The surrogate of the log-likelihood, ℓ = −w(t) ‖v − u‖² with u = ε − x0, over N pairs.

    w(t) is 1 (`uniform`), t (`t`) or t² (`t_squared`: the error of x̂0). `huber` is
    −t/p [(‖v − u‖² + δ)^p − δ^p] with p = `power`: at p = ½ linear in the error, at p = 1 the weight t. The
    norm is a mean over a pair's dimensions, not the sum that a likelihood would have.

    >>> from recast_pl.types import NoisedSamples
    >>> one = NoisedSamples(x0_NCHW=torch.zeros(1, 1, 1, 1), noise_NCHW=torch.ones(1, 1, 1, 1),
    ...                     t_N=torch.tensor([0.5]), advantage_N=torch.zeros(1))
    >>> matching_likelihood(torch.full((1, 1, 1, 1), 3.0), one, weighting="t_squared", power=1.0)
    tensor([-1.])
    """
    t_N = samples.t_N
    error_N = pair_mean((velocity_NCHW - target_velocity(samples)).square())
    if weighting == "uniform":
        return -error_N
    if weighting == "t":
        return -t_N * error_N
    if weighting == "t_squared":
        return -t_N.square() * error_N
    root_N: Tensor = (error_N + HUBER_FLOOR) ** power - HUBER_FLOOR**power
    return -t_N * root_N / power


@dataclass(frozen=True, slots=True, kw_only=True)
class AWMTerms:
    """The loss before its reduction, and the quantities worth a curve; each over N pairs."""

    policy_N: Tensor
    ratio_N: Tensor  # detached
    clipped_N: Tensor  # 1 where the clipped branch is in force, and no gradient flows


def awm_terms(
    velocities: Velocities,
    samples: NoisedSamples,
    *,
    clip_range: float,
    advantage_clip: float,
    weighting: Weighting,
    power: float,
) -> AWMTerms:
    """The clipped surrogate with the matching loss as log-likelihood.

        L = −min(ρ A, clip(ρ, 1 − ε, 1 + ε) A),  ρ = exp(ℓ_θ − ℓ_old),  A = clip(advantage, ±clip) / clip

    At ρ = 1 the gradient is A w(t) ∇‖v_θ − u‖²: advantage-weighted regression. For a negative A the loss is
    ρ |A| ≥ 0, so leaving u lowers it towards 0 and no further, and for a positive A it stops at ρ = 1 + ε: the
    surrogate is bounded below by −(1 + ε).

    Args:
        velocities: predictions of the trained and the old policy, N C H W.
        samples: x0, noise, t in (0, 1] and the advantage of each pair.
        clip_range: ε, above 0.
        advantage_clip: where advantages saturate; they are divided by it. Above 0.
        weighting: see `matching_likelihood`.
        power: see `matching_likelihood`.

    Raises:
        ValueError: without the old policy's velocity.

    Reference: Xue et al., "Advantage weighted matching: Aligning RL with pretraining in diffusion models", 2025
    (arXiv 2509.25050).
    """
    check_velocities(velocities, samples.x0_NCHW, samples.advantage_N)
    likelihood_N = matching_likelihood(velocities.current_NCHW, samples, weighting=weighting, power=power)
    old_N = matching_likelihood(policy_velocity(velocities, "old"), samples, weighting=weighting, power=power)
    A_N = scaled_advantage(samples.advantage_N, scale=1 / advantage_clip, clip=advantage_clip)
    ratio_N = (likelihood_N - old_N).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    plain_N, clipped_N = ratio_N * A_N, ratio_N.clamp(1 - clip_range, 1 + clip_range) * A_N
    return AWMTerms(
        policy_N=-torch.minimum(plain_N, clipped_N),
        ratio_N=ratio_N.detach(),
        clipped_N=(clipped_N < plain_N).detach().to(ratio_N),
    )


class AWM(NoisedObjective):
    """The clipped surrogate of `awm_terms`, and penalties on the distance to the reference and the old policy.

    The old policy is the one that rolled out, as the ratio asks; it trails the trained one, so that the ratio
    is not 1 before an iteration's update. Norms are means over dimensions, so that ratios are close to 1 and a
    narrow clip range would stop what is noise; the penalty on the distance to the old policy holds the step.

    Args:
        clip_range: ε. Above 0; the released code: 1.
        advantage_clip: where advantages saturate before they are scaled to ±1. Above 0; the paper: 5.
        weighting: uniform, t, t_squared or huber. The released recipes use huber with the power 0.25; uniform,
            as in the paper's derivation, is our default.
        power: of `huber`, in (0, 1].
        reference_coefficient: weight of ‖v_θ − v_ref‖²; 0: never evaluated. The released code: 0.003 or 1e-4.
        old_coefficient: weight of ‖v_θ − v_old‖². The released code: 1.
    """

    needs_old = True

    def __init__(
        self,
        *,
        clip_range: float = 1.0,
        advantage_clip: float = 5.0,
        weighting: Weighting = "uniform",
        power: float = 0.25,
        reference_coefficient: float = 3.0e-3,
        old_coefficient: float = 1.0,
    ) -> None:
        self.clip_range = checked("clip_range", clip_range, above=0)
        self.advantage_clip = checked("advantage_clip", advantage_clip, above=0)
        self.power = checked("power", power, above=0)
        self.reference_coefficient = checked("reference_coefficient", reference_coefficient, at_least=0)
        self.old_coefficient = checked("old_coefficient", old_coefficient, at_least=0)
        if power > 1:
            raise ValueError(f"model.objective.init_args.power: expected at most 1, got {power}")
        if weighting not in get_args(Weighting):
            raise ValueError(
                f"model.objective.init_args.weighting: expected one of {', '.join(get_args(Weighting))}, "
                f"got {weighting}"
            )
        self.weighting: Weighting = weighting

    @property
    def needs_reference(self) -> bool:
        """Whether the reference's velocity is asked for: not at coefficient 0."""
        return self.reference_coefficient > 0

    def loss(self, velocities: Velocities, samples: NoisedSamples) -> Loss:
        """See `awm_terms`; the mean over pairs, plus the weighted penalties."""
        terms = awm_terms(
            velocities,
            samples,
            clip_range=self.clip_range,
            advantage_clip=self.advantage_clip,
            weighting=self.weighting,
            power=self.power,
        )
        current, policy = velocities.current_NCHW, terms.policy_N.mean()
        to_old = pair_mean((current - policy_velocity(velocities, "old")).square()).mean()
        to_reference = torch.zeros_like(to_old)
        if self.needs_reference:
            to_reference = pair_mean((current - policy_velocity(velocities, "reference")).square()).mean()
        total = policy + self.old_coefficient * to_old + self.reference_coefficient * to_reference
        parts = {
            "policy": policy.detach(),
            "ratio": terms.ratio_N.mean(),
            "clipped": terms.clipped_N.mean(),
            "distance_to_old": to_old.detach(),
            "distance_to_reference": to_reference.detach(),
        }
        return Loss(total=total, parts=parts)
