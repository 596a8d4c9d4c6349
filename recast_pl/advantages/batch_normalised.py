"""One mean and one spread for the whole batch, whatever the prompt."""

import torch
from torch import Tensor

from recast_pl.advantages.base import Advantages, group_z_scores
from recast_pl.types import Scores


class BatchNormalised(Advantages):
    """Standardise each reward over all samples of the iteration, whatever their prompt, then mix by K·W.

    Prompts that score high by nature then draw the policy less than prompts' groups would: the baseline is one
    number for all. For objectives without groups. A masked score counts as in `PerReward`.

    Reference: Black et al., "Training diffusion models with reinforcement learning", 2023 (arXiv 2305.13301);
    the authors' code has it beside a mean and spread of each prompt over iterations.
    """

    def per_reward(self, scores: Scores, group_B: Tensor) -> Tensor:
        """See the class."""
        return group_z_scores(scores.values_RB, scores.valid_RB, torch.zeros_like(group_B))
