"""How fast the old policy, which collects rollouts, follows the trained one."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OldPolicyRamp:
    """decay_i = min(slope · i, maximum) in θ_old ← decay_i θ_old + (1 − decay_i) θ after iteration i.

    At slope 0 the old policy equals the trained one, and training is on-policy (and tends to collapse); at a
    high maximum it is slow.

    Args:
        slope: per iteration, at least 0.
        maximum: in [0, 1).

    Reference: Zheng et al., "DiffusionNFT", 2025, soft update of the sampling policy.
    """

    slope: float = 0.001
    maximum: float = 0.5

    def __post_init__(self) -> None:
        if self.slope < 0:
            raise ValueError(f"model.old_policy.slope: expected 0 or more, got {self.slope}")
        if not 0 <= self.maximum < 1:
            raise ValueError(f"model.old_policy.maximum: expected 0 to below 1, got {self.maximum}")

    def decay(self, iteration: int) -> float:
        """The decay after iteration i, counted from 0.

        >>> OldPolicyRamp(slope=0.01, maximum=0.5).decay(20)
        0.2
        """
        return min(self.slope * iteration, self.maximum)
