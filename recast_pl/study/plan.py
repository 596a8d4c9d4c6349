"""A study file, and the runs that it stands for.

A run is a point of the grid setting × axes × seed: configuration layers, one over the other, as the command
line takes them. Paths in a study file are relative to its folder.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=+-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one cell (or a setting) puts over what is below it: files first, then single keys."""

    configs: tuple[Path, ...] = ()
    keys: tuple[tuple[str, Any], ...] = ()  # dotted key and value


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One point of the grid."""

    setting: str
    cells: tuple[tuple[str, str], ...]  # axis and cell, in the order of the study file
    seed: int
    layers: tuple[Layer, ...]

    @property
    def name(self) -> str:
        """Its folder within the study's.

        >>> Run(setting="a", cells=(("strategy", "snr"), ("budget", "equal")), seed=3, layers=()).name
        'a/snr/equal/seed-3'
        """
        return "/".join([self.setting, *(cell for _, cell in self.cells), f"seed-{self.seed}"])

    @property
    def arguments(self) -> list[str]:
        """Of the command line, after the verb."""
        words = []
        for layer in self.layers:
            words += [word for path in layer.configs for word in ("--config", str(path))]
            words += [f"--{key}={_word(value)}" for key, value in layer.keys]
        return [*words, f"--seed_everything={self.seed}"]

    def content(self) -> list[dict[str, Any]]:
        """The whole configuration: what the files say, and the keys, in order."""
        parts: list[dict[str, Any]] = []
        for layer in self.layers:
            parts += [yaml.safe_load(path.read_text(encoding="utf-8")) or {} for path in layer.configs]
            parts += [{key: value} for key, value in layer.keys]
        return [*parts, {"seed_everything": self.seed}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Which axis a report has as rows, and which of its cells the others are held against."""

    axis: str
    baseline: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study file that has been read."""

    name: str
    folder: Path
    runs: tuple[Run, ...]
    compare: Comparison
    judges: bool  # whether `test` follows `fit`
    pictures: int  # of each evaluation
    keep_checkpoints: bool
    parallel: int
    threads: int | None  # of each process; None: as the environment has it


KEYS = {
    "name": "the study's name",
    "folder": "where runs go; without it runs/studies/NAME",
    "settings": "name → {configs, set, axes}",
    "axes": "name → cells; cell → {configs, set}",
    "seeds": "a list of whole numbers",
    "compare": "{axis, baseline}",
    "judges": "whether `test` judges each run at its end",
    "pictures": "held-out pictures kept of each evaluation",
    "keep_checkpoints": "whether a finished run's last.ckpt stays",
    "parallel": "runs at a time",
    "threads": "of each process",
}


def read_study(path: Path) -> Study:
    """Reads and checks a study file; every configuration file that it names must be there.

    Raises:
        ValueError: naming the key, what was got, and what would be right.
        FileNotFoundError: where the study file is not there.
    """
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected the keys {', '.join(KEYS)}")
    _known(content, KEYS, where=str(path))
    for key in ("settings", "seeds", "compare"):
        if not content.get(key):
            raise ValueError(f"{path}: {key}: expected {KEYS[key]}, got nothing")
    name = _name(content.get("name", path.stem), where="name")
    seeds = content["seeds"]
    if not isinstance(seeds, list) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ValueError(f"seeds: expected a list of whole numbers of 0 or more, got {seeds!r}")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds: expected each once, got {seeds}")
    runs = [
        run
        for setting, block in _mapping(content["settings"], "settings").items()
        for run in _runs(setting, block, content.get("axes"), seeds, path.parent)
    ]
    return Study(
        name=name,
        folder=Path(content.get("folder", f"runs/studies/{name}")),
        runs=tuple(runs),
        compare=_comparison(content["compare"], runs),
        judges=_flag(content, "judges", True),
        keep_checkpoints=_flag(content, "keep_checkpoints", True),
        pictures=_count(content, "pictures", 8, low=0),
        parallel=_count(content, "parallel", 1, low=1),
        threads=None if content.get("threads") is None else _count(content, "threads", 1, low=1),
    )


def _runs(setting: str, block: Any, axes: Any, seeds: Sequence[int], folder: Path) -> list[Run]:
    where = f"settings.{_name(setting, where='settings')}"
    block = _mapping(block, where)
    _known(block, {"configs": "", "set": "", "axes": ""}, where=where)
    base = _layer({key: block[key] for key in ("configs", "set") if key in block}, where, folder)
    if not base.configs:
        raise ValueError(f"{where}.configs: expected at least one configuration file")
    cells = {
        axis: {
            _name(cell, where=axis): _layer(_mapping(content or {}, f"{axis}.{cell}"), f"{axis}.{cell}", folder)
            for cell, content in _mapping(found, f"axes.{axis}").items()
        }
        for axis, found in {**(axes or {}), **(block.get("axes") or {})}.items()
    }
    return [
        Run(
            setting=setting,
            cells=tuple(zip(cells, chosen, strict=True)),
            seed=seed,
            layers=(base, *(cells[axis][cell] for axis, cell in zip(cells, chosen, strict=True))),
        )
        for chosen in itertools.product(*cells.values())
        for seed in seeds
    ]


def _layer(block: Mapping[str, Any], where: str, folder: Path) -> Layer:
    _known(block, {"configs": "", "set": ""}, where=where)
    configs = block.get("configs") or []
    if not isinstance(configs, list):
        raise ValueError(f"{where}.configs: expected a list of files, got {configs!r}")
    paths = tuple((folder / str(config)).resolve() for config in configs)
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{where}.configs: there is no file {path} (paths are relative to the study file)")
    keys = tuple(_mapping(block.get("set") or {}, f"{where}.set").items())
    for key, _ in keys:
        if key == "seed_everything":
            raise ValueError(f"{where}.set: seed_everything is set by `seeds`")
    return Layer(configs=paths, keys=keys)


def _comparison(block: Any, runs: Sequence[Run]) -> Comparison:
    block = _mapping(block, "compare")
    _known(block, {"axis": "", "baseline": ""}, where="compare")
    axis, baseline = block.get("axis"), block.get("baseline")
    for run in runs:
        if axis not in dict(run.cells):
            raise ValueError(f"compare.axis: expected an axis of every setting, got {axis!r}")
        there = {dict(other.cells).get(axis) for other in runs if other.setting == run.setting}
        if baseline not in there:
            raise ValueError(
                f"compare.baseline: {baseline!r} is no cell of {axis} in the setting {run.setting}"
            )
    return Comparison(axis=str(axis), baseline=str(baseline))


def _known(block: Mapping[str, Any], keys: Mapping[str, str], *, where: str) -> None:
    if unknown := sorted(map(str, block.keys() - keys.keys())):
        raise ValueError(f"{where}: unknown key {', '.join(unknown)}; expected {', '.join(keys)}")


def _mapping(block: Any, where: str) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise ValueError(f"{where}: expected a mapping, got {block!r}")
    return {str(key): value for key, value in block.items()}


def _name(name: Any, *, where: str) -> str:
    if not NAME.fullmatch(str(name)):
        raise ValueError(f"{where}: {name!r} cannot name a folder; take letters, digits and _ . = + -")
    return str(name)


def _flag(content: Mapping[str, Any], key: str, default: bool) -> bool:
    value = content.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key}: expected true or false, got {value!r}")
    return value


def _count(content: Mapping[str, Any], key: str, default: int, *, low: int) -> int:
    value = content.get(key, default)
    if type(value) is not int or value < low:
        raise ValueError(f"{key}: expected a whole number of {low} or more, got {value!r}")
    return value


def _word(value: Any) -> str:
    """A value as the command line reads it: text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


# ------------------------------------------------------------------ has a configuration changed?


def digest(content: Any) -> str:
    """A short hash of plain data; the order of a mapping's keys does not count, that of layers does.

    >>> digest([{"a": 1, "b": 2}]) == digest([{"b": 2, "a": 1}]), digest([{"a": 1}]) == digest([{"a": 2}])
    (True, False)
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def changed_keys(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[str]:
    """Dotted keys that two layered configurations end up with different values for.

    >>> changed_keys([{"a": {"b": 1, "c": 2}}], [{"a": {"b": 1}}, {"a.c": 3}, {"d": 0}])
    ['a.c', 'd']
    """
    one, other = _flat(before), _flat(after)
    return sorted(key for key in one.keys() | other.keys() if one.get(key, ...) != other.get(key, ...))


def _flat(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last value of each dotted key. Only for naming differences: it knows nothing of classes."""
    found: dict[str, Any] = {}

    def enter(value: Any, key: str) -> None:
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                enter(inner, f"{key}.{name}" if key else str(name))
        else:
            found[key] = value

    for layer in layers:
        enter(layer, "")
    return found
