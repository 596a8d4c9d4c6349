"""Which (sample, step) pairs an iteration trains on, and at which of its updates.

Each sample has a schedule of its own, and may have been drawn by an earlier iteration: which of its steps are
trained is drawn anew in every iteration that trains it.

Shape suffixes: B samples, K denoising steps, G groups of k samples, N pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recast_pl.noise import Purpose, keyed_subset
from recast_pl.schedule import columns_at
from recast_pl.shapes import check_shapes
from recast_pl.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """N trained (sample, step) pairs of this process's rollout."""

    iteration: int  # that trains them
    row_N: Tensor  # int64, row of the rollout
    step_N: Tensor  # int64, denoising step of the sample's own schedule
    t_N: Tensor  # float64, the noise level that the step leaves
    t_next_N: Tensor  # float64, and the one it leads to
    column_N: Tensor  # int64, the column of W that the step belongs to
    owner_N: Tensor  # int64, the sample (or group) whose steps were drawn, counted over all processes
    place_N: Tensor  # int64, which of its owner's trained steps, from 0
    count_N: Tensor  # int64, how many trained steps its owner has
    block: int = 1  # so many pairs after one another belong together: no split cuts them

    def __post_init__(self) -> None:
        check_shapes(
            row_N=self.row_N,
            step_N=self.step_N,
            t_N=self.t_N,
            t_next_N=self.t_next_N,
            column_N=self.column_N,
            owner_N=self.owner_N,
            place_N=self.place_N,
            count_N=self.count_N,
        )

    def __len__(self) -> int:
        return len(self.row_N)

    def split(self, size: int) -> Iterator["Pairs"]:
        """Consecutive parts of at most `size` pairs in whole blocks; the last may be smaller, none is dropped.

        Raises:
            ValueError: where `size` does not hold one block.
        """
        if size < self.block:
            raise ValueError(
                f"model.micro_batch_size: {size} pairs do not hold a group of {self.block}, and the objective "
                f"compares whole groups; take {self.block} (data.group_size) or a multiple of it"
            )
        size -= size % self.block
        for start in range(0, len(self), size):
            yield self.at(slice(start, start + size))

    def shares(self, updates: int) -> Iterator["Pairs"]:
        """The pairs of each update, perhaps none; it has its share of every sample's steps if these divide.

        Which update a pair belongs to follows from its sample's number, its place among the sample's steps and
        how many these are, so it does not depend on how samples are spread over processes.
        """
        if updates == 1:
            yield self
            return
        even_N = self.count_N % updates == 0
        number_N = torch.where(even_N, self.owner_N, self.owner_N * self.count_N) + self.place_N
        for update in range(updates):
            yield self.at((number_N % updates == update).nonzero().flatten())

    def at(self, index: slice | Tensor) -> "Pairs":
        """Some of the pairs."""
        fields = ("row_N", "step_N", "t_N", "t_next_N", "column_N", "owner_N", "place_N", "count_N")
        return replace(self, **{name: getattr(self, name)[index] for name in fields})


def training_pairs(
    rollout: Rollout,
    *,
    iteration: int,
    trainable_BK: Tensor,
    levels: Tensor,
    timesteps_per_sample: int | None,
    seed: int,
    whole_groups: bool = False,
) -> Pairs:
    """For each sample its steps: all trainable ones, or a keyed subset of `timesteps_per_sample`.

    The subset is keyed by the iteration that trains, the sample and the iteration that drew it.

    Args:
        rollout: this process's samples.
        iteration: that trains them.
        trainable_BK: bool, which steps of each sample's own schedule may be trained.
        levels: the noise levels of W's columns.
        timesteps_per_sample: steps for each sample, fewer where it has fewer; None: all trainable ones.
        seed: of the run.
        whole_groups: draw the steps for each group instead (all its samples are trained at the same ones), and
            let the pairs of one group at one step follow one another as a block.

    Raises:
        ValueError: with `whole_groups`, where this process's groups are not of one size, or samples of a group
            differ in their schedules or in the iteration that drew them.
    """
    batch = rollout.batch
    check_shapes(trainable_BK=trainable_BK, sample_B=batch.sample_B)
    rows_Gk = _groups(rollout, trainable_BK) if whole_groups else torch.arange(len(batch))[:, None]
    key_B = batch.group_B if whole_groups else batch.sample_B
    rows, steps, places, counts = [], [], [], []
    for rows_k in rows_Gk:
        first = rows_k[:1]
        trainable = trainable_BK[first[0]].nonzero().flatten()
        chosen = keyed_subset(
            len(trainable),
            len(trainable) if timesteps_per_sample is None else min(timesteps_per_sample, len(trainable)),
            seed=seed,
            iteration=iteration,
            samples=key_B[first].tolist(),
            purpose=Purpose.STEPS,
            drawn=rollout.drawn_B[first].tolist(),
        )[0]
        rows.append(rows_k.repeat(len(chosen)))
        steps.append(trainable[chosen].repeat_interleave(len(rows_k)))
        places.append(torch.arange(len(chosen)).repeat_interleave(len(rows_k)))
        counts.append(torch.full_like(rows[-1], len(chosen)))
    row_N, step_N = torch.cat(rows), torch.cat(steps)
    t_N = rollout.levels_BT[row_N, step_N].double()
    return Pairs(
        iteration=iteration,
        row_N=row_N,
        step_N=step_N,
        t_N=t_N,
        t_next_N=rollout.levels_BT[row_N, step_N + 1].double(),
        column_N=columns_at(levels, t_N),
        owner_N=key_B[row_N],
        place_N=torch.cat(places),
        count_N=torch.cat(counts),
        block=rows_Gk.shape[1],
    )


def spare_pairs(rollout: Rollout, pairs: Pairs) -> Pairs:
    """One block of pairs of the first sample, for a pass that counts for nothing; `pairs` may be empty."""
    row_N = torch.zeros(pairs.block, dtype=torch.int64)
    first = 0 if rollout.trajectory is None else int(rollout.trajectory.first_B[0])
    step_N = torch.full_like(row_N, first)
    return Pairs(
        iteration=pairs.iteration,
        row_N=row_N,
        step_N=step_N,
        t_N=rollout.levels_BT[row_N, step_N].double(),
        t_next_N=rollout.levels_BT[row_N, step_N + 1].double(),
        column_N=torch.zeros_like(row_N),
        owner_N=rollout.batch.sample_B[row_N],
        place_N=torch.zeros_like(row_N),
        count_N=torch.ones_like(row_N),
        block=pairs.block,
    )


def _groups(rollout: Rollout, trainable_BK: Tensor) -> Tensor:
    """The rows of each group, G × k, also where samples of groups are interleaved."""
    _, index_B, size_G = rollout.batch.group_B.unique(return_inverse=True, return_counts=True)
    if len(size_G.unique()) > 1:
        raise ValueError(
            f"the objective compares whole groups, but this process holds groups of {size_G.tolist()} samples; "
            "data.num_groups × data.group_size must give every process whole groups of data.group_size"
        )
    rows_Gk: Tensor = index_B.argsort(stable=True).view(len(size_G), -1)
    for name, value in (
        ("noise levels", rollout.levels_BT),
        ("trainable steps", trainable_BK),
        ("iteration that drew them", rollout.drawn_B),
    ):
        if not (value[rows_Gk] == value[rows_Gk[:, :1]]).all():
            raise ValueError(
                f"the objective compares whole groups at one step, but samples of one group differ in their "
                f"{name}"
            )
    return rows_Gk
