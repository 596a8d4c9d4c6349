"""What an estimator may look at: an iteration's clean samples, and what can be asked about them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recast_pl.types import Experience, Prompt, Scores, TextEmbeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """An iteration's clean samples, and what an estimator may do with them."""

    experience: Experience
    levels: Tensor  # K + 1, of W's columns
    iteration: int  # that asks
    velocity: Callable[[Tensor, float, TextEmbeddings], Tensor]  # of the rollout policy, as it rolls out
    decode: Callable[[Tensor], Tensor]  # latents → pictures in [0, 1]
    score: Callable[[Tensor, tuple[Prompt, ...]], Scores]  # own pictures → scores of all processes' samples
    schedule: Callable[[int], Tensor]  # number of steps → noise levels
    seed: int

    def first(self, count: int) -> "Probe":
        """The same with each process's first `count` samples alone."""
        whole = self.experience
        size = len(whole.rollout.batch)
        if count >= size:
            return self
        kept = torch.arange(whole.scores.values_RB.shape[1]).view(-1, size)[:, :count].flatten()
        kept = kept.to(whole.scores.values_RB.device)
        scores = Scores(
            names=whole.scores.names,
            values_RB=whole.scores.values_RB[:, kept],
            valid_RB=whole.scores.valid_RB[:, kept],
        )
        start = whole.own.start // size * count
        experience = Experience(
            rollout=whole.rollout.rows(torch.arange(count)),
            scores=scores,
            group_B=whole.group_B[kept.to(whole.group_B.device)],
            own=slice(start, start + count),
        )
        return replace(self, experience=experience)
