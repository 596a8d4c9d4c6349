"""Which (sample, step) pairs an iteration trains on, and how a clean sample is brought back to a step's level.

Shape suffixes: B samples, K denoising steps, N pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from recast_pl.noise import Purpose, keyed_normal, keyed_subset
from recast_pl.types import NoisedSamples, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """N trained (sample, step) pairs of this process's rollout."""

    row_N: Tensor  # int64, row of the rollout
    step_N: Tensor  # int64, denoising step

    def __len__(self) -> int:
        return len(self.row_N)

    def split(self, size: int) -> Iterator["Pairs"]:
        """Consecutive parts of at most `size` pairs; the last may be smaller, none is dropped."""
        for rows, steps in zip(self.row_N.split(size), self.step_N.split(size), strict=True):
            yield Pairs(row_N=rows, step_N=steps)


def trainable_steps(levels: Tensor, *, min_noise_level: float) -> Tensor:
    """Indices of the steps that start at `min_noise_level` or above."""
    return (levels[:-1] >= min_noise_level).nonzero().flatten()


def training_pairs(
    rollout: Rollout, *, timesteps_per_sample: int | None, min_noise_level: float, seed: int
) -> Pairs:
    """For each sample its steps: all trainable ones, or a keyed subset of `timesteps_per_sample`."""
    steps = trainable_steps(rollout.levels, min_noise_level=min_noise_level)
    count = len(steps) if timesteps_per_sample is None else min(timesteps_per_sample, len(steps))
    chosen = keyed_subset(
        len(steps),
        count,
        seed=seed,
        iteration=rollout.batch.iteration,
        samples=rollout.batch.sample_B.tolist(),
        purpose=Purpose.STEPS,
    )
    rows = torch.arange(len(rollout.batch)).repeat_interleave(count)
    return Pairs(row_N=rows, step_N=steps[chosen.flatten()])


def renoise(rollout: Rollout, advantages_BK: Tensor, pairs: Pairs, *, seed: int) -> NoisedSamples:
    """The pairs' clean samples, fresh keyed noise, levels and advantages."""
    device = rollout.x0_BCHW.device
    noise_NCHW = keyed_normal(
        rollout.x0_BCHW.shape[1:],
        seed=seed,
        iteration=rollout.batch.iteration,
        samples=rollout.batch.sample_B[pairs.row_N].tolist(),
        steps=pairs.step_N.tolist(),
        purpose=Purpose.RENOISE,
    )
    return NoisedSamples(
        x0_NCHW=rollout.x0_BCHW[pairs.row_N.to(device)],
        noise_NCHW=noise_NCHW.to(device),
        t_N=rollout.levels[pairs.step_N].to(device, torch.float32),
        advantage_N=advantages_BK[pairs.row_N, pairs.step_N].to(device, torch.float32),
    )
