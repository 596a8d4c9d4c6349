"""How fast one GPU is at SD3.5-Medium's real shape, with random weights: no download, done within 6 minutes.

    python tests/benchmarks/gpu_check.py --json gpu_check.json

Denoiser and VAE have the shapes of stabilityai/stable-diffusion-3.5-medium, the denoiser in bfloat16 with LoRA
of rank 32; 512 × 512 pixels, 25 steps, 24 of them trained, DiffusionNFT with its reference. Text embeddings
are random too, and rewards are left out. For each batch size, which is that of rollout, decoding and backward
passes alike: rollout, decoding, and the update over all 24 steps, eager and then compiled; what does not fit,
or would not be done in time, is said to be so.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from quickstart import circumstances

from recast_pl.module import ReCASTModule
from recast_pl.policy import SD3Policy
from recast_pl.rewards import RewardSuite, Sharpness
from recast_pl.rollout import ODERollout
from recast_pl.types import Prompt, PromptBatch, Rollout, TextEmbeddings

MEDIUM: dict[str, Any] = {  # its transformer/config.json
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
}
VAE: dict[str, Any] = {  # its vae/config.json
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "sample_size": 1024,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is measured."""

    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    resolution: int = 512
    tokens: int = 77 + 128  # CLIP's and T5's
    rank: int = 32
    steps: int = 25
    trained: int = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One batch size; None: did not fit, or there was no time."""

    mode: str
    batch: int
    rollout: float | None = None  # seconds, like the next two
    decode: float | None = None
    update: float | None = None
    warm_up: float | None = None  # of first passes, compilation included
    peak: float | None = None  # GiB
    pairs: int | None = None  # (sample, step) pairs of the update
    note: str = ""

    @property
    def rollout_rate(self) -> float | None:
        """Pictures a second of the rollout alone."""
        return None if self.rollout is None else self.batch / self.rollout

    @property
    def rate(self) -> float | None:
        """Pictures a second of rollout, decoding and update."""
        if self.rollout is None or self.decode is None or self.update is None:
            return None
        return self.batch / (self.rollout + self.decode + self.update)


def module_of(shape: Shape, device: torch.device, *, compile: str | None) -> ReCASTModule:
    """The framework's module on random weights."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    torch.manual_seed(0)
    with device:
        transformer = torch.nn.Module.to(SD3Transformer2DModel(**shape.transformer), torch.bfloat16)
        vae = AutoencoderKL(**shape.vae)
    encoders = dict.fromkeys(("text_encoder", "text_encoder_2", "text_encoder_3"))
    tokenizers = dict.fromkeys(("tokenizer", "tokenizer_2", "tokenizer_3"))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer, vae=vae, scheduler=scheduler, **encoders, **tokenizers
    )
    policy = SD3Policy(
        pretrained="recast_pl://tiny",  # never read: the pipeline is handed over
        lora_rank=shape.rank,
        resolution=shape.resolution,
        weights_dtype="bfloat16",
        compile=compile,
    )
    policy.adopt(pipeline, seed=0)
    policy.to(device)
    return ReCASTModule(
        policy=policy,
        rewards=RewardSuite(rewards={"none": Sharpness()}),
        rollout=ODERollout(num_steps=shape.steps, progress_bar=False),
        timesteps_per_sample=shape.trained,
    )


