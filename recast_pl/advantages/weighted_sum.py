"""Mix the raw scores, then standardise the sum."""

import torch
from torch import Tensor

from recast_pl.advantages.base import Advantages, group_z_scores
from recast_pl.types import Scores, Weights


class WeightedSum(Advantages):
    """Mix the raw scores by K·W at each step, then standardise the sum within the group: the released order.

    The reward with the larger spread then has the larger say: its effective budget is about λ·spread. A sample
    with any masked score of non-zero weight has no sum and gets advantage 0.

    Reference: the `pre` aggregation of ReCAST's released code (arXiv 2609.13425).
    """

    def mix(self, scores: Scores, group_B: Tensor, weights: Weights) -> Tensor:
        """See the class."""
        W_RK = weights.values_RK.to(scores.values_RB.device)
        values_RB = torch.where(scores.valid_RB, scores.values_RB.double(), 0.0)
        used_R = W_RK.abs().sum(1) > 0
        valid_B = scores.valid_RB[used_R].all(0)
        mixed_KB = W_RK.T @ values_RB
        return group_z_scores(mixed_KB, valid_B.expand_as(mixed_KB), group_B).T
