"""The CreditAssigner callback: computes W before it is used, again every N iterations, and shows it."""

from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from recast_pl.credit.base import CreditStrategy, Uniform
from recast_pl.credit.evidence import check_same
from recast_pl.credit.plots import history_figure, profile_figure, weights_figure
from recast_pl.credit.probe import Probe
from recast_pl.figures import log_figure
from recast_pl.module import ReCASTModule
from recast_pl.types import Experience, PromptBatch, Weights


class CreditAssigner(pl.Callback):
    """Keeps the module's W.

    Args:
        every_n_steps: iterations between recomputations; the first is before the first iteration.
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
        self.every_n_steps, self.strategy = every_n_steps, strategy or Uniform()
        self.on_other_rewards = on_other_rewards
        self.history: list[tuple[int, Tensor]] = []  # iteration and K·W of each recomputation
        self._restored: dict[str, Any] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Checks the strategy against rewards and budgets, before any weight is loaded."""
        if stage == "fit":
            module = _ours(pl_module)
            suite, steps = module.rewards, module.rollout.num_steps
            self.strategy.check(suite.names, suite.budgets_R, steps)
            if self.strategy.needs_updates and module.objective.trains_on == "trajectory":
                raise ValueError(
                    "credit.strategy: learns from clean samples that the update noises anew, and "
                    f"{type(module.objective).__name__} trains on the rollout's own steps; take an estimator "
                    "such as Preview or PairedCompletions"
                )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lets strategies that learn from the update see it."""
        _ours(pl_module).observer = self.strategy if self.strategy.needs_updates else None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Computes W where it is due, in the precision of the training step."""
        module = _ours(pl_module)
        if self._restored is not None:
            self._take_back(self._restored, module)
            self._restored = None
        if module.iteration % self.every_n_steps == 0 or not module.has_weights:
            with module.clock("credit"):
                if self.strategy.needs_evidence:
                    with trainer.precision_plugin.train_step_context():
                        self.strategy.observe(probe_of(module, module.experience(batch)))
                self._compute(module)
                self._show(trainer, module)

    def _compute(self, module: ReCASTModule) -> None:
        module.weights = self.strategy.weights(module.rewards.names, module.rewards.budgets_R, module.levels)

    def _show(self, trainer: pl.Trainer, module: ReCASTModule) -> None:
        weights, step, profile = module.weights, module.iteration, self.strategy.profile
        before = self.history[-1][1] if self.history else weights.values_RK
        self.history.append((step, weights.values_RK))
        log_figure(trainer, "credit/W", lambda: weights_figure(weights), step=step)
        if len(self.history) > 1:
            log_figure(trainer, "credit/W_over_time", lambda: history_figure(weights, self.history), step=step)
        values = {"credit/change_of_W": float((weights.values_RK - before).abs().mean())}
        for name, row_K in zip(weights.names, weights.values_RK, strict=True):
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
        """Saves W with the rewards, budgets and levels it belongs to, its history, and the strategy's state."""
        module = _ours(pl_module)
        if module.has_weights:
            checkpoint["credit"] = {
                "names": list(module.weights.names),
                "budgets": module.rewards.budgets_R,
                "levels": module.weights.levels,
                "values": module.weights.values_RK,
                "history": [[iteration, values_RK] for iteration, values_RK in self.history],
                "strategy": type(self.strategy).__name__,
                "state": dict(self.strategy.state_dict()),
            }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keeps the saved W until the module's rewards and levels are known."""
        self._restored = checkpoint.get("credit")

    def _take_back(self, saved: dict[str, Any], module: ReCASTModule) -> None:
        """The saved state, if it is of these rewards and these noise levels; W follows from it.

        W is made again from the restored evidence, so budgets or temperatures that have changed count at once.
        A run that goes on with another strategy takes nothing and computes its own.

        Raises:
            ValueError: naming both.
        """
        weights = Weights(names=tuple(saved["names"]), levels=saved["levels"], values_RK=saved["values"])
        if weights.names != module.rewards.names and self.on_other_rewards == "restart":
            rank_zero_warn(
                f"the checkpoint's W is of the rewards {', '.join(weights.names)}, this run's are "
                f"{', '.join(module.rewards.names)}: credit starts anew"
            )
            return
        check_same(weights, module.rewards.names, module.levels, what="the checkpoint's W")
        if saved["strategy"] != type(self.strategy).__name__:
            return
        self.strategy.load_state_dict(saved["state"])
        self.history = [(int(iteration), values_RK) for iteration, values_RK in saved["history"]]
        if self.strategy.ready:
            self._compute(module)
        elif torch.equal(saved["budgets"], module.rewards.budgets_R):
            module.weights = weights


def probe_of(module: ReCASTModule, experience: Experience) -> Probe:
    """What an estimator may do with an iteration's samples, by the module's rollout policy."""
    policy, size = module.policy, module.rollout.micro_batch_size

    def velocity(x: Tensor, t: float, text: Any) -> Tensor:
        with torch.no_grad(), policy.using("old"):
            parts = [
                module.rollout.velocity(policy, x[rows], t, text[rows])
                for rows in (slice(start, start + size) for start in range(0, len(x), size))
            ]
        return torch.cat(parts)

    return Probe(
        experience=experience,
        velocity=velocity,
        decode=lambda x0: torch.cat([policy.decode(part) for part in x0.split(size)]),
        score=module.score_everywhere,
        schedule=policy.levels,
        seed=module.seed,
    )


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
