"""Each sample against the mean of the others in its group."""

import torch
from torch import Tensor

from recast_pl.advantages.base import Advantages, group_statistics
from recast_pl.types import Scores


def leave_one_out(values: Tensor, valid: Tensor, group_B: Tensor, *, divide: bool = False) -> Tensor:
    """Each value less the mean of its group's other valid values; `divide`: over the group's spread.

    With n valid values of the mean x̄, x_i − mean of the others = n / (n − 1) · (x_i − x̄).

    Args:
        values: [..., B], any number of leading dimensions; entries that are not valid are not read.
        valid: bool, the shape of `values`.
        group_B: int64 group of each sample, in any order.
        divide: by the population spread of the group, the sample itself included.

    Returns:
        float64 [..., B]; exactly 0 where not valid, in groups with one valid sample, and in groups whose
        spread is rounding noise.

    >>> leave_one_out(torch.tensor([[1.0, 2.0, 6.0]]), torch.ones(1, 3, dtype=torch.bool),
    ...               torch.tensor([3, 3, 3])).tolist()
    [[-3.0, -1.5, 4.5]]
    """
    statistics = group_statistics(values, valid, group_B)
    difference = statistics.deviation * statistics.count / (statistics.count - 1).clamp_min(1)
    if divide:
        return difference / statistics.spread
    return torch.where(statistics.spread.isinf(), 0.0, difference)


class LeaveOneOut(Advantages):
    """The difference to the mean of the group's others, mixed by K·W at each step.

    The baseline does not depend on the sample, so that the policy gradient is unbiased; a z-score's spread
    does depend on it. Without a division, rewards keep their scales: the effective budget of a reward is about
    λ·spread, and an objective that clips advantages sees them on the reward's scale.

    Args:
        divide: by the spread of the group, so that budgets count alike for all rewards; PerReward's advantages
            times n / (n − 1).
        clip: the mixed advantages are cut to ±clip; None: they are not.

    Reference: Kool, van Hoof and Welling, "Buy 4 REINFORCE samples, get a baseline for free!", 2019; Ahmadian
    et al., "Back to basics: Revisiting REINFORCE-style optimization for learning from human feedback in LLMs",
    2024 (arXiv 2402.14740). The mixture by K·W and the division are ours.
    """

    def __init__(self, *, divide: bool = False, clip: float | None = None) -> None:
        super().__init__(clip=clip)
        self.divide = divide

    def per_reward(self, scores: Scores, group_B: Tensor) -> Tensor:
        """See the class."""
        return leave_one_out(scores.values_RB, scores.valid_RB, group_B, divide=self.divide)
