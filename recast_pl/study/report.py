"""A study's report: tables with their uncertainty, figures, files for further work."""

import re
from dataclasses import replace
from math import isfinite
from pathlib import Path

from matplotlib.figure import Figure

from recast_pl.study.document import Block, Code, Heading, Paragraph, Picture, Table, markdown, page
from recast_pl.study.figures import (
    Style,
    cells_of,
    curves_figure,
    differences_figure,
    pareto_figure,
    styles_of,
    weights_figure,
)
from recast_pl.study.folder import Collected, collect
from recast_pl.study.pictures import grid_figure, pictures_of
from recast_pl.study.record import Result
from recast_pl.study.tables import (
    Cell,
    Comparisons,
    all_comparisons,
    comparisons_csv,
    count_line,
    plus_minus,
    runs_csv,
)

WIN, LOSS, ROBUST = "▲", "▼", "†"
DPI = 130

HOW_TO_READ = (
    "Numbers are means over seeds ± the half width of their 95 % interval (Student). The second line of a "
    "cell is the difference from {baseline}, paired by seed (same prompts, same noises), with its own 95 % "
    f"interval: {WIN} and {LOSS} stand only where that excludes zero, {ROBUST} where the difference also "
    "holds against all comparisons of this report together (Holm). The mean gain is the change from before "
    "training, over the spread of single pictures, averaged over the rewards. Scores are on held-out prompts, "
    "and more is better. Judges were not trained on."
)
DETECTABLE = (
    "What could have been seen: the true difference from {baseline} that this many seeds show with a chance "
    "of 80 %, by the spread of the differences between seeds. A smaller one may be there unseen. In brackets: "
    "over the spread of single pictures before training."
)


def write_report(folder: Path, output: Path, *, compare: str | None = None) -> list[Path]:
    """Writes `report.md` with its figures, `report.html`, `runs.csv` and `comparisons.csv`.

    Args:
        folder: the study's.
        output: where to; made where it is not there.
        compare: `AXIS=BASELINE`, another axis or baseline than the study's own.

    Raises:
        ValueError: where `folder` is no study's, or `compare` names nothing in it.
    """
    study = collect(folder)
    if compare is not None:
        study = replace(study, plan=study.plan.comparing(*compare.partition("=")[::2]))
    output.mkdir(parents=True, exist_ok=True)
    tables = [table for table in all_comparisons(study.plan, study.results) if table.group.results]
    blocks = _Writer(study, output).blocks(tables)
    files = {
        "report.md": markdown(blocks),
        "report.html": page(blocks, output, title=study.plan.name),
        "runs.csv": runs_csv(study.plan, study.results),
        "comparisons.csv": comparisons_csv(tables),
    }
    for name, text in files.items():
        (output / name).write_text(text, encoding="utf-8")
    return [output / name for name in files]


