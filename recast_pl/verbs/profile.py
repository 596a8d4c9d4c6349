"""The verb `profile`: a policy's discriminability profiles and W, without training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from recast_pl.credit import (
    CreditAssigner,
    Evidence,
    Profile,
    ReCAST,
    ValueHead,
    npz,
    profile_figure,
    weights_figure,
)
from recast_pl.credit.evidence import EvidenceAverage
from recast_pl.module import ReCASTModule
from recast_pl.prompts import PromptData
from recast_pl.types import PromptBatch, Weights


def measure_profile(
    trainer: pl.Trainer,
    model: ReCASTModule,
    datamodule: PromptData,
    *,
    ckpt_path: str | None,
    iterations: int,
    folder: str | None,
) -> Profile:
    """See `recast_pl.cli.trainer.Trainer.profile`."""
    (credit,) = [callback for callback in trainer.callbacks if isinstance(callback, CreditAssigner)]  # type: ignore[attr-defined]
    if not isinstance(credit.strategy, ReCAST) or isinstance(credit.strategy.estimator, ValueHead):
        raise ValueError(
            f"credit.strategy: `profile` needs ReCAST with an estimator that measures without training "
            f"(PairedCompletions, Preview or FromFile), got {_described(credit.strategy)}"
        )
    if iterations < 1:
        raise ValueError(f"iterations: expected 1 or more, got {iterations}")
    strategy = credit.strategy
    strategy.average = EvidenceAverage(memory=1.0)  # the policy stands still: all evidence counts alike
    datamodule.trainer = trainer
    model.rewards.check_prompts(datamodule.prompts("train"), origin=datamodule.origin("train"))
    datamodule.check_shares(trainer.world_size)
    strategy.check(model.rewards.names, model.rewards.budgets_R, model.rollout.num_steps)
    watcher = Profiling(model, strategy)
    trainer.predict(
        watcher,
        dataloaders=datamodule.grouped(iterations),
        return_predictions=False,
        ckpt_path=ckpt_path,
    )
    place = Path(folder or Path(trainer.log_dir or ".") / "profile")  # every process asks: it is broadcast
    weights = watcher.tables[-1]
    assert strategy.profile is not None
    assert strategy.average.latest is not None
    if trainer.is_global_zero:
        write_profile(place, strategy, weights)
        rank_zero_info(profile_table(strategy.profile, strategy.average.latest, watcher.seconds))
        rank_zero_info(change_line([table.values_RK for table in watcher.tables]))
        rank_zero_info(f"Written: {place}/profiles.npz, profiles.png and W.png")
    return strategy.profile


def write_profile(place: Path, strategy: ReCAST, weights: Weights) -> None:
    """profiles.npz in the released format, read back and checked, profiles.png and W.png."""
    assert strategy.profile is not None
    assert strategy.average.latest is not None
    place.mkdir(parents=True, exist_ok=True)
    npz.write(
        place / "profiles.npz",
        names=weights.names,
        levels=weights.levels,
        ratios=npz.equivalent_profile(strategy.profile, strategy.alpha),
        table_RK=weights.values_RK / weights.values_RK.shape[1],
        measured=npz.Measured(
            evidence=strategy.average.latest,
            alpha=strategy.alpha,
            normalisation=strategy.normalisation,
            clip=strategy.clip,
        ),
    )
    profile_figure(strategy.profile).savefig(place / "profiles.png", dpi=150)
    weights_figure(weights).savefig(place / "W.png", dpi=150)


def _described(strategy: object) -> str:
    name = type(strategy).__name__
    return f"{name} with {type(strategy.estimator).__name__}" if isinstance(strategy, ReCAST) else name


class Profiling(pl.LightningModule):
    """Takes a module through Lightning's predict loop and lets a strategy look at each iteration's samples."""

    def __init__(self, module: ReCASTModule, strategy: ReCAST) -> None:
        super().__init__()
        self.module, self.strategy = module, strategy
        self.tables: list[Weights] = []  # K·W after each iteration's samples
        self.seconds = dict.fromkeys(module.rewards.names, 0.0)  # of each reward, in the estimator

    def setup(self, stage: str) -> None:
        """The module's own."""
        self.module.setup(stage)

    def configure_model(self) -> None:
        """The module's own."""
        self.module.configure_model()

    def teardown(self, stage: str) -> None:
        """The module's own."""
        self.module.teardown(stage)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The module's own."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The module's own, which refuses another policy's checkpoint."""
        self.module.on_load_checkpoint(checkpoint)

    def transfer_batch_to_device(self, batch: PromptBatch, device: Any, dataloader_idx: int) -> PromptBatch:
        """Prompts stay where they are."""
        return batch

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """One iteration's samples."""
        suite = self.module.rewards
        before = dict(suite.seconds)
        experience = self.module.experience(batch)
        rollout = {name: suite.seconds[name] - before[name] for name in suite.names}
        self.strategy.observe(self.module.probe(experience))
        for name in suite.names:
            self.seconds[name] += suite.seconds[name] - before[name] - rollout[name]
        self.tables.append(self.strategy.weights(suite.names, suite.budgets_R, self.module.levels))


def profile_table(profile: Profile, evidence: Evidence, seconds: Mapping[str, float]) -> str:
    """Reward, total discriminability, where half of it is reached, error, reward calls and their seconds."""
    width = max(len(name) for name in (*profile.names, "reward"))
    lines = [
        f"\nDiscriminability from noise to clean, {float(evidence.samples_RK.max()):.0f} samples a level",
        f"{'reward':{width}} {'D at clean':>11} {'half at t':>10} {'error':>8} {'calls':>8} {'seconds':>8}",
    ]
    calls = evidence.reward_calls // len(profile.names)
    for row, name in enumerate(profile.names):
        total = float(profile.total_R[row])
        error = float(profile.errors_RK[row].mean()) / total if total > 0 else float("nan")
        told = "  not told from noise" if name in profile.undetected else ""
        lines.append(
            f"{name:{width}} {total:11.5f} {profile.half_level(row):10.3f} {error:8.1%} {calls:8d} "
            f"{seconds[name]:8.1f}{told}"
        )
    lines.append(
        f"error: mean standard error over levels, of D at clean. {evidence.seconds:.1f} s in the estimator, "
        f"{sum(seconds.values()):.1f} s of them in rewards."
    )
    return "\n".join(lines)


def change_line(tables: Sequence[Tensor]) -> str:
    """Mean absolute change of K·W as evidence was added, first and last."""
    if len(tables) < 2:
        return "One iteration: no change of W to show."
    changes = torch.stack(list(tables)).diff(dim=0).abs().mean((1, 2))
    first, last = float(changes[0]), float(changes[-1])
    return f"Mean change of K·W by one more iteration: at first {first:.4f}, at last {last:.4f}."
