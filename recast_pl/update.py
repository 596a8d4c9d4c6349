"""Which (sample, step) pairs an iteration trains on, and how a clean sample is brought back to a step's level.

Shape suffixes: B samples, K denoising steps, N pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recast_pl.noise import Purpose, keyed_normal, keyed_subset
from recast_pl.types import NoisedSamples, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """N trained (sample, step) pairs of this process's rollout."""

    row_N: Tensor  # int64, row of the rollout
    step_N: Tensor  # int64, denoising step
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
        for rows, steps in zip(self.row_N.split(size), self.step_N.split(size), strict=True):
            yield replace(self, row_N=rows, step_N=steps)

    def shares(self, count: int) -> Iterator["Pairs"]:
        """At most `count` consecutive parts in whole blocks, equal but for the last."""
        blocks = len(self) // self.block
        return self.split(-(-blocks // count) * self.block)


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
    steps = trainable_steps(rollout.levels, min_noise_level=min_noise_level)
    count = len(steps) if timesteps_per_sample is None else min(timesteps_per_sample, len(steps))
    rows_Gk = _rows_by_group(batch.group_B) if whole_groups else torch.arange(len(batch))[:, None]
    owners_G = (batch.group_B if whole_groups else batch.sample_B)[rows_Gk[:, 0]]
    chosen_GK = keyed_subset(
        len(steps),
        count,
        seed=seed,
        iteration=batch.iteration,
        samples=owners_G.tolist(),
        purpose=Purpose.STEPS,
    )
    size = rows_Gk.shape[1]
    return Pairs(
        row_N=rows_Gk[:, None, :].expand(-1, count, -1).flatten(),
        step_N=steps[chosen_GK][:, :, None].expand(-1, -1, size).flatten(),
        block=size,
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


def check_whole_groups(*, num_groups: int, group_size: int, micro_batch_size: int, processes: int) -> None:
    """Refuses a geometry that an objective over whole groups cannot train with.

    Args:
        num_groups: of an iteration, over all processes.
        group_size: samples of each group.
        micro_batch_size: pairs in one backward pass.
        processes: that share an iteration.

    Raises:
        ValueError: where a micro-batch does not hold a group, or groups are split over processes.
    """
    if micro_batch_size < group_size:
        raise ValueError(
            f"model.micro_batch_size: {micro_batch_size} pairs do not hold a group of {group_size} samples "
            "(data.group_size), and model.objective compares whole groups; take a multiple of "
            f"{group_size}, or smaller groups"
        )
    if num_groups % processes:
        raise ValueError(
            f"data.num_groups: {num_groups} groups of {group_size} samples (data.group_size) split over "
            f"{processes} processes, and model.objective compares whole groups; take a multiple of {processes}"
        )


def renoise(
    rollout: Rollout, advantages_BK: Tensor, pairs: Pairs, *, seed: int, shared_noise: bool = False
) -> NoisedSamples:
    """The pairs' clean samples, fresh keyed noise, levels and advantages.

    With `shared_noise`, the samples of one group at one step get the same noise.
    """
    device, batch = rollout.x0_BCHW.device, rollout.batch
    group_N = batch.group_B[pairs.row_N]
    noise_NCHW = keyed_normal(
        rollout.x0_BCHW.shape[1:],
        seed=seed,
        iteration=batch.iteration,
        samples=(group_N if shared_noise else batch.sample_B[pairs.row_N]).tolist(),
        steps=pairs.step_N.tolist(),
        purpose=Purpose.RENOISE,
    )
    return NoisedSamples(
        x0_NCHW=rollout.x0_BCHW[pairs.row_N.to(device)],
        noise_NCHW=noise_NCHW.to(device),
        t_N=rollout.levels[pairs.step_N].to(device, torch.float32),
        advantage_N=advantages_BK[pairs.row_N, pairs.step_N].to(device, torch.float32),
        group_N=group_N.to(device),
    )
