"""What policy-gradient objectives share: ratios of log-probabilities over the steps that a rollout took.

Shape suffixes: N trained (sample, step) pairs, C H W latent.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from recast_pl.objectives.base import check_velocities
from recast_pl.rollout.transition import step_divergence, step_log_prob, step_mean
from recast_pl.types import Transitions, Velocities

RATIO_FLOOR = 1e-6  # log-probabilities of order 1 in float32 are 1.2e-7 apart; a ratio is of two of them
LARGEST_LOG_RATIO = 20.0  # beyond, a ratio is held: exp would overflow before clipping can help

OldLogProb = Literal["recomputed", "rollout"]
"""Where the log-probability under the rollout policy comes from.

`recomputed`: evaluated in the update's own micro-batches by the old weights. The ratio is then exactly 1 until
the weights change, and afterwards measures nothing but that. Costs a call of the network without gradient for
each pair. `rollout`: as recorded, at no cost. A network's result depends on the micro-batch in its last digits,
so the ratio carries their noise.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """The log-probabilities of N steps."""

    log_prob_N: Tensor  # under the trained policy, with graph
    log_ratio_N: Tensor  # … minus that under the rollout policy, with graph
    rounding_N: Tensor | None  # |recomputed − recorded| under the rollout policy, where both are known
    divergence_N: Tensor  # KL to the reference's step; 0 where the reference is not asked for


def step_terms(velocities: Velocities, samples: Transitions) -> StepTerms:
    """Log-probabilities of the steps taken, under the trained and the rollout policy.

    With the old policy's velocity given, the rollout policy's log-probability is computed again from it;
    otherwise it is the recorded one. Gradients flow through `velocities.current_NCHW` alone.

    Args:
        velocities: of the trained, old (optional) and reference (optional) policy at x_t, N C H W; guided if
            the rollout was.
        samples: the steps.
    """
    check_velocities(velocities, samples.before_NCHW, samples.advantage_N)
    steps_N, x_t, x_next = samples.steps_N, samples.x_t_NCHW, samples.x_next_NCHW
    mean = step_mean(steps_N, x_t, velocities.current_NCHW)
    log_prob_N = step_log_prob(steps_N, mean, x_next)
    old_N, rounding_N = samples.log_prob_old_N.to(log_prob_N.dtype), None
    if velocities.old_NCHW is not None:
        with torch.no_grad():
            again_N = step_log_prob(steps_N, step_mean(steps_N, x_t, velocities.old_NCHW), x_next)
            old_N, rounding_N = again_N, (again_N - old_N).abs()
    if velocities.reference_NCHW is None:
        divergence_N = torch.zeros_like(old_N)
    else:
        reference = step_mean(steps_N, x_t, velocities.reference_NCHW.detach())
        divergence_N = step_divergence(steps_N, mean, reference)
    return StepTerms(
        log_prob_N=log_prob_N,
        log_ratio_N=log_prob_N - old_N,
        rounding_N=rounding_N,
        divergence_N=divergence_N,
    )


def clipped_surrogate(log_ratio_N: Tensor, advantage_N: Tensor, *, clip_range: float) -> Tensor:
    """PPO's surrogate as a loss, −min(ρ A, clip(ρ, 1 − ε, 1 + ε) A), with ρ = exp(log ratio): [N].

    At ρ = 1 its gradient is that of REINFORCE, −A ∇ log p. Where the ratio has moved beyond the range in the
    advantage's direction, there is no gradient; where it has moved against it, there is.

    Args:
        log_ratio_N: held within ±20.
        advantage_N: any real numbers.
        clip_range: ε, above 0.

    Reference: Schulman et al., "Proximal policy optimization algorithms", 2017 (arXiv 1707.06347), equation 7.

    >>> clipped_surrogate(torch.tensor([1.5, 0.5, 1.5, 0.5]).log(), torch.tensor([1.0, 1.0, -1.0, -1.0]),
    ...                   clip_range=0.2)
    tensor([-1.2000, -0.5000,  1.5000,  0.8000])
    """
    ratio_N = log_ratio_N.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    held_N = ratio_N.clamp(1 - clip_range, 1 + clip_range)
    return -torch.minimum(ratio_N * advantage_N, held_N * advantage_N)


def ratio_parts(terms: StepTerms, *, clip_range: float) -> dict[str, Tensor]:
    """Curves of the ratio: its mean, share outside the clip range, and ½ E[(log ratio)²]."""
    log_ratio_N = terms.log_ratio_N.detach()
    ratio_N = log_ratio_N.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    parts = {
        "ratio": ratio_N.mean(),
        "clipped": ((ratio_N - 1).abs() > clip_range).float().mean(),
        "approximate_kl": 0.5 * log_ratio_N.square().mean(),
    }
    if terms.rounding_N is not None:
        parts["rounding"] = terms.rounding_N.mean()
    return parts


def check_coefficients(*, clip_range: float, advantage_clip: float, old_log_prob: str) -> None:
    """Refuses what no policy-gradient objective can use.

    Raises:
        ValueError: naming the key.
    """
    key = "model.objective.init_args"
    if not advantage_clip > 0:
        raise ValueError(f"{key}.advantage_clip: expected above 0, got {advantage_clip}")
    if not RATIO_FLOOR <= clip_range < 1:
        raise ValueError(
            f"{key}.clip_range: expected {RATIO_FLOOR:g} to below 1, got {clip_range}: below, float32's "
            "rounding of log-probabilities alone would be clipped"
        )
    if old_log_prob not in ("recomputed", "rollout"):
        raise ValueError(f"{key}.old_log_prob: expected 'recomputed' or 'rollout', got {old_log_prob!r}")
