"""The CreditAssigner callback: computes W before it is used, again every N iterations, and shows it."""

from typing import Any

import lightning.pytorch as pl
import torch

from recast_pl.credit.base import CreditStrategy, Uniform
from recast_pl.credit.plots import weights_figure
from recast_pl.figures import log_figure
from recast_pl.module import ReCASTModule
from recast_pl.types import Weights


class CreditAssigner(pl.Callback):
    """Keeps the module's W.

    Args:
        every_n_steps: iterations between recomputations; the first is before the first iteration.
        strategy: turns budgets and noise levels into W; None: Uniform.
    """

    def __init__(self, *, every_n_steps: int = 20, strategy: CreditStrategy | None = None) -> None:
        if every_n_steps < 1:
            raise ValueError(f"credit.every_n_steps: expected 1 or more, got {every_n_steps}")
        self.every_n_steps, self.strategy = every_n_steps, strategy or Uniform()
        self._restored: dict[str, Any] | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Recomputes W where it is due; a resumed run first takes back the W it had."""
        module = _ours(pl_module)
        if self._restored is not None:
            module.weights = self._checked(self._restored, module)
            self._restored = None
        if module.iteration % self.every_n_steps == 0 or not module.has_weights:
            with module.clock("credit"):
                module.weights = self.strategy.weights(
                    module.rewards.names, module.rewards.budgets_R, module.levels
                )
            log_figure(trainer, "credit/W", weights_figure(module.weights), step=module.iteration)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Saves W with the rewards and noise levels it belongs to."""
        module = _ours(pl_module)
        if module.has_weights:
            checkpoint["credit"] = {
                "names": list(module.weights.names),
                "levels": module.weights.levels,
                "values": module.weights.values_RK,
            }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keeps the saved W until the module's rewards and levels are known."""
        self._restored = checkpoint.get("credit")

    @staticmethod
    def _checked(saved: dict[str, Any], module: ReCASTModule) -> Weights:
        """The saved W, if it is one of these rewards and these noise levels.

        Raises:
            ValueError: naming both.
        """
        names, levels = tuple(saved["names"]), saved["levels"]
        if names != module.rewards.names:
            raise ValueError(
                f"the checkpoint's W is of the rewards {', '.join(names)}, this run's are "
                f"{', '.join(module.rewards.names)}"
            )
        if levels.shape != module.levels.shape or not torch.allclose(levels, module.levels):
            raise ValueError(
                f"the checkpoint's W is of the noise levels {[round(t, 4) for t in levels.tolist()]}, this "
                f"run's are {[round(t, 4) for t in module.levels.tolist()]} (model.rollout.num_steps)"
            )
        return Weights(names=names, levels=levels, values_RK=saved["values"])


def _ours(module: pl.LightningModule) -> ReCASTModule:
    assert isinstance(module, ReCASTModule)
    return module
