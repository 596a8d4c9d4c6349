"""The second suite: rewards that judge and never reach the objective."""

from recast_pl.rewards.base import Reward
from recast_pl.rewards.suite.failure_policy import OnFailure, RewardOptions
from recast_pl.rewards.suite.suite import RewardSuite


class JudgeSuite(RewardSuite):
    """Held-out judges of `test`. They have no budgets: nothing is optimised for them.

    Args:
        rewards: by name; may be empty where nothing is tested.
        micro_batch_size: pictures that a judge sees at a time.
        on_failure: `raise` or `mask`; see `RewardSuite`.
        options: what differs for single judges, by name.
        progress_bar: show a bar for judging that takes longer than a few seconds.
    """

    block, needs_rewards = "judges", False

    def __init__(
        self,
        *,
        rewards: dict[str, Reward] | None = None,
        micro_batch_size: int = 64,
        on_failure: OnFailure = "raise",
        options: dict[str, RewardOptions] | None = None,
        progress_bar: bool = True,
    ) -> None:
        super().__init__(
            rewards=rewards or {},
            micro_batch_size=micro_batch_size,
            on_failure=on_failure,
            options=options,
            progress_bar=progress_bar,
        )
        self.budgets = dict.fromkeys(self.rewards, 0.0)
