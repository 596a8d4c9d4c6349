"""What every estimator of discriminability profiles is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from recast_pl.credit.evidence import Evidence
from recast_pl.credit.mathematics.moments import UNKNOWN, Moment, Normalisation, TooFewScores
from recast_pl.credit.probe import Probe
from recast_pl.noise import Purpose, keyed_normal
from recast_pl.path import noised
from recast_pl.types import UpdatePart


class Tilt(Protocol):
    """Which divergence is asked for: its order and what makes a reward a density ratio."""

    alpha: float
    normalisation: Normalisation
    clip: float


class ProfileEstimator(ABC):
    """Measures E[g^α] for each reward at the destination of each denoising step.

    The coupling of x0 and x_t is the forward process: under a deterministic sampler x_t would determine x0 and
    every reward would seem known at the first step.
    """

    repeats: bool = False
    """Whether each measurement is the same evidence again, which is not averaged."""

    def check(self, tilt: Tilt) -> None:  # noqa: B027 - most orders are fine for most
        """Refuses a divergence that this estimator cannot measure.

        Raises:
            ValueError: naming the key and what would do.
        """

    def check_run(self, names: Sequence[str], steps: int) -> None:  # noqa: B027 - most measure all
        """Refuses rewards or a number of steps that this estimator knows nothing of.

        Raises:
            ValueError: naming both.
        """

    @abstractmethod
    def measure(self, probe: Probe, tilt: Tilt) -> Evidence:
        """The evidence of one iteration's clean samples."""

    def watch(self, part: UpdatePart) -> None:  # noqa: B027 - most learn nothing
        """Sees what the policy update computes anyway, for N (sample, step) pairs; keeps no graph of it."""

    def learn(self, total: Callable[[Tensor], Tensor]) -> None:  # noqa: B027
        """After an iteration's update, once on every process; `total` sums a tensor over processes."""

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint must hold of the estimator: plain types and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Puts `state_dict` back."""


def renoised(probe: Probe, step: int) -> Tensor:
    """This process's clean samples, brought to the destination of `step` by keyed noise of their own."""
    rollout = probe.experience.rollout
    t = float(probe.levels[step + 1])
    noise = keyed_normal(
        rollout.x0_BCHW.shape[1:],
        seed=probe.seed,
        iteration=probe.iteration,
        samples=rollout.batch.sample_B.tolist(),
        steps=[step] * len(rollout.batch),
        purpose=Purpose.PROBE,
    ).to(rollout.x0_BCHW.device)
    return noised(rollout.x0_BCHW, noise, t)


def scored(probe: Probe, x0: Tensor) -> Tensor:
    """Scores [R, B] of clean latents, of all processes' samples; NaN where masked."""
    batch = probe.experience.rollout.batch
    return probe.score(probe.decode(x0), batch.prompts).values_RB.double().cpu()


def own_scores(probe: Probe) -> Tensor:
    """The clean samples' own scores [R, B], of all processes."""
    return probe.experience.scores.values_RB.double().cpu()


def attempted(moment: Callable[[], Moment]) -> Moment:
    """The moment, or `UNKNOWN` where too many scores are masked."""
    try:
        return moment()
    except TooFewScores:
        return UNKNOWN


def evidence_of(probe: Probe, moments: list[list[Moment]], *, reward_calls: int, seconds: float) -> Evidence:
    """Evidence on the probe's rewards and levels from R × K moments."""
    return Evidence.of(
        moments,
        names=probe.experience.scores.names,
        levels=probe.levels,
        reward_calls=reward_calls,
        seconds=seconds,
    )
