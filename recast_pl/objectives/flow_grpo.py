"""Flow-GRPO: clipped policy gradient over a flow's stochastic steps, held near the reference."""

from recast_pl.objectives.policy_gradient import (
    OldLogProb,
    check_coefficients,
    clipped_surrogate,
    ratio_parts,
    step_terms,
)
from recast_pl.objectives.trajectory import TrajectoryObjective
from recast_pl.types import Loss, Transitions, Velocities


class FlowGRPO(TrajectoryObjective):
    """PPO's clipped surrogate on each stochastic step, plus β times the step's KL to the reference policy.

        L = mean_N [ −min(ρ A, clip(ρ, 1 − ε, 1 + ε) A) + β KL ],  ρ = exp(log p_θ − log p_old),
        KL = ‖μ_θ − μ_ref‖² / (2 std²)

    Log-probability and KL are means over a latent's dimensions, as in the released code: that is what its clip
    range of 1e-4 is for. The KL is the closed form between the two Gaussians, as in the paper; the released
    code's lacks the factor |dt| in std² = σ_t² |dt|, so the same β weighs more here by 1/|dt|. A is cut at
    ±`advantage_clip`. Whether A is relative to a group is the advantages' matter, not this class's.

    Needs a rollout with stochastic steps, and trains on nothing else.

    Args:
        clip_range: ε, 1e-6 to below 1. Released code: 1e-4, and 1e-5 for short windows.
        advantage_clip: above 0. Released code: 5.
        reference_coefficient: β, at least 0; at 0 the reference is never evaluated. Released code: 0.04 for
            GenEval and OCR, 0.01 for PickScore.
        old_log_prob: `recomputed` in the update's own micro-batches, or as recorded by the `rollout`; see
            `policy_gradient.OldLogProb`.

    Reference: Liu et al., "Flow-GRPO: Training flow matching models via online RL", 2025 (arXiv 2505.05470),
    and its released code.
    """

    def __init__(
        self,
        *,
        clip_range: float = 1.0e-4,
        advantage_clip: float = 5.0,
        reference_coefficient: float = 0.04,
        old_log_prob: OldLogProb = "recomputed",
    ) -> None:
        check_coefficients(clip_range=clip_range, advantage_clip=advantage_clip, old_log_prob=old_log_prob)
        if not reference_coefficient >= 0:
            raise ValueError(
                "model.objective.init_args.reference_coefficient: expected 0 or above, "
                f"got {reference_coefficient}"
            )
        self.clip_range, self.advantage_clip = clip_range, advantage_clip
        self.reference_coefficient = reference_coefficient
        self.needs_old = old_log_prob == "recomputed"

    @property
    def needs_reference(self) -> bool:
        """Whether the reference's velocity is asked for: not at coefficient 0."""
        return self.reference_coefficient > 0

    def loss(self, velocities: Velocities, samples: Transitions) -> Loss:
        """See the class; the mean over pairs."""
        terms = step_terms(velocities, samples)
        advantage_N = samples.advantage_N.clamp(-self.advantage_clip, self.advantage_clip)
        policy = clipped_surrogate(terms.log_ratio_N, advantage_N, clip_range=self.clip_range).mean()
        divergence = terms.divergence_N.mean()
        return Loss(
            total=policy + self.reference_coefficient * divergence,
            parts={
                "policy": policy.detach(),
                "divergence_from_reference": divergence.detach(),
                **ratio_parts(terms, clip_range=self.clip_range),
            },
        )
