"""What an estimator found, averaged over recomputations, and the profiles that follow from it.

Shape suffixes: R rewards, K denoising steps (column j belongs to the step's destination t_{j+1}).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recast_pl.credit.divergence import (
    divergence_of_moments,
    gains,
    inverse_variances,
    monotone,
    shrunk,
    signal_share,
)
from recast_pl.types import Experience, Prompt, PromptBatch, Rollout, Scores, TextEmbeddings

DETECTED = 3.0  # standard errors that a divergence must reach somewhere to be told from noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """An iteration's clean samples, and what an estimator may do with them."""

    experience: Experience
    velocity: Callable[[Tensor, float, TextEmbeddings], Tensor]  # of the rollout policy, as it rolls out
    decode: Callable[[Tensor], Tensor]  # latents → pictures in [0, 1]
    score: Callable[[Tensor, tuple[Prompt, ...]], Scores]  # own pictures → scores of all processes' samples
    schedule: Callable[[int], Tensor]  # number of steps → noise levels
    seed: int

    def first(self, count: int) -> "Probe":
        """The same with each process's first `count` samples alone."""
        whole = self.experience
        batch, size = whole.rollout.batch, len(whole.rollout.batch)
        if count >= size:
            return self
        kept = torch.arange(whole.scores.values_RB.shape[1]).view(-1, size)[:, :count].flatten()
        rollout = Rollout(
            batch=PromptBatch(
                iteration=batch.iteration,
                prompts=batch.prompts[:count],
                group_B=batch.group_B[:count],
                sample_B=batch.sample_B[:count],
            ),
            text=whole.rollout.text[:count],
            x0_BCHW=whole.rollout.x0_BCHW[:count],
            images_B3HW=whole.rollout.images_B3HW[:count],
            levels=whole.rollout.levels,
        )
        kept = kept.to(whole.scores.values_RB.device)
        scores = Scores(
            names=whole.scores.names,
            values_RB=whole.scores.values_RB[:, kept],
            valid_RB=whole.scores.valid_RB[:, kept],
        )
        start = whole.own.start // size * count
        experience = Experience(
            rollout=rollout,
            scores=scores,
            group_B=whole.group_B[kept.to(whole.group_B.device)],
            own=slice(start, start + count),
        )
        return replace(self, experience=experience)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Estimates of E[g^α], their standard errors, and what they cost."""

    names: tuple[str, ...]  # R
    levels: Tensor  # K + 1
    moments_RK: Tensor  # float64
    errors_RK: Tensor  # float64
    samples: int
    reward_calls: int  # pictures scored, by all rewards together
    seconds: float

    def __post_init__(self) -> None:
        for row, name in enumerate(self.names):
            if not (self.moments_RK[row].isfinite().all() and self.errors_RK[row].isfinite().all()):
                raise ValueError(f"the evidence on the reward {name!r} is not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Each reward's discriminability over noise levels."""

    names: tuple[str, ...]  # R
    levels: Tensor  # K + 1
    divergence_RK: Tensor  # as estimated
    errors_RK: Tensor  # standard errors of these
    monotone_RK: Tensor  # never falling towards clean
    gains_RK: Tensor  # of the monotone curve, shrunk by signal_R; rows sum to its last column
    signal_R: Tensor  # share of the gains' unevenness that is more than noise, in [0, 1]

    @property
    def total_R(self) -> Tensor:
        """D at clean: the whole discriminability."""
        return self.monotone_RK[:, -1]

    @property
    def undetected(self) -> tuple[str, ...]:
        """Rewards whose divergence is not told from 0 at any level."""
        return tuple(
            name
            for name, row, error in zip(self.names, self.divergence_RK, self.errors_RK, strict=True)
            if not _detected(row, error)
        )

    def half_level(self, row: int) -> float:
        """The noise level at which a reward's curve reaches half of its end (linear in t between levels)."""
        curve = torch.cat([torch.zeros(1, dtype=torch.float64), self.monotone_RK[row]])
        half = curve[-1] / 2
        if not half > 0:
            return float("nan")
        j = int((curve >= half).nonzero()[0])
        share = (half - curve[j - 1]) / (curve[j] - curve[j - 1])
        return float(self.levels[j - 1] + share * (self.levels[j] - self.levels[j - 1]))


