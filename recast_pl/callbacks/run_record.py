"""What a study reads of a run: a JSON line for each iteration, evaluation and W, and pictures as files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from recast_pl.credit import CreditAssigner
from recast_pl.credit.weights_record import plain_record
from recast_pl.module import ReCASTModule
from recast_pl.rewards.images import to_pil
from recast_pl.study.record import PICTURES, RECORD
from recast_pl.types import Weights


class RunRecord(pl.Callback):
    """Writes `record.jsonl` and `pictures/iteration=00000/` into a folder.

    A line is flushed before the checkpoint that it belongs to is written, so that a run that was killed and
    goes on may repeat an iteration's line, and never lacks one; the last line of an iteration counts.

    Args:
        folder: where to.
        pictures: held-out pictures that are kept of every evaluation, from its first batch.
    """

    def __init__(self, *, folder: str, pictures: int = 8) -> None:
        if pictures < 0:
            raise ValueError(f"RunRecord.pictures: expected 0 or more, got {pictures}")
        self.folder, self.pictures = Path(folder), pictures
        self._shown: Weights | None = None  # the W that is in the record

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A line for the iteration that is over, after one for its W where that is new."""
        module = _ours(pl_module)
        if not trainer.is_global_zero:
            return
        if module.credit.weights is not self._shown:
            self._shown = module.credit.weights
            self._append("weights", module.iteration - 1, plain_record(self._shown))
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        self._append(
            "train",
            module.iteration,
            {
                "values": {key: value for key, value in metrics.items() if not key.startswith("val/")},
                "seconds": metrics["time/iteration"],
                "reward_calls": reward_calls(trainer, module),
            },
        )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A line that says that all iterations are over."""
        if trainer.is_global_zero:
            self._append("fitted", _ours(pl_module).iteration, {})

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A line for the evaluation."""
        iteration, values = _ours(pl_module).evaluations[-1]
        if trainer.is_global_zero:
            self._append("evaluation", iteration, {"values": dict(values)})

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A line for the judges."""
        if trainer.is_global_zero:
            values = {key: float(value) for key, value in trainer.callback_metrics.items()}
            self._append("judges", _ours(pl_module).iteration, {"values": values})

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps the first pictures."""
        if batch_idx or outputs is None or not trainer.is_global_zero or not self.pictures:
            return
        rollout = outputs.rollout.rows(torch.arange(min(self.pictures, len(outputs.rollout.batch))))
        folder = self.folder / PICTURES / f"iteration={_ours(pl_module).iteration:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        entries = []
        for row, image in enumerate(to_pil(rollout.images_B3HW)):
            name = f"{int(rollout.batch.sample_B[row]):05d}.png"
            image.save(folder / name)
            entries.append({"file": name, "prompt": rollout.batch.prompts[row].text})
        text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
        (folder / "pictures.jsonl").write_text(text, encoding="utf-8")

    def _append(self, kind: str, iteration: int, rest: Mapping[str, Any]) -> None:
        """Adds a line behind the last whole one; one that a kill cut short is dropped."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / RECORD).open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(json.dumps({"kind": kind, "iteration": iteration, **rest}).encode() + b"\n")


def reward_calls(trainer: pl.Trainer, module: ReCASTModule) -> int:
    """Pictures scored for training so far, by all rewards together; evaluations are not training.

        iterations × samples × R + the calls of the credit strategy's own evidence,

    which its state counts (`Evidence.reward_calls`) and a checkpoint keeps.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    credit = [callback for callback in trainer.callbacks if isinstance(callback, CreditAssigner)]  # type: ignore[attr-defined]
    of_credit = sum(counted(assigner.strategy.state_dict(), "reward_calls") for assigner in credit)
    samples = int(data.num_groups) * int(data.group_size)
    return module.iteration * samples * len(module.rewards.names) + of_credit


def counted(state: Any, key: str) -> int:
    """The sum of all numbers under `key`, at any depth.

    >>> counted({"a": {"calls": 2, "b": [{"calls": 3}]}, "calls": 1}, "calls")
    6
    """
    if isinstance(state, Mapping):
        return sum(
            int(value) if name == key and isinstance(value, (int, float)) else counted(value, key)
            for name, value in state.items()
        )
    return sum(counted(value, key) for value in state) if isinstance(state, (list, tuple)) else 0


def _ours(module: pl.LightningModule) -> ReCASTModule:
    assert isinstance(module, ReCASTModule)
    return module
