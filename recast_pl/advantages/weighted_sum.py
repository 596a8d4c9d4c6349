"""Mix the raw scores, then standardise the sum."""

import torch
from torch import Tensor

from recast_pl.advantages.base import Advantages, group_z_scores, mixed
from recast_pl.types import Scores


class WeightedSum(Advantages):
    """Mix the raw scores by W's shares at each step, then standardise the sum in the group: the released order.

    The reward with the larger spread then has the larger say: its effective budget is about λ·spread. A sample
    with any masked score of non-zero weight has no sum and gets advantage 0.

    Reference: the `pre` aggregation of ReCAST's released code (arXiv 2609.13425).
    """

    def per_reward(self, scores: Scores, group_B: Tensor) -> Tensor:
        """The raw scores."""
        return torch.where(scores.valid_RB, scores.values_RB.double(), 0.0)

    def mix(self, per_reward_RB: Tensor, shares_RBK: Tensor, scores: Scores, group_B: Tensor) -> Tensor:
        """See the class."""
        used_RB = shares_RBK.abs().sum(-1) > 0  # of one table for all samples, or of each one's own
        valid_B = (scores.valid_RB | ~used_RB.to(scores.valid_RB.device)).all(0)
        mixed_KB = mixed(per_reward_RB, shares_RBK).T
        return group_z_scores(mixed_KB, valid_B.expand_as(mixed_KB), group_B).T
