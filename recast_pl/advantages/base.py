"""Advantages: how much better than its group a sample is, for each reward, mixed for each step by W.

Shape suffixes: R rewards, B samples, K denoising steps. Groups are integers, never texts.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from recast_pl.shapes import check_shapes
from recast_pl.types import Scores, Weights

SPREAD_FLOOR = 1e-6  # below this spread a group is constant and its advantages are exactly 0
RELATIVE_FLOOR = 1e-6  # … or below this share of its largest score: float32 rounding is no signal


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Each entry's place in its group, over valid entries; all float64 and of the shape of the values."""

    count: Tensor  # valid entries of the group, at least 1
    deviation: Tensor  # x − the group's mean; 0 where not valid
    spread: Tensor  # the group's population spread; infinite where that is 0 or rounding noise


def group_statistics(values: Tensor, valid: Tensor, group_B: Tensor) -> GroupStatistics:
    """Counts, deviations and spreads within each group, over valid entries.

    Args:
        values: [..., B], any number of leading dimensions; entries that are not valid are not read.
        valid: bool, the shape of `values`.
        group_B: int64 group of each sample, in any order.
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
    spread = _without_rounding_noise(spread, largest)
    return GroupStatistics(count=count.gather(-1, index), deviation=deviation, spread=spread.gather(-1, index))


def _without_rounding_noise(spread: Tensor, largest: Tensor) -> Tensor:
    constant = spread <= torch.maximum(largest * RELATIVE_FLOOR, torch.full_like(spread, SPREAD_FLOOR))
    return torch.where(constant, torch.inf, spread)


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
    statistics = group_statistics(values, valid, group_B)
    return statistics.deviation / statistics.spread


def batch_spread(values: Tensor, valid: Tensor) -> Tensor:
    """Population spread over all valid entries, [..., 1], float64; infinite where it is rounding noise.

    >>> batch_spread(torch.tensor([[1.0, 3.0, 7.0]]), torch.tensor([[True, True, False]])).tolist()
    [[1.0]]
    """
    x = torch.where(valid, values.double(), 0.0)
    count = valid.double().sum(-1, keepdim=True).clamp_min(1)
    deviation = torch.where(valid, x - x.sum(-1, keepdim=True) / count, 0.0)
    spread = (deviation.square().sum(-1, keepdim=True) / count).sqrt()
    return _without_rounding_noise(spread, x.abs().amax(-1, keepdim=True))


class Advantages(ABC):
    """Turns scores and W into one advantage for each sample and step.

    Rewards are mixed, and the mixture standardised where a subclass does so, by W's *shares*; how much a step
    counts multiplies afterwards. A weight over time alone so has its effect whatever is standardised.

    Args:
        clip: the mixed advantages are cut to ±clip, before the step's weight; None: they are not.
    """

    def __init__(self, *, clip: float | None = None) -> None:
        if clip is not None and not (clip > 0 and math.isfinite(clip)):
            raise ValueError(f"model.advantages.init_args.clip: expected above 0, or null, got {clip}")
        self.clip = clip

    def __call__(self, scores: Scores, group_B: Tensor, weights: Weights) -> Tensor:
        """Advantages [B, K], float64, from the scores of whole groups.

        Args:
            scores: of B samples, of the same rewards in the same order as W's.
            group_B: int64 group of each sample, in any order.
            weights: one table for all samples, or one for each of the B.

        Raises:
            ValueError: where rewards or shapes do not fit; names both.
        """
        if scores.names != weights.names:
            raise ValueError(
                f"the scores are of the rewards {', '.join(scores.names)}, W is of {', '.join(weights.names)}; "
                "expected the same rewards in the same order"
            )
        check_shapes(values_RB=scores.values_RB, valid_RB=scores.valid_RB, group_B=group_B)
        shares_RBK, step_BK = weights.shares_RBK, weights.step_weights_BK
        if not {shares_RBK.shape[1], step_BK.shape[0]} <= {1, len(group_B)}:
            raise ValueError(
                f"W's shares and step weights: expected one table, or one for each of {len(group_B)} samples, "
                f"got {shares_RBK.shape[1]} and {step_BK.shape[0]}"
            )
        per_reward_RB = self.per_reward(scores, group_B)
        mixed_BK = self.mix(per_reward_RB, shares_RBK.to(per_reward_RB), scores, group_B)
        clipped_BK = mixed_BK if self.clip is None else mixed_BK.clamp(-self.clip, self.clip)
        return clipped_BK * step_BK.to(clipped_BK)

    @abstractmethod
    def per_reward(self, scores: Scores, group_B: Tensor) -> Tensor:
        """Each reward's own advantages [R, B], float64; 0 where a score is not valid."""

    def mix(self, per_reward_RB: Tensor, shares_RBK: Tensor, scores: Scores, group_B: Tensor) -> Tensor:
        """Advantages [B, K] before clip and step weights: Σ_r share_rbk · A_rb."""
        return mixed(per_reward_RB, shares_RBK)


def mixed(values_RB: Tensor, shares_RBK: Tensor) -> Tensor:
    """Σ_r share_rbk · value_rb, [B, K]; the shares are one table for all samples, or one for each.

    >>> mixed(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[[0.5]], [[0.5]]])).tolist()
    [[2.0], [3.0]]
    """
    if shares_RBK.shape[1] == 1:
        return values_RB.T @ shares_RBK[:, 0]
    return torch.einsum("rb,rbk->bk", values_RB, shares_RBK)
