"""Schedules of noise levels: rows for samples of different numbers of steps, and which step a level belongs to.

Shape suffixes: B samples, K denoising steps, T = K + 1 levels around them, N any number of levels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SAME_LEVEL = 1e-6  # float32's rounding of a level in (0, 1]; schedules are coarser by far


def shared_schedule(levels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """One schedule for all of `count` samples: levels [B, T] and their numbers of steps [B].

    >>> levels_BT, steps_B = shared_schedule(torch.tensor([1.0, 0.5, 0.0]), 2)
    >>> levels_BT.tolist(), steps_B.tolist()
    ([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0]], [2, 2])
    """
    return levels.expand(count, -1), torch.full((count,), len(levels) - 1)


def padded_schedules(schedules: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Schedules of different lengths as rows, with zeros after a row's own end: [B, T], and its steps [B].

    >>> levels_BT, steps_B = padded_schedules([torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.5, 0.0])])
    >>> levels_BT.tolist(), steps_B.tolist()
    ([[1.0, 0.0, 0.0], [1.0, 0.5, 0.0]], [1, 2])
    """
    levels_BT = torch.nn.utils.rnn.pad_sequence(list(schedules), batch_first=True)
    return levels_BT, torch.tensor([len(levels) - 1 for levels in schedules])


def counted_steps(levels_BT: Tensor, steps_B: Tensor) -> Tensor:
    """Which of the K places of each row are steps of its schedule, and no padding: [B, K], bool."""
    return torch.arange(levels_BT.shape[1] - 1) < steps_B[:, None]


def columns_at(levels: Tensor, t_N: Tensor) -> Tensor:
    """The step of a schedule that each noise level falls into: j with levels[j] ≥ t > levels[j + 1]; int64.

    A level above the first belongs to the first step, one at or below the end to the last.

    Args:
        levels: K + 1 falling noise levels.
        t_N: noise levels, of any dtype.

    >>> columns_at(torch.tensor([1.0, 0.8, 0.3, 0.0]), torch.tensor([1.0, 0.9, 0.8, 0.3, 0.1])).tolist()
    [0, 0, 1, 2, 2]
    """
    inner = levels[1:-1].double()
    above_NK = t_N.double()[:, None] <= inner.to(t_N.device) + SAME_LEVEL
    return above_NK.sum(1)