def profile_of(evidence: Evidence, *, alpha: float, shrink: bool = True) -> Profile:
    """Divergences, their monotone projection, and gains shrunk towards an even profile by their noise.

    A reward that is not told from noise (no level reaches `DETECTED` standard errors) gets even gains.
    """
    divergence_RK = divergence_of_moments(evidence.moments_RK, alpha)
    errors_RK = evidence.errors_RK / evidence.moments_RK.clamp_min(1e-12) / (alpha - 1)
    monotone_RK, gains_RK = torch.empty_like(divergence_RK), torch.empty_like(divergence_RK)
    signal_R = torch.zeros(len(evidence.names), dtype=torch.float64)
    for r, (row, error) in enumerate(zip(divergence_RK, errors_RK, strict=True)):
        monotone_RK[r] = monotone(row, inverse_variances(error))
        raw_K = gains(monotone_RK[r])
        if _detected(row, error):
            signal_R[r] = signal_share(raw_K, error) if shrink else 1.0
        gains_RK[r] = shrunk(raw_K, float(signal_R[r]))
    return Profile(
        names=evidence.names,
        levels=evidence.levels,
        divergence_RK=divergence_RK,
        errors_RK=errors_RK,
        monotone_RK=monotone_RK,
        gains_RK=gains_RK,
        signal_R=signal_R,
    )


def _detected(divergence_K: Tensor, errors_K: Tensor) -> bool:
    return bool((divergence_K > DETECTED * errors_K).any())


class EvidenceAverage:
    """Evidence over recomputations: a weighted mean, in which what is older counts less.

    Args:
        memory: factor on the weight of all older evidence at each new one, in [0, 1]; 1 keeps everything (for
            a policy that does not change), 0 nothing.
    """

    def __init__(self, *, memory: float) -> None:
        if not 0 <= memory <= 1:
            raise ValueError(f"credit.strategy.init_args.memory: expected a number in [0, 1], got {memory}")
        self.memory = memory
        self.latest: Evidence | None = None
        self._weight = 0.0
        self._moments_RK = self._variances_RK = torch.zeros(0)

    def add(self, evidence: Evidence) -> Evidence:
        """Takes new evidence in and returns the average, its costs added up.

        Raises:
            ValueError: where it is of other rewards or noise levels than what is there; names both.
        """
        if self.latest is not None:
            check_same(self.latest, evidence.names, evidence.levels, what="the evidence so far")
            old = self.memory * self._weight
            weight = old + evidence.samples
            moments_RK = (old * self._moments_RK + evidence.samples * evidence.moments_RK) / weight
            variances_RK = (old / weight) ** 2 * self._variances_RK
            variances_RK = variances_RK + (evidence.samples / weight) ** 2 * evidence.errors_RK.square()
        else:
            weight, moments_RK = float(evidence.samples), evidence.moments_RK
            variances_RK = evidence.errors_RK.square()
        self._weight, self._moments_RK, self._variances_RK = weight, moments_RK, variances_RK
        self.latest = Evidence(
            names=evidence.names,
            levels=evidence.levels,
            moments_RK=moments_RK,
            errors_RK=variances_RK.sqrt(),
            samples=evidence.samples,
            reward_calls=evidence.reward_calls + (self.latest.reward_calls if self.latest else 0),
            seconds=evidence.seconds + (self.latest.seconds if self.latest else 0.0),
        )
        return self.latest

    def state_dict(self) -> dict[str, Any]:
        """Plain types and tensors."""
        if self.latest is None:
            return {}
        return {
            "names": list(self.latest.names),
            "levels": self.latest.levels,
            "weight": self._weight,
            "moments": self._moments_RK,
            "variances": self._variances_RK,
            "samples": self.latest.samples,
            "reward_calls": self.latest.reward_calls,
            "seconds": self.latest.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts `state_dict` back."""
        if not state:
            return
        self._weight = float(state["weight"])
        self._moments_RK, self._variances_RK = state["moments"], state["variances"]
        self.latest = Evidence(
            names=tuple(state["names"]),
            levels=state["levels"],
            moments_RK=self._moments_RK,
            errors_RK=self._variances_RK.sqrt(),
            samples=int(state["samples"]),
            reward_calls=int(state["reward_calls"]),
            seconds=float(state["seconds"]),
        )


def check_same(found: Any, names: tuple[str, ...], levels: Tensor, *, what: str) -> None:
    """Refuses a W, table or evidence of other rewards or another schedule.

    Raises:
        ValueError: naming both.
    """
    if tuple(found.names) != tuple(names):
        raise ValueError(
            f"{what} is of the rewards {', '.join(found.names)}, this run's are {', '.join(names)}"
        )
    if found.levels.shape != levels.shape or not torch.allclose(
        found.levels.double(), levels.double(), atol=1e-4
    ):
        raise ValueError(
            f"{what} is of the noise levels {[round(t, 4) for t in found.levels.tolist()]}, this run's are "
            f"{[round(t, 4) for t in levels.tolist()]} (model.rollout.init_args.num_steps and the scheduler)"
        )
