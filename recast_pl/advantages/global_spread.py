"""The group's mean, but the whole batch's spread."""

import torch
from torch import Tensor

from recast_pl.advantages.base import Advantages, batch_spread, group_statistics
from recast_pl.types import Scores


class GlobalSpread(Advantages):
    """Take off each group's mean, divide by the batch's spread, then mix: A_bk = Σ_r KW_rk (x − x̄_group) / s_r.

    s_r is the population spread of the reward's raw scores over all groups. A prompt whose samples hardly
    differ then counts for little, where a spread of its own would blow its differences up. Where prompts differ
    more than samples of one prompt, advantages are small; every reward still is free of its scale.

    Reference: the `global_std` option of Flow-GRPO's code (Liu et al., "Flow-GRPO: Training flow matching
    models via online RL", 2025, arXiv 2505.05470), which AWM's recipes use, too; there for one sum of rewards,
    here for each reward before the mixture by K·W.
    """

    def per_reward(self, scores: Scores, group_B: Tensor) -> Tensor:
        """See the class."""
        statistics = group_statistics(scores.values_RB, scores.valid_RB, group_B)
        deviation_RB = torch.where(statistics.spread.isinf(), 0.0, statistics.deviation)
        return deviation_RB / batch_spread(scores.values_RB, scores.valid_RB)
