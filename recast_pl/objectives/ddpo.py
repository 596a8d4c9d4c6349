"""DDPO: policy gradient over denoising steps, without groups and without a reference."""

from typing import Literal

from recast_pl.objectives.policy_gradient import (
    OldLogProb,
    check_coefficients,
    clipped_surrogate,
    ratio_parts,
    step_terms,
)
from recast_pl.objectives.trajectory import TrajectoryObjective
from recast_pl.types import Loss, Transitions, Velocities


class DDPO(TrajectoryObjective):
    """The policy gradient of a denoising process seen as a Markov decision process.

    `importance` (DDPO-IS): PPO's clipped surrogate −min(ρ A, clip(ρ, 1 − ε, 1 + ε) A), good for several updates
    of one iteration. `score` (DDPO-SF): REINFORCE, −A log p_θ, right for the first update only. A is cut at
    ±`advantage_clip`; log-probabilities are means over a latent's dimensions, as in the authors' PyTorch code.
    DDPO's advantages come from the whole batch (`advantages.BatchNormalised`); any others will do.

    Our reading: the paper's steps are those of a DDIM with noise; here they are the flow's.

    Args:
        estimator: `importance` or `score`.
        clip_range: ε, 1e-6 to below 1. The authors' code: 1e-4.
        advantage_clip: above 0. The authors' code: 5.
        old_log_prob: `recomputed` in the update's own micro-batches, or as recorded by the `rollout`; see
            `policy_gradient.OldLogProb`. `score` reads it for curves alone.

    Reference: Black et al., "Training diffusion models with reinforcement learning", 2023 (arXiv 2305.13301).
    """

    needs_reference = False

    def __init__(
        self,
        *,
        estimator: Literal["importance", "score"] = "importance",
        clip_range: float = 1.0e-4,
        advantage_clip: float = 5.0,
        old_log_prob: OldLogProb = "recomputed",
    ) -> None:
        check_coefficients(clip_range=clip_range, advantage_clip=advantage_clip, old_log_prob=old_log_prob)
        if estimator not in ("importance", "score"):
            raise ValueError(
                f"model.objective.init_args.estimator: expected 'importance' or 'score', got {estimator!r}"
            )
        self.estimator, self.clip_range, self.advantage_clip = estimator, clip_range, advantage_clip
        self.needs_old = old_log_prob == "recomputed"

    def loss(self, velocities: Velocities, samples: Transitions) -> Loss:
        """See the class; the mean over pairs."""
        terms = step_terms(velocities, samples)
        advantage_N = samples.advantage_N.clamp(-self.advantage_clip, self.advantage_clip)
        if self.estimator == "score":
            policy = -(advantage_N * terms.log_prob_N).mean()
        else:
            policy = clipped_surrogate(terms.log_ratio_N, advantage_N, clip_range=self.clip_range).mean()
        parts = {"policy": policy.detach(), **ratio_parts(terms, clip_range=self.clip_range)}
        return Loss(total=policy, parts=parts)
