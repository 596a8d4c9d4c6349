"""A study's figures. A strategy has the same colour, marker and line in all of them.

Markers and lines tell strategies apart without colours.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from recast_pl.figures.palette import COLOURS
from recast_pl.study.record import Result
from recast_pl.study.statistics import front, interval
from recast_pl.study.tables import Comparisons, Metric, by_seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES: tuple[Any, ...] = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)))
LARGEST = 8.0  # ratio of W to its row's mean that has its own colour
PANEL = (3.1, 2.6)  # inches


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a strategy looks."""

    colour: str
    marker: str
    line: Any


def styles_of(strategies: Iterable[str], baseline: str) -> dict[str, Style]:
    """A style for each strategy of a study, the baseline's first (black, a full line)."""
    order = sorted(dict.fromkeys(strategies), key=lambda name: name != baseline)
    return {
        name: Style(
            colour=COLOURS[place % len(COLOURS)],
            marker=MARKERS[place % len(MARKERS)],
            line=LINES[place % len(LINES)],
        )
        for place, name in enumerate(order)
    }


def curves_figure(table: Comparisons, axis: str, styles: Mapping[str, Style]) -> Figure:
    """Each reward on held-out prompts over the reward calls spent: means over seeds, bands of 95 %."""
    results = table.group.results
    names = [metric.name for metric in table.metrics if metric.kind == "reward"]
    figure, panels = _panels(len(names))
    for panel, name in zip(panels, names, strict=True):
        clipped = _draw_curves(panel, results, name, axis, styles)
        panel.set_title(name, fontsize=9)
        if clipped:
            panel.annotate(
                "bands leave the frame", (0.98, 0.02), xycoords="axes fraction", ha="right", fontsize=6
            )
    figure.supxlabel("reward calls spent in training (pictures × rewards)", fontsize=9)
    figure.supylabel("mean score on held-out prompts", fontsize=9)
    _legend(figure, table.strategies, styles, lines=True)
    return figure


def _draw_curves(
    panel: "Axes", results: Sequence[Result], name: str, axis: str, styles: Mapping[str, Style]
) -> bool:
    """Curves and bands; the frame follows the curves, so that a wide band does not flatten them."""
    means, ends = [], []
    for strategy, style in styles.items():
        points = _curve([result for result in results if result.cells[axis] == strategy], name)
        if not points:
            continue
        x, y, half = (np.array(column) for column in zip(*points, strict=True))
        panel.plot(
            x, y, color=style.colour, linestyle=style.line, marker=style.marker, markersize=4, linewidth=1.5
        )
        known = np.isfinite(half)
        panel.fill_between(
            x[known], (y - half)[known], (y + half)[known], color=style.colour, alpha=0.13, linewidth=0
        )
        means += y.tolist()
        ends += [*(y - half)[known], *(y + half)[known]]
    if not means:
        return False
    low, high = min(means), max(means)
    room = 1.0 * (high - low) or 0.05 * abs(high) or 1.0
    panel.set_ylim(
        max(low - room, min([low - 0.1 * room, *ends])), min(high + room, max([high + 0.1 * room, *ends]))
    )
    bottom, top = panel.get_ylim()
    return any(end < bottom or end > top for end in ends)


def _curve(results: Sequence[Result], name: str) -> list[tuple[float, float, float]]:
    """Reward calls, mean and half width at each evaluation that all of the runs have."""
    if not results:
        return []
    by_run = [{point.iteration: point for point in result.curve} for result in results]
    points = []
    for iteration in sorted(set.intersection(*(set(points) for points in by_run))):
        here = [points[iteration] for points in by_run]
        values = [point.means[name] for point in here if isfinite(point.means.get(name, float("nan")))]
        if values:
            found = interval(values)
            calls = sum(point.reward_calls for point in here) / len(here)
            points.append((calls, found.mean, found.half))
    return points


