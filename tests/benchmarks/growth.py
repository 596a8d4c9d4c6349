"""How time and memory grow with samples, denoising steps and rewards.

    OMP_NUM_THREADS=1 python tests/benchmarks/growth.py --figure docs/speed_growth.png

One thing at a time is changed on a quickstart of 2 groups of 8 samples, 10 steps and its 4 rewards. Each
variant runs in a process of its own, so that memory is its own; medians over iterations after one that is not
counted. Memory is the most that the process ever held; libraries and weights are in it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from quickstart import Watch, built, circumstances, peak_bytes, run

CLIP = "recast_pl.rewards.CLIPScore"
REWARDS: dict[str, dict[str, Any]] = {  # the first four are the quickstart's
    "clipscore": {"class_path": CLIP, "init_args": {"pretrained": "recast_pl://clip"}},
    "composition": {"class_path": "recast_pl.rewards.Composition"},
    "sharpness": {"class_path": "recast_pl.rewards.Sharpness"},
    "jpeg": {"class_path": "recast_pl.rewards.JPEGIncompressibility"},
    "other_clip": {"class_path": CLIP, "init_args": {"pretrained": "recast_pl://judge"}},
    **{
        clause: {"class_path": "recast_pl.rewards.Composition", "init_args": {"clauses": [clause]}}
        for clause in ("count", "shape", "colour")
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One geometry."""

    groups: int = 2
    steps: int = 10
    rewards: int = 4


BASE = Variant()
SERIES = {
    "samples": {8 * groups: replace(BASE, groups=groups) for groups in (2, 4, 8)},
    "steps": {steps: replace(BASE, steps=steps) for steps in (5, 10, 20)},
    "rewards": {count: replace(BASE, rewards=count) for count in (1, 4, 8)},
}


def measured(variant: Variant, arguments: Sequence[str] = (), *, iterations: int) -> dict[str, float]:
    """Median seconds of an iteration, its rollout, rewards and update, and the process's peak memory in MiB."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder) / "variant.yaml"
        chosen = dict(list(REWARDS.items())[: variant.rewards])
        content = {
            "rewards": {"rewards": chosen, "budgets": dict.fromkeys(chosen, 1.0)},
            "model": {"rollout": {"init_args": {"num_steps": variant.steps}}},
            "data": {"num_groups": variant.groups},
        }
        overlay.write_text(yaml.safe_dump(content))
        run(built([*arguments, "--config", str(overlay)], iterations=iterations + 1), watch)
    stages = ("iteration", "rollout", "rewards", "update")
    return {stage: median(seconds[stage] for seconds in watch.seconds[1:]) for stage in stages} | {
        "memory": peak_bytes() / 2**20
    }


def in_own_process(variant: Variant, *, iterations: int) -> dict[str, float]:
    """The same, started anew."""
    command = [sys.executable, __file__, "--one", json.dumps(asdict(variant)), "--iterations", str(iterations)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| varied | value | iteration, s | rollout, s | rewards, s | update, s | peak memory, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds = " | ".join(f"{row[key]:.2f}" for key in ("iteration", "rollout", "rewards", "update"))
        lines.append(f"| {row['varied']} | {row['value']} | {seconds} | {row['memory']:.0f} |")
    return "\n".join(lines)


def figure(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Time and memory over each of the three."""
    from matplotlib.figure import Figure

    from recast_pl.figures.palette import COLOURS
    from recast_pl.study.figures import MARKERS

    stages = ("iteration", "rollout", "rewards", "update")
    drawn = Figure(figsize=(9, 5), layout="constrained")
    axes = drawn.subplots(2, 3, sharey="row")
    for column, series in enumerate(SERIES):
        own = [row for row in rows if row["varied"] == series]
        values = [row["value"] for row in own]
        for stage, colour, marker in zip(stages, COLOURS, MARKERS, strict=False):
            axes[0, column].plot(values, [row[stage] for row in own], marker=marker, color=colour, label=stage)
        axes[1, column].plot(values, [row["memory"] for row in own], marker="o", color="black")
        axes[1, column].set_xlabel(
            {"samples": "samples an iteration", "steps": "denoising steps"}.get(series, series)
        )
        for axis in axes[:, column]:
            axis.set_xticks(values)
            axis.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("seconds an iteration")
    axes[1, 0].set_ylabel("peak memory, MiB")
    axes[0, 0].legend()
    drawn.savefig(path, dpi=120)


def main() -> None:
    """Prints the table; writes the figure and JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=3, help="counted iterations of each variant")
    parser.add_argument("--one", default=None, help="a variant as JSON: measure it in this process")
    parser.add_argument("--figure", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None, help="where the numbers go")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measured(Variant(**json.loads(options.one)), iterations=options.iterations)))
        return
    before, known, rows = circumstances(), {}, []
    for series, variants in SERIES.items():
        for value, variant in variants.items():
            if variant not in known:
                known[variant] = in_own_process(variant, iterations=options.iterations)
            rows.append({"varied": series, "value": value, **known[variant]})
    print(f"{table(rows)}\nbefore: {before}\nafter: {circumstances()}")
    if options.figure is not None:
        figure(rows, options.figure)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"rows": rows, "before": before, "after": circumstances()}, indent=1)
        )


if __name__ == "__main__":
    main()
