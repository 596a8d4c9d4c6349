"""From results to tables: strategies by metrics, within groups of runs that differ by strategy and seed."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any, Literal

from recast_pl.study.folder import Plan
from recast_pl.study.record import Result
from recast_pl.study.statistics import LEVEL, Difference, Interval, holm, interval, paired_difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A column."""

    kind: Literal["reward", "judge", "gain"]
    name: str

    @property
    def label(self) -> str:
        """As a table's head has it."""
        return {"reward": self.name, "judge": f"{self.name} (judge)", "gain": "mean gain / spread"}[self.kind]

    def of(self, result: Result) -> float:
        """The metric's value at the end of a run; NaN where it has none."""
        if self.kind == "gain":
            return mean_gain(result)
        return (result.after if self.kind == "reward" else result.judges).get(self.name, nan)


def mean_gain(result: Result) -> float:
    """The mean over rewards of (after − before) / spread of single pictures before training."""
    gains = [
        (result.after[name] - result.before[name]) / result.spread[name] if result.spread[name] > 0 else nan
        for name in result.rewards
    ]
    return sum(gains) / len(gains)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs that differ by the compared axis and the seed alone, or a whole setting's, pooled."""

    setting: str
    cells: tuple[tuple[str, str], ...]  # of the other axes
    pooled: bool
    results: tuple[Result, ...]

    @property
    def title(self) -> str:
        """What its runs share."""
        if self.pooled:
            return f"{self.setting}: all together"
        return ", ".join([self.setting, *(f"{axis} {cell}" for axis, cell in self.cells)])


def groups_of(plan: Plan, results: Sequence[Result]) -> list[Group]:
    """For each setting its groups, and before them, where there are several, all of them pooled."""
    groups = []
    for setting in dict.fromkeys(run["setting"] for run in plan.runs):
        own = [result for result in results if result.setting == setting]
        keys = dict.fromkeys(_others(run["cells"], plan.axis) for run in plan.runs if run["setting"] == setting)
        if len(keys) > 1:
            groups.append(Group(setting=setting, cells=(), pooled=True, results=tuple(own)))
        groups += [
            Group(
                setting=setting,
                cells=key,
                pooled=False,
                results=tuple(result for result in own if _others(result.cells, plan.axis) == key),
            )
            for key in keys
        ]
    return groups


def _others(cells: Mapping[str, str], axis: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, cell) for name, cell in cells.items() if name != axis)


def metrics_of(results: Iterable[Result]) -> list[Metric]:
    """The mean gain, rewards and judges, in the order of the configuration."""
    rewards: dict[str, None] = {}
    judges: dict[str, None] = {}
    for result in results:
        rewards |= dict.fromkeys(result.rewards)
        judges |= dict.fromkeys(result.judges)
    return [
        Metric(kind="gain", name="mean"),
        *(Metric(kind="reward", name=name) for name in rewards),
        *(Metric(kind="judge", name=name) for name in judges),
    ]


