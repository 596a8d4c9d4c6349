"""The record that a run writes of itself (by `recast_pl.callbacks.RunRecord`), and the result that follows."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RECORD = "record.jsonl"
PICTURES = "pictures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One evaluation on held-out prompts."""

    iteration: int
    reward_calls: int  # spent in training before it
    means: dict[str, float]  # of each reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a finished run has come to: `result.json`."""

    setting: str
    cells: dict[str, str]  # axis → cell
    seed: int
    digest: str  # of the whole configuration
    iterations: int
    rewards: tuple[str, ...]
    before: dict[str, float]  # means over held-out prompts, of each reward
    after: dict[str, float]
    spread: dict[str, float]  # of single pictures before training
    masked: dict[str, float]  # failed scores in the last evaluation, of rewards and judges
    judges: dict[str, float]  # means at the end
    reward_calls: int
    seconds: float  # of all iterations; no start, no evaluation
    wall_seconds: float  # of the run's processes, as far as they were not interrupted
    curve: tuple[Point, ...]
    weights: dict[str, Any]  # the last W: names, levels, W (rewards by denoising steps, from noise to clean)

    def to_json(self) -> str:
        """As `result.json` has it."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Result":
        """The inverse of `to_json`.

        Raises:
            ValueError: where the text is not that of a result.
        """
        try:
            fields = json.loads(text)
            curve = tuple(Point(**point) for point in fields["curve"])
            return cls(**{**fields, "curve": curve, "rewards": tuple(fields["rewards"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a study's result: {error!r}") from error


Lines = dict[str, dict[int, Mapping[str, Any]]]


def read_lines(text: str) -> Lines:
    r"""The lines of a record by kind and iteration; what was written twice counts once, the last time.

    A last line without an end was cut short by a kill and is left out.

    >>> line = '{"kind": "train", "iteration": 1, "seconds": %d}\n'
    >>> read_lines(line % 8 + line % 9 + '{"ki')["train"][1]["seconds"]
    9
    """
    lines: Lines = {}
    for line in text[: text.rfind("\n") + 1].split("\n")[:-1]:
        entry = json.loads(line)
        lines.setdefault(entry["kind"], {})[entry["iteration"]] = entry
    return {kind: dict(sorted(entries.items())) for kind, entries in lines.items()}


def lines_of(folder: Path) -> Lines:
    """The record of a run's folder; empty where there is none."""
    path = folder / RECORD
    return read_lines(path.read_text(encoding="utf-8")) if path.exists() else {}


class Incomplete(RuntimeError):
    """A record lacks what a result needs."""


def completed(lines: Lines, verb: str) -> bool:
    """Whether a verb has left what is needed of it.

    A run that was killed during its last evaluation has been fitted and lacks `validate`.
    """
    if verb == "fit":
        return bool(lines.get("fitted"))
    last = max(lines.get("train", {0: {}}))
    return last in lines.get({"validate": "evaluation", "test": "judges"}[verb], {})


def outcome(lines: Lines) -> dict[str, Any]:
    """The fields of `Result` that a record holds.

    Raises:
        Incomplete: naming what is missing.
    """
    for kind in ("train", "evaluation", "weights"):
        if not lines.get(kind):
            raise Incomplete(f"{RECORD} has no line of the kind {kind!r}")
    train, evaluations = lines["train"], lines["evaluation"]
    last = max(train)
    if 0 not in evaluations or last not in evaluations:
        lacking = 0 if 0 not in evaluations else last
        raise Incomplete(
            f"{RECORD} has no evaluation of iteration {lacking}; it needs trainer.num_sanity_val_steps: -1 and "
            "an evaluation after the last iteration"
        )
    judged = lines.get("judges", {}).get(last, {"values": {}})["values"]
    before, after = evaluations[0]["values"], evaluations[last]["values"]
    names = _names(after, "val/")
    return {
        "iterations": last,
        "rewards": names,
        "before": _means(before, names, "val/"),
        "after": _means(after, names, "val/"),
        "spread": {name: before[f"val/{name}/spread"] for name in names},
        "judges": _means(judged, _names(judged, "test/"), "test/"),
        "masked": {
            name: values[f"{prefix}{name}/masked"]
            for prefix, values in (("val/", after), ("test/", judged))
            for name in _names(values, prefix)
        },
        "reward_calls": train[last]["reward_calls"],
        "seconds": sum(entry["seconds"] for entry in train.values()),
        "curve": tuple(
            Point(
                iteration=iteration,
                reward_calls=train[iteration]["reward_calls"] if iteration else 0,
                means=_means(entry["values"], names, "val/"),
            )
            for iteration, entry in evaluations.items()
        ),
        "weights": {key: lines["weights"][max(lines["weights"])][key] for key in ("names", "levels", "W")},
    }


def _names(values: Iterable[str], prefix: str) -> tuple[str, ...]:
    return tuple(key[len(prefix) :] for key in values if key.startswith(prefix) and key.count("/") == 1)


def _means(values: Mapping[str, float], names: Sequence[str], prefix: str) -> dict[str, float]:
    return {name: values[f"{prefix}{name}"] for name in names}
