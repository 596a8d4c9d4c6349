"""Micro-batches of an iteration's updates, as many on every process, however its pairs are spread.

Processes that share a model meet in each pass (gathering its shards, exchanging gradients), so they must make
the same number of them: one that has fewer pairs passes some for nothing.

Shape suffixes: P processes, U updates of an iteration, N pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from recast_pl.update.pairs import Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One micro-batch on this process."""

    pairs: Pairs
    weight: float  # of its mean loss in this process's part of the update's gradient; 0 for padding
    share: float  # … in the iteration's logged means

    @property
    def padding(self) -> bool:
        """Whether it is there so that no other process waits, and counts for nothing."""
        return self.weight == 0


def planned_passes(
    pairs: Pairs, *, spare: Pairs, updates: int, size: int, gathered: Callable[[Tensor], Tensor]
) -> list[list[Pass]]:
    """The passes of each update, as many on every process; updates without any pair are left out.

    Gradients are averaged over processes, so a pair weighs P / N of all N pairs of its update: the mean over
    all processes' pairs is the same however they are spread.

    Args:
        pairs: of this process; none is possible where others have some.
        spare: what a pass that counts for nothing goes through; see `spare_pairs`.
        updates: of the iteration.
        size: pairs of one pass at most.
        gathered: a tensor of this process to those of all, [P, …].

    Raises:
        ValueError: where `size` does not hold one block of pairs, or no process has a pair.
    """
    parts = [list(share.split(size)) for share in pairs.shares(updates)]
    counts = [[sum(map(len, passes)), len(passes)] for passes in parts]
    counts_PU2 = gathered(torch.tensor(counts)).cpu()
    processes = len(counts_PU2)
    pairs_U: list[int] = counts_PU2[..., 0].sum(0).tolist()
    passes_U: list[int] = counts_PU2[..., 1].amax(0).tolist()

    if not sum(pairs_U):
        raise ValueError("model.min_noise_level: no step of any sample can be trained")

    def counted(part: Pairs, of: int) -> Pass:
        own = len(part) * processes
        return Pass(pairs=part, weight=own / of, share=own / sum(pairs_U))

    nothing = Pass(pairs=spare, weight=0.0, share=0.0)
    return [
        [counted(part, of) for part in own] + [nothing] * (most - len(own))
        for own, of, most in zip(parts, pairs_U, passes_U, strict=True)
        if of
    ]