def by_seed(
    results: Iterable[Result], axis: str, value: Callable[[Result], float]
) -> dict[str, dict[int, float]]:
    """Strategy → seed → value.

    Where a strategy has several runs of one seed (other axes pooled), their mean; a seed that lacks one of the
    runs that other seeds or strategies have, or whose value is not finite, is left out: means over different
    sets of runs are not to be compared.
    """
    runs: dict[str, dict[int, dict[tuple[tuple[str, str], ...], float]]] = {}
    for result in results:
        entry = runs.setdefault(result.cells[axis], {}).setdefault(result.seed, {})
        entry[_others(result.cells, axis)] = value(result)
    every = {key for seeds in runs.values() for found in seeds.values() for key in found}
    return {
        strategy: {
            seed: sum(found.values()) / len(found)
            for seed, found in sorted(seeds.items())
            if found.keys() == every and all(isfinite(number) for number in found.values())
        }
        for strategy, seeds in runs.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One strategy and metric."""

    strategy: str
    metric: Metric
    interval: Interval | None  # over seeds; None where no seed has a value
    difference: Difference | None  # from the baseline; None for the baseline itself
    robust: bool = False  # whether it is also told from zero by Holm's procedure over the whole report


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparisons:
    """One group's table."""

    group: Group
    metrics: tuple[Metric, ...]
    strategies: tuple[str, ...]  # those of the plan, in its order
    cells: tuple[Cell, ...]
    before: dict[str, float]  # of each reward, mean over the baseline's runs (or all, where it has none)
    spread: dict[str, float]

    def cell(self, strategy: str, metric: Metric) -> Cell:
        """The cell of a row and column."""
        (found,) = [cell for cell in self.cells if (cell.strategy, cell.metric) == (strategy, metric)]
        return found


def compare(plan: Plan, group: Group) -> Comparisons:
    """Means over seeds, and differences from the baseline paired by seed."""
    metrics = tuple(metrics_of(group.results))
    strategies = tuple(
        dict.fromkeys(run["cells"][plan.axis] for run in plan.runs if run["setting"] == group.setting)
    )
    cells = []
    for metric in metrics:
        values = by_seed(group.results, plan.axis, metric.of)
        baseline = values.get(plan.baseline, {})
        for strategy in strategies:
            own = values.get(strategy, {})
            cells.append(
                Cell(
                    strategy=strategy,
                    metric=metric,
                    interval=interval(list(own.values())) if own else None,
                    difference=None if strategy == plan.baseline else paired_difference(own, baseline),
                )
            )
    shown = [result for result in group.results if result.cells[plan.axis] == plan.baseline] or group.results
    return Comparisons(
        group=group,
        metrics=metrics,
        strategies=strategies,
        cells=tuple(cells),
        before=_mean_of(shown, lambda result: result.before),
        spread=_mean_of(shown, lambda result: result.spread),
    )


def _mean_of(results: Sequence[Result], read: Callable[[Result], Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for result in results for name in read(result))
    return {
        name: sum(numbers) / len(numbers)
        for name in names
        if (numbers := [read(result)[name] for result in results if name in read(result)])
    }


def all_comparisons(plan: Plan, results: Sequence[Result]) -> list[Comparisons]:
    """All groups' tables, with Holm's procedure over all of their comparisons together."""
    tables = [compare(plan, group) for group in groups_of(plan, results)]
    tested = [cell for table in tables for cell in table.cells if is_test(cell)]
    rejected = holm([cell.difference.p for cell in tested if cell.difference is not None])
    robust = {id(cell) for cell, told in zip(tested, rejected, strict=True) if told}
    return [_marked(table, robust) for table in tables]


def is_test(cell: Cell) -> bool:
    """Whether a cell holds a difference over at least two seeds: one that could be told from zero."""
    return cell.difference is not None and cell.difference.interval.count > 1


def _marked(table: Comparisons, robust: set[int]) -> Comparisons:
    return replace(table, cells=tuple(replace(cell, robust=id(cell) in robust) for cell in table.cells))


# ------------------------------------------------------------------ files for further work


def runs_csv(plan: Plan, results: Iterable[Result]) -> str:
    """One row for each run and metric."""
    axes = list(dict.fromkeys(axis for run in plan.runs for axis in run["cells"]))
    costs = ["iterations", "reward_calls", "seconds", "wall_seconds"]
    rows: list[list[Any]] = [
        ["setting", *axes, "seed", "kind", "metric", "before", "after", "change", "spread", "masked", *costs]
    ]
    for result in results:
        own = [result.setting, *(result.cells.get(axis, "") for axis in axes), result.seed]
        spent = [getattr(result, cost) for cost in costs]
        for name in result.rewards:
            before, after = result.before[name], result.after[name]
            rest = [before, after, after - before, result.spread[name], result.masked.get(name, "")]
            rows.append([*own, "reward", name, *rest, *spent])
        for name, after in result.judges.items():
            rows.append([*own, "judge", name, "", after, "", "", result.masked.get(name, ""), *spent])
        rows.append([*own, "gain", "mean", "", "", mean_gain(result), "", "", *spent])
    return _csv(rows)


def comparisons_csv(tables: Iterable[Comparisons]) -> str:
    """One row for each comparison of a report."""
    rows: list[list[Any]] = [
        [
            *("group", "strategy", "kind", "metric", "mean", "mean_low", "mean_high"),
            *("seeds", "difference", "low", "high", "pairs", "p", "verdict", "holm", "detectable"),
        ]
    ]
    for table in tables:
        for cell in table.cells:
            found, difference = cell.interval, cell.difference
            rows.append(
                [
                    *(table.group.title, cell.strategy, cell.metric.kind, cell.metric.name),
                    *(["", "", "", 0] if found is None else [found.mean, found.low, found.high, found.count]),
                    *([""] * 8 if difference is None else _described(difference, cell.robust)),
                ]
            )
    return _csv(rows)


def _described(difference: Difference, robust: bool) -> list[Any]:
    found = difference.interval
    ends = [found.mean, found.low, found.high, found.count]
    return [*ends, difference.p, difference.verdict, robust, difference.detectable]


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


# ------------------------------------------------------------------ numbers for readers


def plus_minus(mean: float, half: float, *, sign: bool = False) -> str:
    """A mean and its interval's half width, to two digits of the latter.

    >>> plus_minus(0.93217, 0.0041), plus_minus(12.3, float("inf")), plus_minus(0.01, 0.2, sign=True)
    ('0.9322 ± 0.0041', '12.3', '+0.01 ± 0.20')
    """
    plus = "+" if sign else ""
    if not isfinite(half):
        return f"{mean:{plus}.4g}"
    if half == 0:
        return f"{mean:{plus}.4g} ± 0"
    digits = min(6, max(0, 1 - int(f"{half:.1e}".split("e")[1])))
    return f"{mean:{plus}.{digits}f} ± {half:.{digits}f}"


def count_line(tables: Sequence[Comparisons]) -> str:
    """How many comparisons there are, and how many would seem won or lost by chance alone."""
    tested = [cell for table in tables for cell in table.cells if is_test(cell)]
    verdicts = [cell.difference.verdict for cell in tested if cell.difference is not None]
    robust = sum(cell.robust for cell in tested)
    return (
        f"{len(tested)} comparisons: {verdicts.count('win')} wins, {verdicts.count('loss')} losses, "
        f"{verdicts.count('tie')} neither. If no strategy differed from the baseline, about "
        f"{(1 - LEVEL) * len(tested):.1f} of them would still seem won or lost; {robust} hold against all "
        "comparisons together (Holm, 5 %)."
    )
