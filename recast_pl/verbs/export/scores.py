"""Held-out scores before and after, from the evaluations that a checkpoint holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One reward's mean over held-out prompts at a run's first evaluation and at a later one."""

    name: str
    before: float
    after: float
    spread: float  # of single pictures, at the first evaluation
    first: int  # iteration of either
    last: int


def held_out_scores(
    evaluations: Sequence[tuple[int, Mapping[str, float]]], names: Sequence[str]
) -> list[Score]:
    """What a run's evaluations so far say of each reward; empty where there are not two to compare.

    Args:
        evaluations: iteration and logged values of each, as the module and its checkpoints keep them.
        names: of the rewards.
    """
    if len(evaluations) < 2:
        return []
    (first, before), (last, after) = evaluations[0], evaluations[-1]
    return [
        Score(
            name=name,
            before=before[f"val/{name}"],
            after=after[f"val/{name}"],
            spread=before[f"val/{name}/spread"],
            first=first,
            last=last,
        )
        for name in names
        if f"val/{name}" in before and f"val/{name}" in after  # rewards may be added at a stage
    ]