def pareto_figure(results: Sequence[Result], axis: str, styles: Mapping[str, Style]) -> Figure:
    """Pairs of rewards at the end of training: a point for each strategy and budget, the front drawn through.

    Points are means over seeds, bars their standard errors, numbers the budgets in the order of `cells_of`.
    """
    names = list(dict.fromkeys(name for result in results for name in result.rewards))
    pairs = list(combinations(names, 2))
    figure, panels = _panels(len(pairs))
    cells = cells_of(results, axis)
    for panel, (one, other) in zip(panels, pairs, strict=True):
        for strategy, style in styles.items():
            points = []
            for number, cell in enumerate(cells, start=1):
                own = [r for r in results if r.cells[axis] == strategy and others(r, axis) == cell]
                found = [
                    _mean_and_error([r.after.get(name, float("nan")) for r in own]) for name in (one, other)
                ]
                (x, x_error), (y, y_error) = found
                if not (isfinite(x) and isfinite(y)):
                    continue
                points.append((x, y))
                panel.errorbar(
                    x, y, xerr=x_error, yerr=y_error, color=style.colour, marker=style.marker,
                    markersize=5, linewidth=0.8, alpha=0.85,
                )  # fmt: skip
                if len(cells) > 1:
                    panel.annotate(
                        str(number), (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7,
                        color=style.colour,
                    )  # fmt: skip
            best = [points[index] for index in front(points)]
            panel.plot(
                *zip(*best, strict=True), color=style.colour, linestyle=style.line, linewidth=1, alpha=0.7
            )
        panel.set_xlabel(one, fontsize=8)
        panel.set_ylabel(other, fontsize=8)
    _legend(figure, _present(results, axis, styles), styles, lines=True)
    return figure


def others(result: Result, axis: str) -> str:
    """The cells of a run's other axes, as a reader sees them."""
    return ", ".join(cell for name, cell in result.cells.items() if name != axis)


def cells_of(results: Iterable[Result], axis: str) -> list[str]:
    """The other axes' cells, in order: budgets, mostly."""
    return list(dict.fromkeys(others(result, axis) for result in results))


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, of what is finite."""
    good = [value for value in values if isfinite(value)]
    if not good:
        return float("nan"), 0.0
    found = interval(good)
    return found.mean, 0.0 if found.count < 2 else found.deviation / found.count**0.5


def differences_figure(table: Comparisons, axis: str, baseline: str, styles: Mapping[str, Style]) -> Figure:
    """Each strategy less the baseline within seeds: seeds, means and intervals, over a reward's spread."""
    rows = [metric for metric in table.metrics if metric.kind != "judge"]
    rivals = [strategy for strategy in table.strategies if strategy != baseline]
    figure = Figure(figsize=(6.6, 0.9 + 0.24 * len(rows) * (len(rivals) + 0.6)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="#777777", linewidth=0.8)
    for place, metric in enumerate(rows):
        scale = 1.0 if metric.kind == "gain" else table.spread.get(metric.name, 0.0) or 1.0
        values = by_seed(table.group.results, axis, metric.of)
        for lane, strategy in enumerate(rivals):
            difference = table.cell(strategy, metric).difference
            if difference is None:
                continue
            y = place + (lane - (len(rivals) - 1) / 2) * 0.7 / max(len(rivals), 1)
            style, found = styles[strategy], difference.interval
            own, base = values[strategy], values[baseline]
            seeds = [(own[seed] - base[seed]) / scale for seed in own.keys() & base.keys()]
            axes.plot(seeds, [y] * len(seeds), "|", color=style.colour, markersize=6, alpha=0.6)
            half = found.half / scale if isfinite(found.half) else 0.0
            axes.errorbar(
                found.mean / scale, y, xerr=half, color=style.colour, marker=style.marker, markersize=5,
                linewidth=1.4, capsize=2,
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), [metric.label for metric in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(f"difference from {baseline} / spread of single pictures before training", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, rivals, styles, lines=False)
    return figure


def weights_figure(table: Comparisons, axis: str) -> Figure | None:
    """The last W of each strategy side by side, mean over seeds, over its row's mean; None where there is none.

    Rows are rewards, columns denoising steps from noise to clean by their source level. Numbers are K·W.
    """
    found = {}
    for strategy in table.strategies:
        own = [r.weights for r in table.group.results if r.cells[axis] == strategy]
        if own and all((w["names"], w["levels"]) == (own[0]["names"], own[0]["levels"]) for w in own):
            found[strategy] = (own[0], np.mean([w["W"] for w in own], axis=0))
    if not found:
        return None
    relative = {strategy: _relative(W_RK) for strategy, (_, W_RK) in found.items()}
    span = max(1.25, *(max(float(r.max()), 1 / float(r.min())) for r in relative.values()))
    rewards, steps = next(iter(relative.values())).shape
    width = max(2.2, min(0.36 * steps, 6.0))
    figure = Figure(figsize=(1.8 + width * len(found), 1.3 + 0.36 * rewards), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for place, (panel, (strategy, (one, W_RK))) in enumerate(zip(panels, found.items(), strict=True)):
        image = panel.imshow(relative[strategy], cmap="coolwarm", norm=LogNorm(1 / span, span), aspect="auto")
        panel.set_title(strategy, fontsize=9)
        panel.set_yticks(range(rewards), one["names"] if place == 0 else [""] * rewards, fontsize=8)
        marks = sorted({0, steps // 2, steps - 1})
        panel.set_xticks(marks, [f"{one['levels'][k]:.2f}" for k in marks], fontsize=8)
        if width / steps > 0.3:
            _write_numbers(panel, W_RK * steps, relative[strategy], span)
    figure.supxlabel("noise level t of the denoising step (noise → clean)", fontsize=9)
    bar = figure.colorbar(image, ax=list(panels), aspect=14)
    bar.set_label("W / its row's mean", fontsize=8)
    ticks = [1 / span, 1.0, span]
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.minorticks_off()
    return figure


def _relative(W_RK: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    mean = W_RK.mean(axis=1, keepdims=True)
    relative = np.where(mean > 0, W_RK / np.maximum(mean, 1e-300), 1.0)
    clipped: np.ndarray[Any, Any] = np.clip(relative, 1 / LARGEST, LARGEST)
    return clipped


def _write_numbers(panel: "Axes", numbers: Any, relative: Any, span: float) -> None:
    for (row, column), number in np.ndenumerate(numbers):
        strong = abs(np.log(relative[row, column])) > 0.7 * np.log(span)
        shade = "white" if strong else "black"
        panel.text(column, row, f"{number:.2f}", ha="center", va="center", color=shade, fontsize=6)


def _panels(count: int) -> tuple[Figure, "list[Axes]"]:
    """A grid of panels, up to three in a row."""
    columns = 2 if count == 4 else min(3, count)
    rows = ceil(count / columns)
    figure = Figure(figsize=(PANEL[0] * columns + 0.4, PANEL[1] * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for unused in axes[count:]:
        unused.set_visible(False)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=7)
        panel.locator_params(nbins=5)
    return figure, list(axes[:count])


def _present(results: Iterable[Result], axis: str, styles: Mapping[str, Style]) -> list[str]:
    there = {result.cells[axis] for result in results}
    return [strategy for strategy in styles if strategy in there]


def _legend(figure: Figure, strategies: Sequence[str], styles: Mapping[str, Style], *, lines: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=styles[name].colour, marker=styles[name].marker, markersize=5,
               linestyle=styles[name].line if lines else "none", label=name)
        for name in strategies
    ]  # fmt: skip
    columns = math.ceil(len(handles) / math.ceil(len(handles) / 6))
    # matplotlib fills a column before the next
    by_columns = [handle for column in range(columns) for handle in handles[column::columns]]
    figure.legend(handles=by_columns, loc="outside upper center", ncols=columns, frameon=False, fontsize=8)


__all__ = [
    "Metric",
    "Style",
    "cells_of",
    "curves_figure",
    "differences_figure",
    "pareto_figure",
    "styles_of",
    "weights_figure",
]
