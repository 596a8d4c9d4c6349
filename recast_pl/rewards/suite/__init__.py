"""The RewardSuite: rewards in batches, failures apart from scores; and the suite of judges."""

from recast_pl.rewards.suite.failure_policy import RewardFailure, RewardOptions
from recast_pl.rewards.suite.judges import JudgeSuite
from recast_pl.rewards.suite.suite import RewardSuite

__all__ = ["JudgeSuite", "RewardFailure", "RewardOptions", "RewardSuite"]
