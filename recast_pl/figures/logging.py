"""Figures for TensorBoard: drawn without a display, by the one process that writes them, and only for it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def log_figure(trainer: pl.Trainer, name: str, draw: Callable[[], "Figure"], *, step: int) -> None:
    """Adds what `draw` makes under `name` to every TensorBoard logger of the main process."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    if trainer.is_global_zero and loggers:
        figure = draw()
        figure.draw_without_rendering()  # TensorBoard draws once; subfigures settle at the second time
        for logger in loggers:
            logger.experiment.add_figure(name, figure, global_step=step, close=False)
