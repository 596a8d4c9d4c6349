"""`predict`: pictures as PNG files, and a JSON line for each."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter

from recast_pl.rewards.images import to_pil


class PictureWriter(BasePredictionWriter):
    """Writes every predicted picture and a line in `pictures.jsonl` with its prompt, seed and scores.

    Args:
        folder: where to; None: `pictures` in the run's folder.
    """

    def __init__(self, *, folder: str | None = None) -> None:
        super().__init__(write_interval="batch")
        self.folder = folder

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Writes one batch; each process its own file of lines."""
        if prediction is None:
            return
        folder = Path(self.folder or Path(trainer.log_dir or ".") / "pictures")
        folder.mkdir(parents=True, exist_ok=True)
        rollout, scores = prediction.rollout, prediction.scores
        suffix = "" if trainer.world_size == 1 else f"-{trainer.global_rank}"
        first = batch_idx == 0
        with (folder / f"pictures{suffix}.jsonl").open("w" if first else "a", encoding="utf-8") as lines:
            for row, image in enumerate(to_pil(rollout.images_B3HW)):
                sample, prompt = int(batch.sample_B[row]), batch.prompts[row]
                name = f"{sample:05d}.png"
                image.save(folder / name)
                entry = {
                    "file": name,
                    "prompt": prompt.text,
                    "sample": sample,
                    "seed": pl_module.seed,
                    "scores": {
                        reward: float(value) if ok else None
                        for reward, value, ok in zip(
                            scores.names, scores.values_RB[:, row], scores.valid_RB[:, row], strict=True
                        )
                    },
                    "metadata": dict(prompt.metadata),
                }
                lines.write(json.dumps(entry, ensure_ascii=False) + "\n")
        prediction.release()
