"""Pictures of W, of its history, and of the discriminability profiles it follows."""

from collections.abc import Sequence
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from recast_pl.credit.profile import Profile
from recast_pl.figures.palette import reward_colour
from recast_pl.types import Weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure


LARGEST = 8.0  # ratio that has its own colour


def weights_figure(weights: Weights) -> "Figure":
    """Heatmap of W (rows: rewards, columns: denoising steps from noise to clean by their source level).

    Numbers are K·W. Colours are W over its row's mean: when a reward counts, beside the bars on the right that
    say how much (row sums: budgets, shares of 1). The bars above are the column sums times K.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    W_RK = (weights.values_RK / weights.values_RK.shape[1]).numpy()
    rewards, steps = W_RK.shape
    cell = min(0.62, 16 / steps)  # inches
    figure = Figure(figsize=(2.6 + cell * max(steps, 4), 1.9 + 0.5 * rewards), layout="constrained")
    axes: dict[str, Axes] = figure.subplot_mosaic(
        [["columns", "."], ["table", "rows"]],
        width_ratios=[cell * max(steps, 4), 1.4],
        height_ratios=[1, max(rewards, 2)],
    )
    table, columns, rows = axes["table"], axes["columns"], axes["rows"]

    relative_RK, span = _relative(weights.values_RK)
    image = table.imshow(relative_RK, cmap="coolwarm", norm=LogNorm(1 / span, span), aspect="auto")
    for r in range(rewards):
        for k in range(steps if cell > 0.45 else 0):  # numbers where they fit
            strong = abs(log(relative_RK[r, k])) > 0.7 * log(span)
            shade = "white" if strong else "black"
            table.text(k, r, f"{W_RK[r, k] * steps:.2f}", ha="center", va="center", color=shade, fontsize=8)
    table.set_yticks(range(rewards), weights.names)
    shown = range(0, steps, max(1, round(0.45 / cell)))
    table.set_xticks(list(shown), [f"{float(weights.levels[k]):.2f}" for k in shown])
    table.set_xlabel("noise level t of the denoising step (noise → clean)")
    _label(figure.colorbar(image, ax=rows, location="right", aspect=12), span)

    columns.bar(range(steps), W_RK.sum(0) * steps, color="#7a8ca3", width=0.8)
    columns.set_xlim(-0.5, steps - 0.5)
    columns.set_xticks([])
    columns.set_ylabel("column\nsum × K", fontsize=8)
    rows.barh(range(rewards), W_RK.sum(1), color="#7a8ca3", height=0.8)
    rows.set_ylim(rewards - 0.5, -0.5)
    rows.set_yticks([])
    rows.set_xlabel("row sum\n(budget)", fontsize=8)
    for side in (columns, rows):
        side.spines[["top", "right"]].set_visible(False)
    return figure


def _relative(values_RK: Tensor) -> "tuple[np.ndarray[Any, Any], float]":
    """Entries over the mean of their row, within `LARGEST`, and the ratio that the colours span either way."""
    mean = values_RK.mean(-1, keepdim=True)
    relative = torch.where(mean > 0, values_RK / mean.clamp_min(1e-300), 1.0).clamp(1 / LARGEST, LARGEST)
    return relative.numpy(), max(1.25, float(relative.max()), 1 / float(relative.min()))


def _label(bar: "Colorbar", span: float) -> None:
    bar.set_label("W / its row's mean")
    ticks = [1 / span, 1.0, span]
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.minorticks_off()


def profile_figure(profile: Profile) -> "Figure":
    """Share of each reward's discriminability that is reached at each noise level, with error bands.

    Points: as estimated, with bands of two standard errors. Lines: the monotone curves whose gains W follows.
    Each reward is drawn over its own total, which the legend names: W only follows shapes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    levels = profile.levels.tolist()
    zero = torch.zeros(1, dtype=torch.float64)
    for row, name in enumerate(profile.names):
        total = float(profile.total_R[row])
        scale = total if total > 0 else 1.0
        curve = torch.cat([zero, profile.monotone_RK[row]]) / scale
        told = "" if name not in profile.undetected else ", not told from noise"
        colour = reward_colour(row)
        label = f"{name} (D = {total:.3g}{told})"
        axes.plot(levels, curve.tolist(), label=label, color=colour, linewidth=1.8)
        known = profile.errors_RK[row].isfinite()
        raw = torch.where(known, profile.divergence_RK[row], torch.nan) / scale
        error = torch.where(known, profile.errors_RK[row], torch.nan) / scale
        axes.plot(levels[1:], raw.tolist(), "o", color=colour, markersize=3.5)
        axes.fill_between(
            levels[1:],
            (raw - 2 * error).tolist(),
            (raw + 2 * error).tolist(),
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
    axes.set_xlim(1.0, 0.0)
    axes.set_ylim(-0.1, 1.2)
    axes.set_xlabel("noise level t (noise → clean)")
    axes.set_ylabel("discriminability D(t) / D(0)")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def history_figure(weights: Weights, history: Sequence[tuple[int, Tensor]]) -> "Figure":
    """W over its row's mean at each recomputation, one panel for each reward: iterations down, steps along."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    rewards, steps = weights.values_RK.shape
    rows = len(history)
    relative, span = _relative(torch.stack([values_RK for _, values_RK in history]))  # recomputations × R × K
    figure = Figure(figsize=(1.2 + 2.1 * rewards, 1.4 + 0.22 * min(rows, 20)), layout="constrained")
    panels = figure.subplots(1, rewards, sharey=True, squeeze=False)[0]
    for row, (panel, name) in enumerate(zip(panels, weights.names, strict=True)):
        image = panel.imshow(relative[:, row], cmap="coolwarm", norm=LogNorm(1 / span, span), aspect="auto")
        panel.set_title(name, fontsize=9)
        marks = sorted({0, steps // 2, steps - 1})
        panel.set_xticks(marks, [f"{float(weights.levels[k]):.2f}" for k in marks], fontsize=8)
    shown = range(0, rows, max(1, rows // 10))
    panels[0].set_yticks(list(shown), [str(history[i][0]) for i in shown], fontsize=8)
    panels[0].set_ylabel("iteration")
    figure.supxlabel("noise level t of the denoising step (noise → clean)", fontsize=9)
    _label(figure.colorbar(image, ax=list(panels), aspect=14), span)
    return figure
