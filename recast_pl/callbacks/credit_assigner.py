"""The CreditAssigner callback: makes W due every N iterations, shows it, and keeps its state in checkpoints."""

from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor

from recast_pl.credit.assignment import Credit
from recast_pl.credit.base import CreditStrategy
from recast_pl.credit.plots import history_figure, profile_figure, weights_figure
from recast_pl.figures import log_figure
from recast_pl.module import ReCASTModule
from recast_pl.parallel.processes import warn
from recast_pl.types import PromptBatch


class CreditAssigner(pl.Callback):
    """Brings the module its credit, and keeps clock, figures and state of it.

    Args:
        every_n_steps: iterations between recomputations of W; the first is in the first iteration.
        strategy: turns budgets and noise levels (and evidence) into W; None: Uniform.
        on_other_rewards: what happens to a checkpoint of other rewards: `refuse` names both, `restart` takes
            over everything but the credit, which starts anew (for stages in which the rewards grow).
    """

    def __init__(
        self,
        *,
        every_n_steps: int = 20,
        strategy: CreditStrategy | None = None,
        on_other_rewards: Literal["refuse", "restart"] = "refuse",
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"credit.every_n_steps: expected 1 or more, got {every_n_steps}")
        self.every_n_steps, self.on_other_rewards = every_n_steps, on_other_rewards
        self.credit = Credit(strategy)
        self._shown = 0  # so many recomputations are in the logs
        self._restored: dict[str, Any] | None = None

    @property
    def strategy(self) -> CreditStrategy:
        """What makes W."""
        return self.credit.strategy

    @property
    def history(self) -> list[tuple[int, Tensor]]:
        """Iteration and K·W of each recomputation."""
        return self.credit.history

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Checks the strategy against rewards and budgets, before any weight is loaded."""
        if stage == "fit":
            module = _ours(pl_module)
            suite, steps = module.rewards, module.rollout.num_steps
            self.strategy.follow(module.rollout)
            self.strategy.check(suite.names, suite.budgets_R, steps)
            if self.strategy.needs_updates and not module.objective.renoises:
                raise ValueError(
                    "credit.strategy: learns from clean samples that the update noises anew, and "
                    f"{type(module.objective).__name__} trains on the rollout's own steps; take an estimator "
                    "such as Preview or PairedCompletions"
                )
            module.credit = self.credit

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Makes W due where the clock says so."""
        module = _ours(pl_module)
        if self._restored:
            self._take_back(self._restored, module)
        self._restored = None
        self.credit.due |= module.iteration % self.every_n_steps == 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Shows a W that is new."""
        if len(self.history) > self._shown:
            self._shown = len(self.history)
            self._show(trainer)

    def _show(self, trainer: pl.Trainer) -> None:
        weights, profile = self.credit.weights, self.strategy.profile
        step, values_RK = self.history[-1]
        before_RK = self.history[-2][1] if len(self.history) > 1 else values_RK
        log_figure(trainer, "credit/W", lambda: weights_figure(weights), step=step)
        if len(self.history) > 1:
            log_figure(trainer, "credit/W_over_time", lambda: history_figure(weights, self.history), step=step)
        values = {"credit/change_of_W": float((values_RK - before_RK).abs().mean())}
        for name, row_K in zip(weights.names, values_RK, strict=True):
            values[f"credit_entropy/{name}"] = evenness(row_K)
        if profile is not None:
            log_figure(trainer, "credit/discriminability", lambda: profile_figure(profile), step=step)
            for row, name in enumerate(profile.names):
                values[f"credit_total/{name}"] = float(profile.total_R[row])
                values[f"credit_signal/{name}"] = float(profile.signal_R[row])
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Saves W and what it was made of; see `Credit.state_dict`."""
        if self.credit.known:
            checkpoint["credit"] = self.credit.state_dict()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keeps the saved W until the module's rewards and levels are known."""
        self._restored = checkpoint.get("credit")

    def _take_back(self, saved: dict[str, Any], module: ReCASTModule) -> None:
        if tuple(saved["names"]) != module.rewards.names and self.on_other_rewards == "restart":
            warn(
                f"the checkpoint's W is of the rewards {', '.join(saved['names'])}, this run's are "
                f"{', '.join(module.rewards.names)}: credit starts anew"
            )
            return
        self.credit.load_state_dict(saved)
        self._shown = len(self.history)


def evenness(row_K: Tensor) -> float:
    """A row's entropy over log K: 1 for an even row, 0 for a single step (and for a row of zeros)."""
    total = row_K.sum()
    if not total > 0 or len(row_K) < 2:
        return 0.0
    share_K = (row_K / total).clamp_min(1e-300)
    return float(-(share_K * share_K.log()).sum() / torch.tensor(float(len(row_K))).log())


def _ours(module: pl.LightningModule) -> ReCASTModule:
    assert isinstance(module, ReCASTModule)
    return module
