"""RAM: Reinforce Adjoint Matching, a regression on the reference's velocity corrected by the reward.

Shape suffixes: N trained (sample, step) pairs, C H W latent.
"""

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


def ram_terms(
    velocities: Velocities, samples: NoisedSamples, *, scale: float, advantage_clip: float
) -> tuple[Tensor, Tensor]:
    """The squared distance to the corrected target, and the size of the correction; each over N pairs.

        L = ‖v_θ − sg(v_ref + R (u − v_θ))‖²,  u = ε − x0,  R = scale · clip(advantage, ±clip)

    sg stops the gradient; the norm is a mean over a pair's dimensions. The gradient in v_θ is
    2 [(v_θ − v_ref) + R (v_θ − u)]: twice RVM's with the reference as anchor and coefficient 1.

    Why: where v_θ is the sampler's own velocity, E[u | x_t] = v_θ, so the fixed point is
    v_θ = v_ref + Cov(R, u | x_t), the change of E[u | x_t] under a tilt of x0 by exp(R), to first order in R
    (exactly, for a Gaussian and a reward linear in x0).

    Args:
        velocities: predictions of the trained and the reference policy, N C H W.
        samples: x0, noise, t in (0, 1] and the advantage of each pair.
        scale: of the clipped advantage, above 0.
        advantage_clip: where advantages saturate, above 0.

    Returns:
        The loss, and ‖R (u − v_θ)‖² without gradient.

    Raises:
        ValueError: without the reference's velocity.

    Reference: Bergmeister et al., "Reinforce Adjoint Matching: Scaling RL post-training of diffusion and
    flow-matching models", 2026 (arXiv 2605.10759). The formula is from third-party notes, and the gradient and
    the fixed point are derived here. The paper's R is the reward of a run with a KL penalty; that R is made of
    advantages, their scale and RVM's clip are our reading.
    """
    check_velocities(velocities, samples.x0_NCHW, samples.advantage_N)
    current, reference = velocities.current_NCHW, policy_velocity(velocities, "reference")
    R_N = scaled_advantage(samples.advantage_N, scale=scale, clip=advantage_clip)
    R = R_N.view(-1, *[1] * (current.ndim - 1))
    correction = R * (target_velocity(samples) - current.detach())
    return pair_mean((current - (reference + correction)).square()), pair_mean(correction.square())


class RAM(NoisedObjective):
    """A regression on the reference's velocity plus the advantage times the trained one's own residual.

    What keeps it bounded: the target is held fixed in each step, and from step to step v_θ − v_ref shrinks
    where E[R | x_t] > −1. Advantages are centred, so that this holds unless all that lead to one x_t are far
    worse than their groups; for every pair by itself it holds where scale · clip < 1.

    Args:
        scale: of the clipped advantage; larger goes further from the reference. Above 0; our reading: 1, a tilt
            by exp(A). With RVM's 0.1 the fixed point is a tenth of a spread away, and nothing is seen to move.
        advantage_clip: where advantages saturate. Above 0; our reading: 5.
    """

    needs_old = False

    def __init__(self, *, scale: float = 1.0, advantage_clip: float = 5.0) -> None:
        self.scale = checked("scale", scale, above=0)
        self.advantage_clip = checked("advantage_clip", advantage_clip, above=0)

    @property
    def needs_reference(self) -> bool:
        """Always."""
        return True

    def loss(self, velocities: Velocities, samples: NoisedSamples) -> Loss:
        """See `ram_terms`; the mean over pairs."""
        policy_N, correction_N = ram_terms(
            velocities, samples, scale=self.scale, advantage_clip=self.advantage_clip
        )
        policy = policy_N.mean()
        distance = pair_mean((velocities.current_NCHW - policy_velocity(velocities, "reference")).square())
        parts = {
            "policy": policy.detach(),
            "correction": correction_N.mean(),
            "distance_to_reference": distance.mean().detach(),
        }
        return Loss(total=policy, parts=parts)
