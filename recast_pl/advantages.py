"""Advantages: how much better than its group a sample is, for each reward, mixed for each step by K·W.

Shape suffixes: R rewards, B samples, K denoising steps. Groups are integers, never texts.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from recast_pl.types import Scores, Weights

SPREAD_FLOOR = 1e-6  # below this spread a group is constant and its advantages are exactly 0
RELATIVE_FLOOR = 1e-6  # … or below this share of its largest score: float32 rounding is no signal


def group_z_scores(values: Tensor, valid: Tensor, group_B: Tensor) -> Tensor:
    """Standardises values within each group: (x − mean) / population spread, over valid entries.

    Args:
        values: [..., B], any number of leading dimensions; entries that are not valid are not read.
        valid: bool, the shape of `values`.
        group_B: int64 group of each sample, in any order.

    Returns:
        float64 [..., B]; exactly 0 where not valid, in groups with one valid sample, and in groups whose
        spread is rounding noise.

    >>> z = group_z_scores(torch.tensor([[1.0, 3.0, 5.0, 5.0]]), torch.ones(1, 4, dtype=torch.bool),
    ...                    torch.tensor([4, 4, 9, 9]))
    >>> z.tolist()
    [[-1.0, 1.0, 0.0, 0.0]]
    """
    _, index_B = group_B.unique(return_inverse=True)
    groups = int(index_B.max()) + 1 if index_B.numel() else 0
    x = torch.where(valid, values.double(), 0.0)
    index = index_B.expand(x.shape)

    def per_group(entries: Tensor) -> Tensor:
        total = torch.zeros(*x.shape[:-1], groups, dtype=torch.float64, device=x.device)
        return total.scatter_add_(-1, index, entries)

    count = per_group(valid.double()).clamp_min(1)
    mean = (per_group(x) / count).gather(-1, index)
    deviation = torch.where(valid, x - mean, 0.0)
    spread = (per_group(deviation.square()) / count).sqrt()
    largest = torch.zeros_like(spread).scatter_reduce_(-1, index, x.abs(), "amax")
    constant = spread <= torch.maximum(largest * RELATIVE_FLOOR, torch.full_like(spread, SPREAD_FLOOR))
    spread = torch.where(constant, torch.inf, spread)
    return deviation / spread.gather(-1, index)


class Advantages(ABC):
    """Turns scores and K·W into one advantage for each sample and step."""

    @abstractmethod
    def __call__(self, scores: Scores, group_B: Tensor, weights: Weights) -> Tensor:
        """Advantages [B, K], float64, from the scores of whole groups."""


class PerReward(Advantages):
    """Standardise each reward within its group, then mix by K·W at each step: A_bk = Σ_r KW_rk z_rb.

    Every reward then moves the policy by its budget, whatever its scale. A masked score leaves the mean of its
    own sample and reward: the weights of the others are not changed.

    Reference: after Liu et al., "GDPO: Group reward-decoupled normalization policy optimization", 2026
    (arXiv 2601.05242), without its last normalisation over the batch.
    """

    def __call__(self, scores: Scores, group_B: Tensor, weights: Weights) -> Tensor:
        """See the class."""
        z_RB = group_z_scores(scores.values_RB, scores.valid_RB, group_B)
        return z_RB.T @ weights.values_RK.to(z_RB)


class WeightedSum(Advantages):
    """Mix the raw scores by K·W at each step, then standardise the sum within the group: the released order.

    The reward with the larger spread then has the larger say: its effective budget is about λ·spread. A sample
    with any masked score of non-zero weight has no sum and gets advantage 0.

    Reference: the `pre` aggregation of ReCAST's released code (arXiv 2609.13425).
    """

    def __call__(self, scores: Scores, group_B: Tensor, weights: Weights) -> Tensor:
        """See the class."""
        W_RK = weights.values_RK.to(scores.values_RB.device)
        values_RB = torch.where(scores.valid_RB, scores.values_RB.double(), 0.0)
        used_R = W_RK.abs().sum(1) > 0
        valid_B = scores.valid_RB[used_R].all(0)
        mixed_KB = W_RK.T @ values_RB
        return group_z_scores(mixed_KB, valid_B.expand_as(mixed_KB), group_B).T
