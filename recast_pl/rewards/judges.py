"""The second suite: rewards that judge and never reach the objective."""

from typing import Literal

from recast_pl.rewards.base import Reward
from recast_pl.rewards.suite import RewardSuite


class JudgeSuite(RewardSuite):
    """Held-out judges of `test`. They have no budgets: nothing is optimised for them.

    Args:
        rewards: by name; may be empty where nothing is tested.
        micro_batch_size: pictures that a judge sees at a time.
        on_failure: `raise` or `mask`; see `RewardSuite`.
    """

    def __init__(
        self,
        *,
        rewards: dict[str, Reward] | None = None,
        micro_batch_size: int = 64,
        on_failure: Literal["raise", "mask"] = "raise",
    ) -> None:
        self.rewards = dict(rewards or {})
        self.budgets = dict.fromkeys(self.rewards, 0.0)
        self.micro_batch_size, self.on_failure = micro_batch_size, on_failure
        self.seconds = dict.fromkeys(self.rewards, 0.0)
        self._device = None
