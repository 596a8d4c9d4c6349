"""What feedback is worth at each step, as `worth_by_step.py` measures it: rows of W in a table and a figure.

R rewards, K trained steps; `levels` has all of the schedule.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from recast_pl.credit import SNR, NoiseLevel
from recast_pl.figures.palette import COLOURS, reward_colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What was found."""

    names: tuple[str, ...]
    levels: Tensor
    steps: Tensor  # the trained ones
    mean_square_RK: Tensor  # ‖μ‖², free of bias
    noise_RK: Tensor  # σ²
    value_RK: Tensor  # v
    error_RK: Tensor  # of v, over held-out pictures
    weights_RK: Tensor  # K·W of the run

    def best_RK(self) -> Tensor:
        """The rows that raise their rewards most, of sum 1."""
        best = self.value_RK.clamp_min(0) / self.noise_RK
        return best / best.sum(dim=1, keepdim=True)

    def efficiency_R(self, row_RK: Tensor) -> Tensor:
        """Of rows against the best ones."""
        return self._pace_R(row_RK) / self._pace_R(self.best_RK())

    def _pace_R(self, row_RK: Tensor) -> Tensor:
        return (row_RK * self.value_RK).sum(dim=1) / (row_RK.square() * self.noise_RK).sum(dim=1).sqrt()

    def rows(self) -> Mapping[str, Tensor]:
        """W's rows by strategy, over the trained steps and of sum 1; `shared` is the mean of the best ones."""
        best_RK, budgets_R = self.best_RK(), torch.ones(len(self.names))
        time_weights = {"NoiseLevel": NoiseLevel(), "SNR": SNR()}
        tables = {
            name: strategy.table(self.names, budgets_R, self.levels)[:, self.steps].float()
            for name, strategy in time_weights.items()
        }
        rows = {
            "best": best_RK,
            "shared": best_RK.mean(dim=0).expand_as(best_RK),
            "ReCAST": self.weights_RK,
            "Uniform": torch.ones_like(best_RK),
            **tables,
        }
        return {name: row_RK / row_RK.sum(dim=1, keepdim=True) for name, row_RK in rows.items()}

    def write(self, path: Path) -> None:
        """As JSON."""
        plain = {
            key: value.tolist() if isinstance(value, Tensor) else value for key, value in asdict(self).items()
        }
        path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Worth":
        """What `write` has written."""
        plain = json.loads(path.read_text(encoding="utf-8"))
        names = tuple(plain.pop("names"))
        return cls(names=names, **{key: torch.tensor(value) for key, value in plain.items()})


def table(worth: Worth) -> str:
    """Worth and rows of W by step, and what the rows come to, in Markdown."""
    head = " | ".join(f"t = {float(worth.levels[step]):.2f}" for step in worth.steps)
    lines = [f"| reward | | {head} | efficiency |", "|---|---|" + "---|" * (len(worth.steps) + 1)]
    for r, name in enumerate(worth.names):
        value, error = worth.value_RK[r], worth.error_RK[r]
        scale = value.abs().max()
        lines += [
            f"| {name} | ‖μ‖² / σ² | {_cells(worth.mean_square_RK[r] / worth.noise_RK[r])} | |",
            f"| | v / its largest | {_cells(value / scale)} | |",
            f"| | ± | {_cells(error / scale)} | |",
        ]
        for strategy, row_RK in worth.rows().items():
            efficiency = float(worth.efficiency_R(row_RK)[r])
            lines.append(f"| | w: {strategy} | {_cells(row_RK[r])} | {efficiency:.2f} |")
    return "\n".join(lines)


def _cells(values_K: Tensor) -> str:
    return " | ".join(f"{value:.2f}" for value in values_K.tolist())


def figure(worth: Worth, path: Path) -> None:
    """A panel for each reward: the best row of W, ReCAST's, and the even one."""
    from matplotlib.figure import Figure

    rows, places = worth.rows(), range(len(worth.steps))
    shown = Figure(figsize=(9, 2.6 * ((len(worth.names) + 1) // 2)), layout="constrained")
    grid = shown.subplots((len(worth.names) + 1) // 2, 2, sharex=True, sharey=True, squeeze=False)
    for r, (axes, name) in enumerate(zip(grid.flat, worth.names, strict=False)):
        for strategy, colour, line, marker in (
            ("best", COLOURS[0], "-", "o"),
            ("ReCAST", reward_colour(r), "--", "s"),
            ("Uniform", "#7a7a7a", ":", ""),
        ):
            efficiency = float(worth.efficiency_R(rows[strategy])[r])
            axes.plot(places, rows[strategy][r], color=colour, linestyle=line, marker=marker, markersize=4,
                      label=f"{strategy} ({efficiency:.2f})")  # fmt: skip
        axes.set_title(name, fontsize=10)
        axes.legend(frameon=False, fontsize=8, title="w (efficiency)", title_fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xticks(list(places), [f"{float(worth.levels[step]):.2f}" for step in worth.steps], fontsize=8)
    for axes in grid.flat[len(worth.names) :]:
        axes.set_axis_off()
    shown.supxlabel("noise level t of the denoising step (noise → clean)", fontsize=9)
    shown.supylabel("share of the reward's budget", fontsize=9)
    shown.savefig(path, dpi=110)
