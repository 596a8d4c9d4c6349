"""Seconds per stage of an iteration."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

STAGES = ("text", "rollout", "decode", "rewards", "advantages", "credit", "update", "old_policy")


class StageClock:
    """Adds up wall time by stage; a GPU is waited for, so that a stage pays for its own work."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Charges the time within the context to `stage`, one of `STAGES`."""
        began = self._now()
        try:
            yield
        finally:
            self._seconds[stage] += self._now() - began

    def take(self) -> dict[str, float]:
        """The seconds of every stage since the last call."""
        taken, self._seconds = self._seconds, dict.fromkeys(STAGES, 0.0)
        return taken

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()
