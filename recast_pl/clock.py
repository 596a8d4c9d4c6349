"""Seconds per stage of an iteration."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

STAGES = ("text", "rollout", "decode", "rewards", "advantages", "credit", "update", "old_policy")


class StageClock:
    """Adds up wall time by stage; a GPU is waited for, so that a stage pays for its own work.

    A stage within another is charged to itself alone.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._total = dict.fromkeys(STAGES, 0.0)
        self._within: list[float] = []  # seconds of inner stages, for each stage that is running

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Charges the time within the context to `stage`, one of `STAGES`."""
        began = self._now()
        self._within.append(0.0)
        try:
            yield
        finally:
            spent, inner = self._now() - began, self._within.pop()
            self._seconds[stage] += spent - inner
            if self._within:
                self._within[-1] += spent

    def take(self) -> dict[str, float]:
        """The seconds of every stage since the last call."""
        taken, self._seconds = self._seconds, dict.fromkeys(STAGES, 0.0)
        self._total = {stage: self._total[stage] + taken[stage] for stage in STAGES}
        return taken

    def discard(self) -> None:
        """Forgets the seconds since the last call of `take`, which were no part of an iteration."""
        self._seconds = dict.fromkeys(STAGES, 0.0)

    def share(self, stage: str) -> float:
        """The stage's share of all seconds taken so far."""
        total = sum(self._total.values())
        return self._total[stage] / total if total > 0 else 0.0

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()
