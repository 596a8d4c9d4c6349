"""Held-out scores before and after, from a run's TensorBoard files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One reward's mean over held-out prompts at a run's first evaluation and at a later one."""

    name: str
    before: float
    after: float
    spread: float  # of single pictures, at the first evaluation
    first: int  # iteration of either
    last: int


def held_out_scores(ckpt_path: Path, names: Sequence[str], *, until: int) -> list[Score]:
    """What a checkpoint's run has logged up to iteration `until`; empty where there is nothing to compare.

    TensorBoard files are looked for where Lightning puts them, one folder above the checkpoint, and beside it.
    """
    for folder in (ckpt_path.absolute().parent.parent, ckpt_path.absolute().parent):
        if any(folder.glob("events.out.tfevents.*")):
            return _read(folder, names, until=until)
    return []


def _read(folder: Path, names: Sequence[str], *, until: int) -> list[Score]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # pictures are not wanted: 1 is the least that may be kept
    logged = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 1})
    logged.Reload()
    known, scores = set(logged.Tags()["scalars"]), []
    for name in names:
        if not {f"val/{name}", f"val/{name}/spread"} <= known:
            continue
        means = [event for event in logged.Scalars(f"val/{name}") if event.step <= until]
        spreads = logged.Scalars(f"val/{name}/spread")
        if means and means[0].step < means[-1].step:
            scores.append(
                Score(
                    name=name,
                    before=means[0].value,
                    after=means[-1].value,
                    spread=spreads[0].value,
                    first=means[0].step,
                    last=means[-1].step,
                )
            )
    return scores
