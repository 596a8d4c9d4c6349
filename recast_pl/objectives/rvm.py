"""RVM: the reward moves the velocity along its own regression residual, and an anchor holds it.

Shape suffixes: N trained (sample, step) pairs, C H W latent.
"""

import warnings
from dataclasses import dataclass
from typing import Literal

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

Anchor = Literal["none", "reference", "old"]
Residual = Literal["current", "old"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RVMTerms:
    """The loss before its reduction, and the quantities worth a curve; each over N pairs."""

    reward_N: Tensor
    anchor_N: Tensor  # mean squared distance to the anchor's velocity; 0 without an anchor
    residual_N: Tensor  # mean squared distance to the target velocity u, detached


def rvm_terms(
    velocities: Velocities,
    samples: NoisedSamples,
    *,
    scale: float,
    advantage_clip: float,
    anchor: Anchor,
    residual: Residual,
) -> RVMTerms:
    """The reward and the anchor term, whose gradients add up to RVM's descent direction.

        direction = A (v_θ − u) + c (v_θ − v_anchor),  u = ε − x0,  A = scale · clip(advantage, ±clip)

    The direction is the gradient in v_θ of A/2 ‖v_θ − u‖² + c/2 ‖v_θ − v_anchor‖². With `residual="old"` the
    reward term is A ⟨v_θ − v_old, v_old − u⟩ instead, whose gradient is A (v_old − u): the same at v_θ = v_old.
    Norms and products are means over a pair's dimensions. Gradients reach the trained velocity alone.

    Args:
        velocities: predictions of the trained policy and of those that `anchor` and `residual` name, N C H W.
        samples: x0, noise, t in (0, 1] and the advantage of each pair.
        scale: of the clipped advantage, above 0.
        advantage_clip: where advantages saturate, above 0.
        anchor: whose velocity holds the trained one.
        residual: whose residual the advantage weights.

    Raises:
        ValueError: without a velocity that `anchor` or `residual` needs.

    Reference: "RVM", 2026 (arXiv 2608.23664). The paper was not at hand: the direction and the range of A are
    from third-party notes, the losses are derived from the direction as above, and `residual="old"` is ours:
    with it, DiffusionNFT without adaptive weighting is a special case
    (tests/objectives/test_objective_family.py).
    """
    check_velocities(velocities, samples.x0_NCHW, samples.advantage_N)
    current, target = velocities.current_NCHW, target_velocity(samples)
    A_N = scaled_advantage(samples.advantage_N, scale=scale, clip=advantage_clip)
    if residual == "current":
        reward_N = A_N * pair_mean((current - target).square()) / 2
    else:
        old = policy_velocity(velocities, "old")
        reward_N = A_N * pair_mean((current - old) * (old - target))
    if anchor == "none":
        anchor_N = torch.zeros_like(reward_N)
    else:
        anchor_N = pair_mean((current - policy_velocity(velocities, anchor)).square())
    return RVMTerms(
        reward_N=reward_N,
        anchor_N=anchor_N,
        residual_N=pair_mean((current.detach() - target).square()),
    )


class RVM(NoisedObjective):
    """A regression on the target velocity, weighted by the signed advantage, and an anchor.

    What keeps it bounded: for a negative A the reward term falls without end as v_θ leaves u. At one x_t the
    loss has curvature E[A | x_t] + c, so it has a minimum where c > −E[A | x_t]; for every pair by itself where
    c > scale · clip, as with the defaults (1 > 0.5). With `residual: old` the reward term is linear and any
    c > 0 bounds it. Without an anchor only the number and size of steps do, and a linear reward term has no
    minimum at all: that is refused.

    The old policy as anchor follows the trained one, so that the policy moves as long as advantages correlate
    with the samples. The reference stays: in the one Gaussian case that has a closed form, the mean comes to
    rest Cov(A, x0) / c from the reference's.

    Args:
        scale: of the clipped advantage. Above 0; third-party notes of the paper: 0.1.
        advantage_clip: where advantages saturate. Above 0; third-party notes of the paper: 5.
        anchor: none, reference or old; the default is our choice.
        coefficient: c, the anchor's weight, above 0 with an anchor and 0 without; 1 is RAM's.
        residual: current (the paper's), or old.
    """

    def __init__(
        self,
        *,
        scale: float = 0.1,
        advantage_clip: float = 5.0,
        anchor: Anchor = "old",
        coefficient: float = 1.0,
        residual: Residual = "current",
    ) -> None:
        self.scale = checked("scale", scale, above=0)
        self.advantage_clip = checked("advantage_clip", advantage_clip, above=0)
        self.coefficient = checked("coefficient", coefficient, at_least=0)
        key = "model.objective.init_args"
        if anchor not in ("none", "reference", "old"):
            raise ValueError(f"{key}.anchor: expected none, reference or old, got {anchor}")
        if residual not in ("current", "old"):
            raise ValueError(f"{key}.residual: expected current or old, got {residual}")
        if (anchor == "none") != (coefficient == 0):
            raise ValueError(
                f"{key}.coefficient: {coefficient} does not go with {key}.anchor: {anchor}; expected 0 without "
                "an anchor, and above 0 with one"
            )
        if anchor == "none" and residual == "old":
            raise ValueError(
                f"{key}.anchor: none and {key}.residual: old give a loss that is linear in the velocity and "
                "has no minimum; take the anchor old or reference"
            )
        if anchor == "none":
            warnings.warn(
                f"{key}.anchor is none: samples that are worse than their group push the velocity away without "
                "end, and only the number and size of steps bound it",
                stacklevel=2,
            )
        self.anchor, self.residual = anchor, residual
        self.needs_old = "old" in (anchor, residual)

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is the anchor."""
        return self.anchor == "reference"

    def loss(self, velocities: Velocities, samples: NoisedSamples) -> Loss:
        """See `rvm_terms`; the mean over pairs of the reward term and c/2 times the anchor's distance."""
        terms = rvm_terms(
            velocities,
            samples,
            scale=self.scale,
            advantage_clip=self.advantage_clip,
            anchor=self.anchor,
            residual=self.residual,
        )
        reward, distance = terms.reward_N.mean(), terms.anchor_N.mean()
        parts = {
            "policy": reward.detach(),
            "distance_to_anchor": distance.detach(),
            "residual": terms.residual_N.mean(),
        }
        return Loss(total=reward + self.coefficient / 2 * distance, parts=parts)
