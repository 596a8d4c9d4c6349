"""Figures for TensorBoard: drawn without a display, written by one process, closed afterwards."""

from typing import TYPE_CHECKING

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def log_figure(trainer: pl.Trainer, name: str, figure: "Figure", *, step: int) -> None:
    """Adds `figure` under `name` to every TensorBoard logger of the main process."""
    for logger in trainer.loggers:
        if trainer.is_global_zero and isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, global_step=step, close=False)
