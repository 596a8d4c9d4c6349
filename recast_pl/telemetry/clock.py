"""Seconds per stage of an iteration."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

STAGES = ("text", "rollout", "decode", "rewards", "advantages", "credit", "update", "old_policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment at which one stage ends or another begins."""

    stage: str | None  # what runs from here on
    seconds: float  # wall time
    event: torch.cuda.Event | None  # its place among the GPU's work, where there is a GPU


class StageClock:
    """Adds up time by stage; a stage within another is charged to itself alone.

    On a GPU these are seconds between places in its stream: a stage pays for its own work though nothing waits
    for it. The host goes on, until `take` waits for the last one.
    """

    def __init__(self) -> None:
        self._total = dict.fromkeys(STAGES, 0.0)
        self._running: list[str] = []
        self._marks: list[Mark] = []

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Charges the time within the context to `stage`, one of `STAGES`."""
        self._running.append(stage)
        self._mark()
        try:
            yield
        finally:
            self._running.pop()
            self._mark()

    def take(self) -> dict[str, float]:
        """The seconds of every stage since the last call."""
        taken = dict.fromkeys(STAGES, 0.0)
        for begin, end in pairwise(self._marks):
            if begin.stage is not None:
                taken[begin.stage] += elapsed(begin, end)
        self.discard()
        self._total = {stage: self._total[stage] + taken[stage] for stage in STAGES}
        return taken

    def discard(self) -> None:
        """Forgets the seconds since the last call of `take`, which were no part of an iteration."""
        self._marks = self._marks[-1:]

    def share(self, stage: str) -> float:
        """The stage's share of all seconds taken so far."""
        total = sum(self._total.values())
        return self._total[stage] / total if total > 0 else 0.0

    def _mark(self) -> None:
        stage = self._running[-1] if self._running else None
        self._marks.append(Mark(stage=stage, seconds=time.perf_counter(), event=_event()))


def elapsed(begin: Mark, end: Mark) -> float:
    """Seconds between two marks: the GPU's where both have a place in its work."""
    if begin.event is None or end.event is None:
        return end.seconds - begin.seconds
    end.event.synchronize()
    return float(begin.event.elapsed_time(end.event)) / 1000


def _event() -> torch.cuda.Event | None:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
