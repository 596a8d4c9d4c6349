"""W as a picture: rewards down, noise levels along, budgets and column sums on the sides."""

from typing import TYPE_CHECKING

from recast_pl.types import Weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def weights_figure(weights: Weights) -> "Figure":
    """Heatmap of W (rows: rewards, columns: denoising steps from noise to clean by their source level).

    The bars on the right are the row sums (budgets, shares of 1), those above the column sums times K.
    """
    from matplotlib.figure import Figure

    W_RK = (weights.values_RK / weights.values_RK.shape[1]).numpy()
    rewards, steps = W_RK.shape
    figure = Figure(figsize=(2.6 + 0.62 * steps, 1.9 + 0.5 * rewards), layout="constrained")
    axes: dict[str, Axes] = figure.subplot_mosaic(
        [["columns", "."], ["table", "rows"]],
        width_ratios=[max(steps, 4), 2.2],
        height_ratios=[1, max(rewards, 2)],
    )
    table, columns, rows = axes["table"], axes["columns"], axes["rows"]

    image = table.imshow(
        W_RK * steps, cmap="viridis", vmin=0, vmax=max(1e-12, (W_RK * steps).max()), aspect="auto"
    )
    threshold = (W_RK * steps).max() / 2
    for r in range(rewards):
        for k in range(steps):
            value = W_RK[r, k] * steps
            shade = "black" if value > threshold else "white"
            table.text(k, r, f"{value:.2f}", ha="center", va="center", color=shade, fontsize=8)
    table.set_yticks(range(rewards), weights.names)
    table.set_xticks(range(steps), [f"{t:.2f}" for t in weights.levels[:-1].tolist()])
    table.set_xlabel("noise level t of the denoising step (noise → clean)")
    figure.colorbar(image, ax=rows, location="right", label="K·W", aspect=12)

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
