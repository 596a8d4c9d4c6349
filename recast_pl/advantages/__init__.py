"""Advantages: how much better than its group a sample is, for each reward, mixed for each step by K·W."""

from recast_pl.advantages.base import Advantages, group_z_scores
from recast_pl.advantages.batch_normalised import BatchNormalised
from recast_pl.advantages.gdpo import GDPO
from recast_pl.advantages.global_spread import GlobalSpread
from recast_pl.advantages.leave_one_out import LeaveOneOut, leave_one_out
from recast_pl.advantages.per_reward import PerReward
from recast_pl.advantages.weighted_sum import WeightedSum

__all__ = [
    "GDPO",
    "Advantages",
    "BatchNormalised",
    "GlobalSpread",
    "LeaveOneOut",
    "PerReward",
    "WeightedSum",
    "group_z_scores",
    "leave_one_out",
]
