"""Standardise each reward within its group, then mix."""

from torch import Tensor

from recast_pl.advantages.base import Advantages, group_z_scores
from recast_pl.types import Scores


class PerReward(Advantages):
    """Standardise each reward within its group, then mix by K·W at each step: A_bk = Σ_r KW_rk z_rb.

    Every reward then moves the policy by its budget, whatever its scale. A masked score leaves the mean of its
    own sample and reward: the weights of the others are not changed.

    Reference: after Liu et al., "GDPO: Group reward-decoupled normalization policy optimization", 2026
    (arXiv 2601.05242), without its last normalisation over the batch, which `GDPO` has.
    """

    def per_reward(self, scores: Scores, group_B: Tensor) -> Tensor:
        """See the class."""
        return group_z_scores(scores.values_RB, scores.valid_RB, group_B)
