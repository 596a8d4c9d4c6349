"""The quickstart as benchmarks run it: built from its YAML, without evaluation, checkpoints and logs."""

import os
import resource
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from recast_pl.assets import EMBEDDED
from recast_pl.cli import DEFAULT_SEED, ReCASTCLI, quieten
from recast_pl.cli.trainer import Trainer
from recast_pl.module import ReCASTModule
from recast_pl.prompts import PromptData
from recast_pl.telemetry.clock import STAGES

CONFIGS = Path(__file__).parents[2] / "configs"


def built(arguments: Sequence[str], *, iterations: int) -> ReCASTCLI:
    """The quickstart with uniform credit as the command line builds it, for so many iterations.

    Args:
        arguments: overlays and options over the quickstart.
        iterations: of the one epoch.
    """
    quieten()
    return ReCASTCLI(
        ReCASTModule,
        PromptData,
        trainer_class=Trainer,
        seed_everything_default=DEFAULT_SEED,
        auto_configure_optimizers=False,
        run=False,
        save_config_callback=None,
        trainer_defaults={"inference_mode": False, "use_distributed_sampler": False, "log_every_n_steps": 1},
        args=[
            *("--config", str(CONFIGS / "quickstart.yaml")),
            *("--config", str(CONFIGS / "credit/uniform.yaml"), *arguments),
            *("--data.iterations_per_epoch", str(iterations), "--trainer.max_epochs", "1"),
            *("--trainer.limit_val_batches", "0", "--trainer.num_sanity_val_steps", "0"),
            *("--trainer.enable_checkpointing", "false", "--trainer.logger", "false"),
            *("--trainer.enable_progress_bar", "false"),
        ],
    )


def larger(folder: Path) -> list[str]:
    """Options for a larger geometry, whose untrained pipeline is written to a folder.

    128 × 128 pixels, 256 tokens, six blocks of width 384, 2 groups of 8 samples: six times the quickstart's
    arithmetic. Text encoders, VAE and rewards are the quickstart's.
    """
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(
        EMBEDDED["tiny"], text_encoder_3=None, tokenizer_3=None, dtype={"default": torch.float32}
    )
    torch.manual_seed(0)
    shape = {**pipeline.transformer.config, "num_layers": 6, "attention_head_dim": 64, "num_attention_heads": 6,
             "caption_projection_dim": 384, "sample_size": 32}  # fmt: skip
    pipeline.transformer = SD3Transformer2DModel.from_config(shape)
    pipeline.save_pretrained(folder)
    return [
        *("--model.policy.init_args.pretrained", str(folder), "--model.policy.init_args.resolution", "128"),
        *("--data.num_groups", "2", "--data.group_size", "8", "--model.micro_batch_size", "16"),
    ]


def run(cli: ReCASTCLI, *callbacks: pl.Callback) -> None:
    """Trains, with callbacks that see a batch before the framework's own do."""
    cli.trainer.callbacks[:0] = callbacks  # type: ignore[attr-defined]
    cli.trainer.fit(cli.model, cli.datamodule)


class Watch(pl.Callback):
    """Keeps each iteration's seconds, by stage and in all, and the process's memory after it."""

    def __init__(self) -> None:
        self.seconds: list[dict[str, float]] = []
        self.resident: list[int] = []  # bytes

    def on_train_batch_start(self, *_: Any) -> None:
        """Starts the clock."""
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Reads it."""
        whole = time.perf_counter() - self._began
        logged = trainer.callback_metrics
        self.seconds.append({stage: float(logged[f"time/{stage}"]) for stage in STAGES} | {"iteration": whole})
        self.resident.append(resident_bytes())


def resident_bytes() -> int:
    """What this process holds in memory now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_bytes() -> int:
    """The most that this process has held (Linux counts kilobytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def circumstances() -> dict[str, Any]:
    """What a measurement's numbers depend on; the load is that of the last minute, five and fifteen."""
    return {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()],
    }