class Check:
    """Times one module at several batch sizes."""

    def __init__(self, module: ReCASTModule, shape: Shape, device: torch.device, *, mode: str) -> None:
        self.module, self.shape, self.device, self.mode = module, shape, device, mode
        self.optimizer = torch.optim.AdamW(module.policy.trainable_parameters(), lr=3e-4)

    def row(self, batch: int) -> Row:
        """Rollout, decoding and update of one batch; what does not fit says so."""
        try:
            return self._row(batch)
        except torch.OutOfMemoryError:
            return Row(mode=self.mode, batch=batch, note="does not fit")
        finally:
            self.optimizer.zero_grad()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _row(self, size: int) -> Row:
        text, batch = self._text(size), _batch(size)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        with torch.autocast(self.device.type, torch.bfloat16):
            warm_up, _ = self._timed(lambda: self._first_passes(batch, text))
            rollout, x0 = self._timed(lambda: self._rollout(batch, text, self.shape.steps))
            decode, images = self._timed(lambda: self.module.policy.decode(x0))
            drawn = Rollout.on_schedule(
                self.module.levels, batch=batch, text=text, x0_BCHW=x0, images_B3HW=images
            )
            update, pairs = self._timed(lambda: self._update(drawn, size, passes=None))
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        return Row(
            mode=self.mode, batch=size, rollout=rollout, decode=decode, update=update, warm_up=warm_up,
            peak=peak, pairs=pairs,
        )  # fmt: skip

    def _first_passes(self, batch: PromptBatch, text: TextEmbeddings) -> None:
        """Compiles and allocates what a size needs: one denoising step, one decoding, one backward pass."""
        x0 = self._rollout(batch, text, 1)
        images = self.module.policy.decode(x0)
        drawn = Rollout.on_schedule(self.module.levels, batch=batch, text=text, x0_BCHW=x0, images_B3HW=images)
        self._update(drawn, len(batch), passes=1)

    def _rollout(self, batch: PromptBatch, text: TextEmbeddings, steps: int) -> torch.Tensor:
        sampler = ODERollout(num_steps=steps, micro_batch_size=len(batch), progress_bar=False)
        with torch.no_grad(), self.module.policy.using("old"):
            return sampler.sample(self.module.policy, batch, text, seed=0)

    def _update(self, drawn: Rollout, size: int, *, passes: int | None) -> int:
        """What the module's own update does, without Lightning; the number of pairs."""
        module = self.module
        pairs = module.pairs(drawn)
        advantages_BK = torch.linspace(-1, 1, size)[:, None].expand(-1, self.shape.steps)
        done = 0
        for part in list(pairs.split(size))[:passes]:
            samples = module.objective.draw(drawn, advantages_BK, part, seed=0)
            velocities = module.objective.predict(
                module.policy, module.rollout, samples, drawn.text[part.row_N.to(self.device)]
            )
            (module.objective.loss(velocities, samples).total * (len(part) / len(pairs))).backward()
            done += len(part)
        torch.nn.utils.clip_grad_norm_(module.policy.trainable_parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.clear_autocast_cache()
        return done

    def _text(self, size: int) -> TextEmbeddings:
        config = self.shape.transformer
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.device, torch.bfloat16)

        return TextEmbeddings(
            sequence_BLD=drawn(size, self.shape.tokens, config["joint_attention_dim"]),
            pooled_BD=drawn(size, config["pooled_projection_dim"]),
        )

    def _timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        began = self._now()
        result = work()
        return self._now() - began, result

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _batch(size: int) -> PromptBatch:
    index = torch.arange(size)
    prompts = tuple(Prompt(text="", metadata={}) for _ in range(size))
    return PromptBatch(iteration=0, prompts=prompts, group_B=index, sample_B=index)


def measured(
    shape: Shape, device: torch.device, sizes: Sequence[int], *, backends: Sequence[str | None], seconds: float
) -> list[Row]:
    """All modes and sizes, as far as they fit and `seconds` last.

    A size is begun only if it would be done in time, judged by twice the time of the size before.
    """
    end, rows = time.perf_counter() + seconds, []
    for backend in backends:
        mode, taken, fits = backend or "eager", 0.0, True
        check: Check | None = None
        for size in sizes:
            began = time.perf_counter()
            if not fits or began + 2 * taken > end:
                rows.append(Row(mode=mode, batch=size, note="no time" if fits else "does not fit"))
                continue
            check = check or Check(module_of(shape, device, compile=backend), shape, device, mode=mode)
            rows.append(check.row(size))
            print(json.dumps(asdict(rows[-1])), flush=True)  # what is known should the time run out
            fits, taken = rows[-1].note == "", time.perf_counter() - began
        del check
        gc.collect()
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = [
        "| mode | batch | rollout, images/s | iteration, images/s | rollout, s | decode, s | update, s "
        "| first passes, s | peak, GiB | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        values = (row.rollout_rate, row.rate, row.rollout, row.decode, row.update, row.warm_up, row.peak)
        cells = " | ".join("" if value is None else f"{value:.2f}" for value in values)
        lines.append(f"| {row.mode} | {row.batch} | {cells} | {row.note} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table; writes JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--json", type=Path, default=None, help="where the numbers go")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU: at this shape a CPU would take hours")
    rows = measured(
        Shape(transformer=MEDIUM, vae=VAE),
        torch.device("cuda"),
        options.sizes,
        backends=(None, "inductor"),
        seconds=options.seconds,
    )
    found = {"device": torch.cuda.get_device_name(), **circumstances()}
    print(f"\n{table(rows)}\n{found}")
    if options.json is not None:
        options.json.write_text(json.dumps({**found, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
