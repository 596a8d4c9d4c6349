"""The folder of a run within a study: what it holds, and what state it is in."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from recast_pl.study.plan import Run, Study, changed_keys, digest
from recast_pl.study.record import Result

CONFIGURATION = "configuration.json"  # the run's layers and their hash
RESULT = "result.json"
FAILURE = "failure.json"
LOG = "output.log"
LOCK = "lock"
PLAN = "study.json"  # in the study's folder


class ChangedStudy(ValueError):
    """A run's folder was made with another configuration than the study file has now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run has not come to a result: `failure.json`."""

    setting: str
    cells: dict[str, str]
    seed: int
    digest: str
    stage: str  # the verb that failed
    reason: str
    tail: str  # the last lines of its output

    @property
    def name(self) -> str:
        """The run's name."""
        return "/".join([self.setting, *self.cells.values(), f"seed-{self.seed}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a report needs to know of a study: `study.json`."""

    name: str
    axis: str  # whose cells are compared
    baseline: str
    runs: tuple[dict[str, Any], ...]  # setting, cells, seed of each run, in the study file's order

    def comparing(self, axis: str, baseline: str) -> "Plan":
        """The same runs, compared along another axis.

        Raises:
            ValueError: where a setting has no such axis or cell.
        """
        for setting in dict.fromkeys(run["setting"] for run in self.runs):
            own = [run["cells"] for run in self.runs if run["setting"] == setting]
            if axis not in own[0]:
                raise ValueError(f"compare: {setting} has no axis {axis!r}; it has {', '.join(own[0])}")
            if baseline not in (there := list(dict.fromkeys(cells[axis] for cells in own))):
                raise ValueError(
                    f"compare: {baseline!r} is no cell of {axis}; expected one of {', '.join(there)}"
                )
        return replace(self, axis=axis, baseline=baseline)


class RunFolder:
    """A run and its place.

    Args:
        root: the study's folder.
        run: the run.
    """

    def __init__(self, root: Path, run: Run) -> None:
        self.run, self.path = run, root / run.name
        self.content = run.content()
        self.digest = digest(self.content)

    @property
    def checkpoint(self) -> Path:
        """Where the run goes on from."""
        return self.path / "checkpoints" / "last.ckpt"

    @property
    def finished(self) -> bool:
        """Whether there is a result."""
        return (self.path / RESULT).exists()

    def changes(self) -> list[str]:
        """Keys that the folder's own configuration has otherwise; empty also where there is none yet."""
        path = self.path / CONFIGURATION
        if not path.exists():
            return []
        before = json.loads(path.read_text(encoding="utf-8"))
        if before["digest"] == self.digest:
            return []
        return changed_keys(before["layers"], self.content) or ["the order of the layers"]

    def begin(self) -> None:
        """Makes the folder, writes the configuration down, and forgets a failure of before."""
        self.path.mkdir(parents=True, exist_ok=True)
        write(self.path / CONFIGURATION, json.dumps({"digest": self.digest, "layers": self.content}, indent=1))
        (self.path / FAILURE).unlink(missing_ok=True)

    def identity(self) -> dict[str, Any]:
        """The fields that results and failures share."""
        run = self.run
        return {
            "setting": run.setting,
            "cells": dict(run.cells),
            "seed": run.seed,
            "digest": self.digest,
        }

    def fail(self, *, stage: str, reason: str) -> Failure:
        """Writes `failure.json`."""
        log = self.path / LOG
        said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        lines = [line for line in said.splitlines() if line.strip()]
        failure = Failure(**self.identity(), stage=stage, reason=reason, tail="\n".join(lines[-12:]))
        write(self.path / FAILURE, json.dumps(asdict(failure), indent=1))
        return failure


def write(path: Path, text: str) -> None:
    """Writes a file that is whole or not there."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def check_unchanged(folders: Sequence[RunFolder], *, discard: bool) -> None:
    """Refuses folders of another configuration, or empties them.

    Raises:
        ChangedStudy: naming the runs, the keys that differ, and the remedy.
    """
    changed = [(folder, keys) for folder in folders if (keys := folder.changes())]
    if discard:
        for folder, _ in changed:
            shutil.rmtree(folder.path)
        return
    if changed:
        lines = [
            f"  {folder.run.name} ({'finished' if folder.finished else 'begun'}): {', '.join(keys[:6])}"
            + (f" and {len(keys) - 6} more" if len(keys) > 6 else "")
            for folder, keys in changed[:10]
        ]
        more = [f"  … and {len(changed) - 10} more"] if len(changed) > 10 else []
        raise ChangedStudy(
            "\n".join(
                [
                    f"{len(changed)} runs in the study's folder were made with another configuration:",
                    *lines,
                    *more,
                    "Take another folder (--folder), put the study file back, or throw these runs away with "
                    "--discard-changed.",
                ]
            )
        )


def write_plan(study: Study, root: Path) -> None:
    """Writes `study.json`, from which a report knows what should be there."""
    root.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        name=study.name,
        axis=study.compare.axis,
        baseline=study.compare.baseline,
        runs=tuple({"setting": run.setting, "cells": dict(run.cells), "seed": run.seed} for run in study.runs),
    )
    write(root / PLAN, json.dumps(asdict(plan), indent=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A study's folder, read."""

    root: Path
    plan: Plan
    results: tuple[Result, ...]  # in the plan's order
    failures: tuple[Failure, ...]
    missing: tuple[str, ...]  # runs with neither: not begun, or not at their end


def collect(root: Path) -> Collected:
    """Reads what a study's runs have left.

    Raises:
        ValueError: where `root` is no study's folder, or a result in it cannot be read.
    """
    path = root / PLAN
    if not path.is_file():
        raise ValueError(f"{root}: there is no {PLAN} in it; expected a folder that `run` has made")
    fields = json.loads(path.read_text(encoding="utf-8"))
    plan = Plan(**{**fields, "runs": tuple(fields["runs"])})
    results, failures, missing = [], [], []
    for run in plan.runs:
        name = "/".join([run["setting"], *run["cells"].values(), f"seed-{run['seed']}"])
        result, failure = root / name / RESULT, root / name / FAILURE
        if result.exists():
            try:
                results.append(Result.from_json(result.read_text(encoding="utf-8")))
            except ValueError as error:
                raise ValueError(f"{result}: {error}") from error
        elif failure.exists():
            failures.append(Failure(**json.loads(failure.read_text(encoding="utf-8"))))
        else:
            missing.append(name)
    return Collected(
        root=root, plan=plan, results=tuple(results), failures=tuple(failures), missing=tuple(missing)
    )
