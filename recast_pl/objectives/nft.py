"""DiffusionNFT: the negative-aware fine-tuning loss on the forward process.

Shape suffixes: N trained (sample, step) pairs, C H W latent.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from recast_pl.objectives.base import check_velocities
from recast_pl.objectives.noised import NoisedObjective
from recast_pl.rollout.solvers import clean_estimate
from recast_pl.types import Loss, NoisedSamples, Velocities

ERROR_FLOOR = 1e-5  # of the mean absolute error that weights a pair; the released code's


@dataclass(frozen=True, slots=True, kw_only=True)
class NFTTerms:
    """The loss before its reduction, and the quantities worth a curve; each over N pairs."""

    policy_N: Tensor
    reference_N: Tensor  # mean squared distance to the reference's velocity
    old_N: Tensor  # … to the old policy's, detached


def optimality(advantage: Tensor, *, clip: float) -> Tensor:
    """The optimality probability r = ½ + ½ clip(A / A_max, −1, 1) in [0, 1].

    >>> optimality(torch.tensor([-9.0, 0.0, 2.5]), clip=5.0)
    tensor([0.0000, 0.5000, 0.7500])
    """
    return 0.5 + 0.5 * (advantage / clip).clamp(-1, 1)


def _clean_error(x0: Tensor, prediction: Tensor, *, adaptive: bool) -> Tensor:
    """Squared error, mean over a pair's dimensions; `adaptive`: over its own detached mean absolute error."""
    error = prediction - x0
    dims = tuple(range(1, error.ndim))
    square_N = error.square().mean(dim=dims)
    return square_N / error.detach().abs().mean(dim=dims).clamp_min(ERROR_FLOOR) if adaptive else square_N


def diffusion_nft_terms(
    velocities: Velocities,
    samples: NoisedSamples,
    *,
    beta: float,
    advantage_clip: float,
    adaptive: bool = True,
) -> NFTTerms:
    """Positive and negative implicit policies, each regressed on the clean sample.

        v⁺ = (1 − β) v_old + β v_θ,  v⁻ = (1 + β) v_old − β v_θ,
        L = A_max/β · ( r ‖x̂0(v⁺) − x0‖²_w + (1 − r) ‖x̂0(v⁻) − x0‖²_w )

    with x̂0(v) = x_t − t v and w the inverse of each prediction's detached mean absolute error (`adaptive`), or
    1. No gradient reaches the old or the reference velocity.

    Without w, as x̂0(v) − x0 = t (u − v) with u = ε − x0, the gradient in v_θ is
    2 A_max t² [(2r − 1)(v_old − u) + β (v_θ − v_old)]: RVM's direction with its residual at the old policy, the
    old policy as anchor with coefficient β, and the advantage 2r − 1.

    Args:
        velocities: predictions of the trained, old and (optionally) reference policy, N C H W.
        samples: x0, noise, t in (0, 1] and the advantage of each pair.
        beta: strength of the mixture, above 0.
        advantage_clip: A_max, above 0.
        adaptive: weight each prediction by the inverse of its mean absolute error.

    Raises:
        ValueError: without the old policy's velocity.

    Reference: Zheng et al., "DiffusionNFT: Online diffusion reinforcement with forward process", 2025
    (arXiv 2509.16117), equation 7 and its adaptive weighting.
    """
    check_velocities(velocities, samples.x0_NCHW, samples.advantage_N)
    if velocities.old_NCHW is None:
        raise ValueError("DiffusionNFT needs the old policy's velocity")
    current, old = velocities.current_NCHW, velocities.old_NCHW.detach()
    dims = tuple(range(1, current.ndim))
    t = samples.t_N.view(-1, *[1] * (current.ndim - 1))
    x_t = (1 - t) * samples.x0_NCHW + t * samples.noise_NCHW
    positive = clean_estimate(x_t, (1 - beta) * old + beta * current, t)
    negative = clean_estimate(x_t, (1 + beta) * old - beta * current, t)
    r_N = optimality(samples.advantage_N.detach(), clip=advantage_clip)
    x0 = samples.x0_NCHW
    policy_N = r_N * _clean_error(x0, positive, adaptive=adaptive)
    policy_N = policy_N + (1 - r_N) * _clean_error(x0, negative, adaptive=adaptive)
    if velocities.reference_NCHW is None:
        reference_N = torch.zeros_like(policy_N)
    else:
        reference_N = (current - velocities.reference_NCHW.detach()).square().mean(dim=dims)
    return NFTTerms(
        policy_N=policy_N * advantage_clip / beta,
        reference_N=reference_N,
        old_N=(current.detach() - old).square().mean(dim=dims),
    )


class DiffusionNFT(NoisedObjective):
    """The DiffusionNFT loss with a penalty on the distance to the reference velocity.

    Args:
        beta: strength of the implicit policies; the loss's optimum is v_old + (2/β)·Δ. Above 0; paper: 0.1.
        advantage_clip: A_max, where advantages saturate. Above 0; paper: 5.
        reference_coefficient: weight of ‖v_θ − v_ref‖²; at 0 the reference is never evaluated. Paper: 1e-4.
        adaptive: weight each prediction's error by the inverse of its mean absolute error, as the paper does.
    """

    def __init__(
        self,
        *,
        beta: float = 0.1,
        advantage_clip: float = 5.0,
        reference_coefficient: float = 1.0e-4,
        adaptive: bool = True,
    ) -> None:
        for name, value in (("beta", beta), ("advantage_clip", advantage_clip)):
            if not value > 0:
                raise ValueError(f"model.objective.init_args.{name}: expected above 0, got {value}")
        if reference_coefficient < 0:
            raise ValueError(
                "model.objective.init_args.reference_coefficient: expected 0 or above, "
                f"got {reference_coefficient}"
            )
        self.beta, self.advantage_clip = beta, advantage_clip
        self.reference_coefficient, self.adaptive = reference_coefficient, adaptive

    needs_old = True

    @property
    def needs_reference(self) -> bool:
        """Whether the reference's velocity is asked for: not at coefficient 0."""
        return self.reference_coefficient > 0

    def loss(self, velocities: Velocities, samples: NoisedSamples) -> Loss:
        """See `diffusion_nft_terms`; the mean over pairs, plus the weighted reference penalty."""
        terms = diffusion_nft_terms(
            velocities,
            samples,
            beta=self.beta,
            advantage_clip=self.advantage_clip,
            adaptive=self.adaptive,
        )
        policy, reference = terms.policy_N.mean(), terms.reference_N.mean()
        total = policy + self.reference_coefficient * reference
        parts = {
            "policy": policy.detach(),
            "distance_to_reference": reference.detach(),
            "distance_to_old": terms.old_N.mean(),
        }
        return Loss(total=total, parts=parts)
