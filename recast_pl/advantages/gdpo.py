"""Standardise each reward within its group, mix, then standardise the mixture over the batch."""

from torch import Tensor

from recast_pl.advantages.base import Advantages, batch_spread, group_z_scores, mixed
from recast_pl.types import Scores


class GDPO(Advantages):
    """Group z-scores of each reward, mixed by K·W at each step, over the mixture's spread in the whole batch.

        A_bk = a_bk / spread_b(a_bk),  a_bk = Σ_r KW_rk z_rb

    The last step gives every denoising step advantages of spread 1, whether rewards agree there (a has the
    spread 1) or conflict (a is small). The batch's mean is not taken off: it is 0, as z-scores of every group
    sum to 0, and rounding would move groups that are exactly 0. A sample with no valid score of non-zero weight
    does not count in the spread.

    Reference: Liu et al., "GDPO: Group reward-decoupled normalization policy optimization", 2026 (arXiv
    2601.05242). The mixture by K·W at each step, in place of one weight for each reward, is our reading.
    """

    def per_reward(self, scores: Scores, group_B: Tensor) -> Tensor:
        """See the class."""
        return group_z_scores(scores.values_RB, scores.valid_RB, group_B)

    def mix(self, per_reward_RB: Tensor, shares_RBK: Tensor, scores: Scores, group_B: Tensor) -> Tensor:
        """See the class."""
        mixed_KB = mixed(per_reward_RB, shares_RBK).T
        used_RB = shares_RBK.abs().sum(-1) > 0  # of one table for all samples, or of each one's own
        counted_B = (scores.valid_RB & used_RB.to(scores.valid_RB.device)).any(0)
        return (mixed_KB / batch_spread(mixed_KB, counted_B.expand_as(mixed_KB))).T
