"""Which (sample, step) pairs an iteration trains on, and at which of its updates.

Shape suffixes: B samples, K denoising steps, S trained steps of a sample, G groups of k samples, N pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recast_pl.noise import Purpose, keyed_subset
from recast_pl.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """N trained (sample, step) pairs of this process's rollout."""

    row_N: Tensor  # int64, row of the rollout
    step_N: Tensor  # int64, denoising step
    owner_N: Tensor  # int64, the sample (or group) whose steps were drawn, counted over all processes
    place_N: Tensor  # int64, which of its owner's trained steps, from 0
    steps: int  # trained steps of each owner, S
    block: int = 1  # so many pairs after one another belong together: no split cuts them

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
            yield self._at(slice(start, start + size))

    def shares(self, updates: int) -> Iterator["Pairs"]:
        """The pairs of each update; an update has its share of every sample's steps where these divide evenly.

        Which update a pair belongs to follows from its sample's number and its place among the sample's steps
        alone, so it does not depend on how samples are spread over processes.
        """
        if updates == 1:
            yield self
            return
        even = self.steps % updates == 0
        number_N = self.owner_N + self.place_N if even else self.owner_N * self.steps + self.place_N
        for update in range(updates):
            chosen = (number_N % updates == update).nonzero().flatten()
            if len(chosen):
                yield self._at(chosen)

    def _at(self, index: slice | Tensor) -> "Pairs":
        return replace(
            self,
            row_N=self.row_N[index],
            step_N=self.step_N[index],
            owner_N=self.owner_N[index],
            place_N=self.place_N[index],
        )


def trainable_steps(levels: Tensor, *, min_noise_level: float) -> Tensor:
    """Indices of the steps that start at `min_noise_level` or above."""
    return (levels[:-1] >= min_noise_level).nonzero().flatten()


def training_pairs(
    rollout: Rollout,
    *,
    timesteps_per_sample: int | None,
    min_noise_level: float,
    seed: int,
    whole_groups: bool = False,
) -> Pairs:
    """For each sample its steps: all trainable ones, or a keyed subset of `timesteps_per_sample`.

    Of a rollout with a trajectory these are the stochastic ones: the others have no log-probability.

    Args:
        rollout: this process's samples.
        timesteps_per_sample: steps for each sample; None: all trainable ones.
        min_noise_level: steps that start below are not trained.
        seed: of the run.
        whole_groups: draw the steps for each group instead (all its samples are trained at the same ones), and
            let the pairs of one group at one step follow one another as a block.

    Raises:
        ValueError: with `whole_groups`, where this process's groups are not of one size.
    """
    batch = rollout.batch
    if rollout.trajectory is None:
        steps_K = trainable_steps(rollout.levels, min_noise_level=min_noise_level)
        steps_BK = steps_K.expand(len(batch), -1)
    else:
        steps_BK = rollout.trajectory.first_B[:, None] + torch.arange(rollout.trajectory.log_prob_BS.shape[1])
    total = steps_BK.shape[1]
    count = total if timesteps_per_sample is None else min(timesteps_per_sample, total)
    rows_Gk = _rows_by_group(batch.group_B) if whole_groups else torch.arange(len(batch))[:, None]
    owner_G = (batch.group_B if whole_groups else batch.sample_B)[rows_Gk[:, 0]]
    chosen_GS = keyed_subset(
        total,
        count,
        seed=seed,
        iteration=batch.iteration,
        samples=owner_G.tolist(),
        purpose=Purpose.STEPS,
    )
    step_GS = steps_BK[rows_Gk[:, 0]].gather(1, chosen_GS)
    shape = (len(rows_Gk), count, rows_Gk.shape[1])
    return Pairs(
        row_N=rows_Gk[:, None, :].expand(shape).flatten(),
        step_N=step_GS[:, :, None].expand(shape).flatten(),
        owner_N=owner_G[:, None, None].expand(shape).flatten(),
        place_N=torch.arange(count)[None, :, None].expand(shape).flatten(),
        steps=count,
        block=shape[2],
    )


def _rows_by_group(group_B: Tensor) -> Tensor:
    """The rows of each group, G × k, also where samples of groups are interleaved."""
    _, index_B, size_G = group_B.unique(return_inverse=True, return_counts=True)
    if len(size_G.unique()) > 1:
        raise ValueError(
            f"the objective compares whole groups, but this process holds groups of {size_G.tolist()} samples; "
            "data.num_groups × data.group_size must give every process whole groups of data.group_size"
        )
    rows_Gk: Tensor = index_B.argsort(stable=True).view(len(size_G), -1)
    return rows_Gk
