"""Grids of held-out pictures: the same prompts, seeds and noises, a row for each strategy."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from matplotlib.figure import Figure
from PIL import Image

from recast_pl.study.record import PICTURES

MOST = 8  # pictures in a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A picture and its prompt."""

    path: Path
    prompt: str


def pictures_of(folder: Path, iteration: int) -> list[Shown]:
    """What a run has kept of an evaluation; empty where it has kept nothing."""
    place = folder / PICTURES / f"iteration={iteration:05d}"
    lines = place / "pictures.jsonl"
    if not lines.exists():
        return []
    entries = [json.loads(line) for line in lines.read_text(encoding="utf-8").split("\n") if line]
    return [Shown(path=place / entry["file"], prompt=entry["prompt"]) for entry in entries]


def grid_figure(rows: Mapping[str, Sequence[Shown]]) -> Figure | None:
    """A row for each name, prompts above the columns; None where the rows share no prompt.

    Columns are the prompts that all rows have at the same place.
    """
    counted = [len(pictures) for pictures in rows.values()]
    shared = [
        place
        for place in range(min(counted, default=0))
        if len({pictures[place].prompt for pictures in rows.values()}) == 1
    ][:MOST]
    if not shared:
        return None
    figure = Figure(figsize=(0.9 + 1.25 * len(shared), 0.7 + 1.25 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(shared), squeeze=False)
    for number, (line, (name, pictures)) in enumerate(zip(axes, rows.items(), strict=True)):
        for cell, place in zip(line, shared, strict=True):
            with Image.open(pictures[place].path) as image:
                cell.imshow(image.convert("RGB"), interpolation="nearest")
            cell.set_xticks([])
            cell.set_yticks([])
            cell.spines[:].set_visible(False)
            if number == 0:
                cell.set_title(fill(pictures[place].prompt, 20), fontsize=6.5)
        line[0].set_ylabel(name, fontsize=9)
    return figure