class _Writer:
    """Makes blocks, and their figures in the output folder."""

    def __init__(self, study: Collected, output: Path) -> None:
        self.study, self.output, self.axis = study, output, study.plan.axis
        self.baseline = study.plan.baseline
        names = [run["cells"][self.axis] for run in study.plan.runs]
        self.styles: dict[str, Style] = styles_of(names, self.baseline)

    def blocks(self, tables: list[Comparisons]) -> list[Block]:
        """The whole document."""
        study = self.study
        blocks: list[Block] = [
            Heading(text=f"Study {study.plan.name}", level=1),
            Paragraph(
                text=f"{len(study.plan.runs)} runs planned: {len(study.results)} finished, "
                f"{len(study.failures)} failed, {len(study.missing)} not at their end."
            ),
        ]
        if tables:
            blocks.append(Paragraph(text=count_line(tables)))
            blocks.append(Paragraph(text=HOW_TO_READ.format(baseline=self.baseline)))
        blocks += self._lost()
        settings = dict.fromkeys(table.group.setting for table in tables)
        for setting in settings:
            blocks += self._setting(setting, [table for table in tables if table.group.setting == setting])
        return blocks

    def _lost(self) -> list[Block]:
        """Failed and unfinished runs."""
        blocks: list[Block] = []
        if self.study.failures:
            blocks.append(Heading(text="Failed runs"))
            blocks.append(
                Paragraph(
                    text="They are in no number below; a seed counts for a difference only where both its runs "
                    "are there."
                )
            )
            for failure in self.study.failures:
                blocks.append(Paragraph(text=f"{failure.name}: {failure.reason}"))
                blocks.append(Code(text=failure.tail or "(no output)"))
        if self.study.missing:
            blocks.append(Heading(text="Runs not at their end"))
            blocks.append(Paragraph(text=", ".join(self.study.missing)))
        return blocks

    def _setting(self, setting: str, tables: list[Comparisons]) -> list[Block]:
        blocks: list[Block] = [Heading(text=f"Setting {setting}")]
        for table in tables:
            if len(tables) > 1:
                blocks.append(Heading(text=table.group.title, level=3))
            if table.group.pooled:
                count = len(cells_of(table.group.results, self.axis))
                blocks.append(
                    Paragraph(
                        text=f"A seed's value is its mean over the {count} groups below, where it has all."
                    )
                )
            blocks += self._tables(table)
            blocks += self._differences(table)
            if not table.group.pooled:
                blocks += self._figures(table)
            if table is tables[0]:
                blocks += self._pareto(setting, [r for r in self.study.results if r.setting == setting])
        return blocks

    def _tables(self, table: Comparisons) -> list[Block]:
        head = ("", "seeds", *(metric.label for metric in table.metrics), "reward calls", "minutes")
        before = ["before training", ""]
        for metric in table.metrics:
            known = metric.kind == "reward" and metric.name in table.before
            before.append(f"{table.before[metric.name]:.4g}" if known else "")
        rows = [(*before, "", "")]
        for strategy in table.strategies:
            own = [result for result in table.group.results if result.cells[self.axis] == strategy]
            cells = [table.cell(strategy, metric) for metric in table.metrics]
            count = len({result.seed for result in own})
            calls = f"{_mean([r.reward_calls for r in own]):.0f}" if own else "–"
            minutes = f"{_mean([r.seconds / 60 for r in own]):.1f}" if own else "–"
            rows.append((strategy, str(count), *(cell_text(cell, count) for cell in cells), calls, minutes))
        return [Table(head=head, rows=tuple(rows)), *self._detectable(table)]

    def _detectable(self, table: Comparisons) -> list[Block]:
        """What the study could have seen."""
        rows = []
        for strategy in table.strategies:
            if strategy == self.baseline:
                continue
            row = [strategy]
            for metric in table.metrics:
                difference = table.cell(strategy, metric).difference
                seen = difference is not None and isfinite(difference.detectable)
                text = f"{difference.detectable:.2g}" if difference is not None and seen else "–"
                spread = table.spread.get(metric.name, 0.0) if metric.kind == "reward" else 0.0
                if difference is not None and seen and spread > 0:
                    text += f" ({difference.detectable / spread:.2f} spreads)"
                row.append(text)
            rows.append(tuple(row))
        told = DETECTABLE.format(baseline=self.baseline)
        head = ("", *(metric.label for metric in table.metrics))
        return [Paragraph(text=told), Table(head=head, rows=tuple(rows))] if rows else []

    def _differences(self, table: Comparisons) -> list[Block]:
        if not any(cell.difference for cell in table.cells):
            return []
        figure = differences_figure(table, self.axis, self.baseline, self.styles)
        caption = (
            f"{table.group.title}: difference from {self.baseline} within seeds, in spreads of single "
            "pictures. Points and bars: mean and 95 % interval; strokes: single seeds."
        )
        return [self._picture(figure, f"differences {table.group.title}", caption)]

    def _pareto(self, setting: str, results: list[Result]) -> list[Block]:
        if len({name for result in results for name in result.rewards}) < 2:
            return []
        cells = cells_of(results, self.axis)
        told = (
            "; ".join(f"{number} {cell}" for number, cell in enumerate(cells, start=1))
            if len(cells) > 1
            else ""
        )
        caption = (
            f"{setting}: pairs of rewards after training. Points are means over seeds with their standard "
            "errors, lines join each strategy's points that none of its others beats in both."
            + (f" Numbers: {told}." if told else "")
        )
        return [self._picture(pareto_figure(results, self.axis, self.styles), f"pareto {setting}", caption)]

    def _figures(self, table: Comparisons) -> list[Block]:
        title = table.group.title
        curves = curves_figure(table, self.axis, self.styles)
        caption = f"{title}: rewards on held-out prompts over reward calls; bands: 95 % intervals over seeds."
        blocks: list[Block] = [self._picture(curves, f"curves {title}", caption)]
        figure = weights_figure(table, self.axis)
        if figure is not None:
            caption = f"{title}: the last W (mean over seeds) over its row's mean; numbers are K·W."
            blocks.append(self._picture(figure, f"W {title}", caption))
        return [*blocks, *self._grid(table)]

    def _grid(self, table: Comparisons) -> list[Block]:
        """The first seed that most strategies have: before training, and each strategy after."""
        by_seed: dict[int, list[Result]] = {}
        for result in table.group.results:
            by_seed.setdefault(result.seed, []).append(result)
        seed, results = max(by_seed.items(), key=lambda item: (len(item[1]), -item[0]))
        results = sorted(results, key=lambda result: table.strategies.index(result.cells[self.axis]))
        rows = {"before": pictures_of(self._place(results[0]), 0)}
        rows |= {r.cells[self.axis]: pictures_of(self._place(r), r.iterations) for r in results}
        figure = grid_figure({name: pictures for name, pictures in rows.items() if pictures})
        if figure is None:
            return []
        caption = f"{table.group.title}: the same held-out prompts and noises, seed {seed}."
        return [self._picture(figure, f"pictures {table.group.title}", caption)]

    def _place(self, result: Result) -> Path:
        return self.study.root.joinpath(result.setting, *result.cells.values(), f"seed-{result.seed}")

    def _picture(self, figure: Figure, name: str, caption: str) -> Picture:
        file = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_") + ".png"
        figure.savefig(self.output / file, dpi=DPI)
        return Picture(file=file, caption=caption)


def cell_text(cell: Cell, count: int) -> str:
    """A table's cell: mean and interval, and under them the difference with its marks."""
    if cell.interval is None:
        return "–"
    text = plus_minus(cell.interval.mean, cell.interval.half)
    if cell.interval.count != count:
        text += f" (n = {cell.interval.count})"
    difference = cell.difference
    if difference is None:
        return text
    mark = {"win": f"{WIN} ", "loss": f"{LOSS} ", "tie": ""}[difference.verdict] + ROBUST * cell.robust
    found = difference.interval
    return f"{text}\n{mark}{plus_minus(found.mean, found.half, sign=True)}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
