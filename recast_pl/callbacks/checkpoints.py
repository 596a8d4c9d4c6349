"""A run's checkpoints: written whole or not at all, often enough that a crash loses one iteration."""

import os
import pickle
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info

LAST = "last.ckpt"


class CheckpointNotWritten(RuntimeError):
    """A checkpoint could not be written; the one before it is intact."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Files that are whole or not there: written under another name, flushed to the disk, then renamed.

    Paths with a protocol (`s3://…`) go Lightning's own way.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Replaces `path` in one step.

        Raises:
            CheckpointNotWritten: where the disk is full or the folder read-only; what was at `path` still is.
        """
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        unfinished = path.with_name(f".{path.name}.unfinished")  # one that a killed run left is written over
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as a RuntimeError
            with suppress(OSError):
                unfinished.unlink()
            raise CheckpointNotWritten(
                f"no checkpoint could be written to {path}: {error}. What was there before is intact; free "
                "space or choose another folder (checkpoint.folder), and go on from it with --ckpt_path"
            ) from error
        with suppress(OSError):  # so that the new name outlives a power cut; not every file system can
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, location: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads plain types only.

        Raises:
            FileNotFoundError: where there is no such file.
            ValueError: where it is cut short, holds other than plain types, or is no checkpoint of a run.
        """
        try:
            checkpoint = super().load_checkpoint(path, map_location=map_location, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            said = str(error).partition("Re-running `torch.load`")[0].strip()  # advice not to be taken
            raise ValueError(
                f"--ckpt_path: {path} is no whole checkpoint (cut short, or of another program): {said}"
            ) from error
        wanted = ("state_dict", "iteration", "pytorch-lightning_version")
        missing = [key for key in wanted if not isinstance(checkpoint, dict) or key not in checkpoint]
        if missing:
            raise ValueError(f"--ckpt_path: {path} is not a checkpoint of a run: it lacks {', '.join(missing)}")
        return checkpoint


def check_named(ckpt_path: str | None, *, verb: str) -> None:
    """That what `--ckpt_path` names can be a checkpoint, before any weight is loaded.

    Raises:
        ValueError: for a file that is not there, a folder, `last` where a verb has no run to go on with, and
            `best`, for no run has one.
    """
    if ckpt_path is None or "://" in ckpt_path or ckpt_path == "hpc":
        return
    if ckpt_path == "best" or (ckpt_path == "last" and verb != "fit"):
        raise ValueError(f"--ckpt_path: `{verb}` knows no {ckpt_path!r} checkpoint; name the file")
    path = Path(ckpt_path).absolute()
    if ckpt_path == "last" or path.is_file():
        return
    folder = path if path.is_dir() else path.parent
    found = sorted(folder.rglob("*.ckpt") if folder.is_dir() else (), key=lambda file: file.stat().st_mtime)
    newest = f"; the newest below {folder} is {found[-1]}" if found else ""
    what = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
    raise ValueError(f"--ckpt_path: {what}{newest}")


class Checkpoints(Checkpoint):
    """Writes `last.ckpt` as a run goes on, and lets Ctrl-C end it between two iterations.

    The first Ctrl-C lets the iteration in flight come to its end; a second one stops at once, and loses it.

    Args:
        every_n_iterations: between two writings of `last.ckpt`; an epoch's last iteration is always written.
        keep_every_n_iterations: between checkpoints that stay, `iteration=00020.ckpt`; None: none but the last.
        folder: where to; None: `checkpoints` in the run's folder.
    """

    def __init__(
        self,
        *,
        every_n_iterations: int = 1,
        keep_every_n_iterations: int | None = None,
        folder: str | None = None,
    ) -> None:
        for key, value in (
            ("every_n_iterations", every_n_iterations),
            ("keep_every_n_iterations", keep_every_n_iterations),
        ):
            if value is not None and value < 1:
                raise ValueError(f"checkpoint.{key}: expected 1 or more, got {value}")
        self.every_n_iterations = every_n_iterations
        self.keep_every_n_iterations = keep_every_n_iterations
        self.folder = folder
        self.place = Path()  # the folder of this run's checkpoints
        self.saved: int | None = None  # the iteration of `last.ckpt`
        self._between = True  # no iteration is in flight: what the module holds is whole
        self._asked_to_stop = False
        self._handler: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Has checkpoints written and read by `AtomicCheckpointIO`, unless the user has chosen another way."""
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()

    def place_for(self, trainer: pl.Trainer) -> Path:
        """Where this run's checkpoints lie; asked for on every process, for the run's folder is broadcast."""
        return Path(self.folder or Path(trainer.log_dir or ".") / "checkpoints")

    def start(self, trainer: pl.Trainer, ckpt_path: str | None) -> str | None:
        """The checkpoint that a `fit` begins with; `last` is that of its own folder, if there is one.

        Raises:
            ValueError: where the folder holds another run's checkpoint, which this one would write over.
        """
        last = self.place_for(trainer) / LAST
        if ckpt_path == "last":
            if last.exists():
                return str(last)
            rank_zero_info(f"--ckpt_path last: there is no {last} yet, so this run begins at its beginning.")
            return None
        if ckpt_path is None and last.exists():
            raise ValueError(
                f"{last} is another run's, and would be written over: go on from it with --ckpt_path last, or "
                "name another folder (trainer.logger's `version` or `name`, or checkpoint.folder)"
            )
        return ckpt_path

    # ------------------------------------------------------------------ when

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """From here on, what the module holds belongs to an iteration in flight."""
        self._between = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes what is due, and stops where Ctrl-C has asked for it; at an epoch's end after its evaluation.

        Raises:
            KeyboardInterrupt: on every process, if any of them was asked to stop.
        """
        self._between = True
        iteration = _iteration_of(pl_module)
        last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        stop = trainer.strategy.reduce_boolean_decision(self._asked_to_stop, all=False)
        if last or stop or iteration % self.every_n_iterations == 0:
            self._save(trainer, iteration)
        if self.keep_every_n_iterations is not None and iteration % self.keep_every_n_iterations == 0:
            trainer.save_checkpoint(self.place / f"iteration={iteration:05d}.ckpt", weights_only=False)
        if stop and not last:
            raise KeyboardInterrupt

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Once more after the evaluation, so that a resumed run does not repeat it.

        Raises:
            KeyboardInterrupt: as after an iteration.
        """
        self._save(trainer, _iteration_of(pl_module))
        if trainer.strategy.reduce_boolean_decision(self._asked_to_stop, all=False):
            raise KeyboardInterrupt

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Saves what an orderly end leaves (a scheduler's SIGTERM, Ctrl-C), and says how to go on."""
        if trainer.state.fn != "fit":
            return
        iteration = _iteration_of(pl_module)
        orderly = isinstance(exception, (KeyboardInterrupt, SystemExit))
        if orderly and self._between and self.saved is not None and iteration > self.saved:
            self._save(trainer, iteration)
        if self.saved is not None and not isinstance(exception, CheckpointNotWritten):
            rank_zero_info(
                f"Stopped; iteration {self.saved} is saved. To go on: --ckpt_path {self.place / LAST}"
            )

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Tells Lightning's loops where the run stands; what they had counted themselves is put aside.

        Resumed from the last batch of an epoch, they skip one of their counts, and resumed once more they would
        train an epoch too many.
        """
        data = trainer.datamodule  # type: ignore[attr-defined]
        if trainer.state.fn == "fit" and hasattr(data, "iterations_per_epoch"):
            set_position(
                checkpoint["loops"]["fit_loop"],
                iteration=int(checkpoint["iteration"]),
                iterations_per_epoch=data.iterations_per_epoch,
            )

    def _save(self, trainer: pl.Trainer, iteration: int) -> None:
        trainer.save_checkpoint(self.place / LAST, weights_only=False)
        self.saved = iteration

    # ------------------------------------------------------------------ Ctrl-C

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes Ctrl-C over; only a main thread may."""
        self._between, self._asked_to_stop, self.saved = True, False, None
        self.place = self.place_for(trainer)
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._on_interrupt)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Gives Ctrl-C back."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._asked_to_stop or self._between:
            raise KeyboardInterrupt
        self._asked_to_stop = True
        rank_zero_info("\nCtrl-C: the run stops after this iteration, with a checkpoint. Once more: at once.")


def set_position(fit_loop: dict[str, Any], *, iteration: int, iterations_per_epoch: int) -> None:
    """Writes into the state of Lightning's `fit_loop` that `iteration` batches are over, the last one just now.

    At the end of an epoch this says that the epoch is over, and not that its evaluation is still to come.
    """
    if iteration == 0:
        return
    epoch = (iteration - 1) // iterations_per_epoch
    batch = iteration - epoch * iterations_per_epoch  # 1 to iterations_per_epoch
    for scope in ("total", "current"):
        fit_loop["epoch_progress"][scope] |= {
            **dict.fromkeys(("ready", "started"), epoch + 1),
            **dict.fromkeys(("processed", "completed"), epoch),
        }
    for scope, count in (("total", iteration), ("current", batch)):
        fit_loop["epoch_loop.batch_progress"][scope] |= {
            **dict.fromkeys(("ready", "started", "processed"), count),
            "completed": count - 1,
        }
    fit_loop["epoch_loop.batch_progress"]["is_last_batch"] = batch == iterations_per_epoch
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = iteration - 1


def _iteration_of(module: pl.LightningModule) -> int:
    iteration = module.iteration
    assert isinstance(iteration, int)
    return iteration
