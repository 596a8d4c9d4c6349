"""Pictures of the same held-out prompts and noises at every evaluation, each with its own scores."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from recast_pl.figures import log_figure
from recast_pl.module import ReCASTModule
from recast_pl.types import Rollout, Scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class SampleGrid(pl.Callback):
    """Draws the first pictures of every evaluation, and at the end the first evaluation over the last.

    TensorBoard gets each grid; the run's folder gets `before_after.png`.

    Args:
        count: pictures in a grid, from the first evaluation batch.
        columns: of the grid.
    """

    def __init__(self, *, count: int = 16, columns: int = 8) -> None:
        if count < 1 or columns < 1:
            raise ValueError(f"grid: expected count and columns of 1 or more, got {count} and {columns}")
        self.count, self.columns = count, columns
        self._first: tuple[Rollout, Scores] | None = None
        self._last: tuple[Rollout, Scores] | None = None

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Draws the grid of the first batch."""
        assert isinstance(pl_module, ReCASTModule)
        if batch_idx or outputs is None or not trainer.is_global_zero:
            return
        shown = (outputs.rollout, outputs.scores)
        if self._first is None:
            self._first = shown
        self._last = shown
        log_figure(
            trainer,
            "samples",
            lambda: grid_figure([shown], count=self.count, columns=self.columns),
            step=pl_module.iteration,
        )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draws the first evaluation over the last one."""
        folder = trainer.log_dir  # asked for on every process, for it is broadcast
        if self._first is None or self._last is None or self._first is self._last:
            return
        figure = grid_figure(
            [self._first, self._last], count=self.columns, columns=self.columns, titles=["before", "after"]
        )
        log_figure(trainer, "before_after", lambda: figure, step=trainer.global_step)
        if trainer.is_global_zero and folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            figure.savefig(Path(folder) / "before_after.png", dpi=110)


def grid_figure(
    evaluations: Sequence[tuple[Rollout, Scores]],
    *,
    count: int,
    columns: int,
    titles: Sequence[str] | None = None,
) -> "Figure":
    """Rows of pictures, prompt above and scores below each; several evaluations one above the other."""
    from matplotlib.figure import Figure

    count = min(count, len(evaluations[0][0].batch))
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(1.75 * columns, 2.6 * rows * len(evaluations)), layout="constrained")
    parts = figure.subfigures(len(evaluations), 1, squeeze=False)[:, 0]
    for index, (part, (rollout, scores)) in enumerate(zip(parts, evaluations, strict=True)):
        if titles is not None:
            part.suptitle(titles[index], fontsize=11, fontweight="bold")
        axes = part.subplots(rows, columns, squeeze=False).flatten()
        images = rollout.images_B3HW[:count].permute(0, 2, 3, 1).cpu().numpy()
        for place, cell in enumerate(axes):
            cell.set_xticks([])
            cell.set_yticks([])
            cell.spines[:].set_visible(False)
            if place < count:
                cell.imshow(images[place], interpolation="nearest")
                cell.set_title(fill(rollout.batch.prompts[place].text, 26), fontsize=6.5)
                # an axis label, unlike a text, is given its room by the layout
                cell.set_xlabel(_caption(scores, place), fontsize=6, color="#444444", linespacing=1.1)
    return figure


def _caption(scores: Scores, sample: int) -> str:
    lines = []
    for row, name in enumerate(scores.names):
        valid = bool(scores.valid_RB[row, sample])
        lines.append(f"{name} {scores.values_RB[row, sample].item():.3g}" if valid else f"{name} masked")
    return "\n".join(lines) + "\n"  # the layout cuts the last line short
