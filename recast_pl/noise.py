"""Keyed randomness: every draw is a function of (seed, iteration, sample, step) and of what it is for.

No hidden state: a run does not depend on the number of processes, and resuming needs no generator.
"""

import hashlib
from collections.abc import Iterable, Sequence
from enum import IntEnum, unique

import torch
from torch import Tensor


@unique
class Purpose(IntEnum):
    """What a draw is for, so that no two uses of one sample share their noise."""

    START = 0  # the rollout's first latent
    RENOISE = 1  # the noise that brings a clean sample back to level t
    STEPS = 2  # which denoising steps a sample is trained at
    PROMPTS = 3  # the order of prompts
    PROBE = 4  # the noise that brings a clean sample to a level where credit looks at it
    COMPLETE = 5  # the noise of stochastic completions from there
    STEP = 6  # the noise of a rollout's stochastic step
    WINDOW = 7  # where a group's stochastic steps lie


def keyed_generator(*key: int) -> torch.Generator:
    """A CPU generator seeded by the whole key (a digest, so that neighbouring keys share nothing)."""
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def keyed_normal(
    shape: Sequence[int],
    *,
    seed: int,
    iteration: int,
    samples: Iterable[int],
    purpose: Purpose,
    steps: Iterable[int] | None = None,
    drawn: Iterable[int] | None = None,
) -> Tensor:
    """Standard normal noise [N, *shape] (float32, on the CPU): row n depends on its own key alone.

    Args:
        shape: of one sample, without the batch.
        seed: of the run.
        iteration: of the run.
        samples: N sample indices.
        purpose: what the noise is for.
        steps: N denoising steps, where the noise belongs to one.
        drawn: the N iterations that drew the samples, where these may be stored ones: a sample's index is its
            own within one iteration alone. One that this iteration drew has the noise it has without `drawn`.

    >>> one = keyed_normal((2,), seed=1, iteration=0, samples=[7], purpose=Purpose.START)
    >>> two = keyed_normal((2,), seed=1, iteration=0, samples=[3, 7], purpose=Purpose.START)
    >>> bool((one[0] == two[1]).all())
    True
    """
    samples = list(samples)
    steps = [-1] * len(samples) if steps is None else list(steps)
    drawn = [iteration] * len(samples) if drawn is None else list(drawn)
    rows = [
        torch.randn(
            tuple(shape),
            generator=keyed_generator(seed, iteration, sample, step, purpose, *_stored(origin, iteration)),
        )
        for sample, step, origin in zip(samples, steps, drawn, strict=True)
    ]
    return torch.stack(rows) if rows else torch.empty(0, *shape)


def keyed_subset(
    total: int,
    count: int,
    *,
    seed: int,
    iteration: int,
    samples: Iterable[int],
    purpose: Purpose,
    drawn: Iterable[int] | None = None,
) -> Tensor:
    """`count` of the indices 0 … total − 1 for each sample, without repetition, ascending: [N, count]."""
    samples = list(samples)
    drawn = [iteration] * len(samples) if drawn is None else list(drawn)
    rows = [
        torch.randperm(
            total, generator=keyed_generator(seed, iteration, sample, -1, purpose, *_stored(origin, iteration))
        )[:count]
        .sort()
        .values
        for sample, origin in zip(samples, drawn, strict=True)
    ]
    return torch.stack(rows) if rows else torch.empty(0, count, dtype=torch.int64)


def _stored(drawn: int, iteration: int) -> tuple[int, ...]:
    """What a stored sample's key has beside those of this iteration's samples."""
    return () if drawn == iteration else (drawn,)
