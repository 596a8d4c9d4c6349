"""A study's folder with results made by hand: what a report must say of them is known."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from recast_pl.study.folder import FAILURE, PLAN, RESULT, Failure
from recast_pl.study.record import Point, Result

LEVELS = [1.0, 0.9, 0.75, 0.5, 0.0]


def result(cells, seed, after, *, setting="a", judges=None, before=0.5, spread=0.1, curve=None, **rest):
    """A result whose rewards are the keys of `after`."""
    names = tuple(after)
    points = curve or [(0, 0, dict.fromkeys(names, before)), (10, 1000, after)]
    W = [[1 / (len(names) * 4)] * 4 for _ in names]
    fields = {
        "setting": setting,
        "cells": cells,
        "seed": seed,
        "digest": "0" * 16,
        "iterations": points[-1][0],
        "rewards": names,
        "before": dict.fromkeys(names, before),
        "after": after,
        "spread": dict.fromkeys(names, spread),
        "masked": dict.fromkeys([*names, *(judges or {})], 0.0),
        "judges": judges or {},
        "reward_calls": points[-1][1],
        "seconds": 60.0,
        "wall_seconds": 90.0,
        "curve": tuple(Point(iteration=i, reward_calls=c, means=m) for i, c, m in points),
        "weights": {"names": list(names), "levels": LEVELS, "W": W},
    }
    return Result(**{**fields, **rest})


def write(root, results, *, axis="strategy", baseline="uniform", failures=(), missing=(), pictures=0):
    """The folder that `run` would have left; `missing` are (setting, cells, seed)."""
    root.mkdir(parents=True, exist_ok=True)
    runs = [(r.setting, r.cells, r.seed) for r in (*results, *failures)] + list(missing)
    runs = [{"setting": setting, "cells": cells, "seed": seed} for setting, cells, seed in runs]
    plan = {"name": "made", "axis": axis, "baseline": baseline, "runs": runs}
    (root / PLAN).write_text(json.dumps(plan))
    for one in results:
        folder = place(root, one)
        folder.mkdir(parents=True)
        (folder / RESULT).write_text(one.to_json())
        for iteration in (0, one.iterations) if pictures else ():
            draw(folder / "pictures" / f"iteration={iteration:05d}", pictures, seed=one.seed + iteration)
    for failure in failures:
        place(root, failure).mkdir(parents=True)
        fields = {name: getattr(failure, name) for name in Failure.__dataclass_fields__}
        (place(root, failure) / FAILURE).write_text(json.dumps(fields))
    return root


def place(root: Path, run) -> Path:
    return root.joinpath(run.setting, *run.cells.values(), f"seed-{run.seed}")


def draw(folder, count, *, seed):
    folder.mkdir(parents=True)
    random, lines = np.random.default_rng(seed), []
    for number in range(count):
        name = f"{number:05d}.png"
        Image.fromarray(random.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / name)
        lines.append(json.dumps({"file": name, "prompt": f"prompt {number} of a scene with some words"}) + "\n")
    (folder / "pictures.jsonl").write_text("".join(lines))


def failure(
    cells, seed, *, setting="a", reason="`fit` ended with status 1", tail="ValueError: no such <thing>"
):
    return Failure(
        setting=setting, cells=cells, seed=seed, digest="0" * 16, stage="fit", reason=reason, tail=tail
    )
