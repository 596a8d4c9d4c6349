"""Writes the trained parts in the layouts of diffusers and transformers, measures them, writes the card."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from torch import nn
from transformers import CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from recast_pl.assets.making.clip import retrieval
from recast_pl.assets.making.denoiser import SHIFT
from recast_pl.assets.making.measure import clause_rates

CLAUSES = ("background", "colour", "count", "shape", "position", "all")


def assemble(
    parts: dict[str, Any],
    *,
    tokenizer: CLIPTokenizer,
    output: Path,
    recipe: Any,
    seconds: dict[str, float],
    pictures: int = 1024,
) -> dict[str, Any]:
    """Writes `pipeline`, `clip` and `judge` below `output`; returns and describes what was measured."""
    pipeline = StableDiffusion3Pipeline(
        transformer=parts["denoiser"],
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=parts["vae"],
        text_encoder=parts["encoders"][0],
        tokenizer=tokenizer,
        text_encoder_2=parts["encoders"][1],
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.to(torch.float16).save_pretrained(output / "pipeline")
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 64},
        crop_size={"height": 64, "width": 64},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    for name in ("clip", "judge"):
        parts[name].half().save_pretrained(output / name)
        tokenizer.save_pretrained(output / name)
        processor.save_pretrained(output / name)

    shipped = StableDiffusion3Pipeline.from_pretrained(
        output / "pipeline", text_encoder_3=None, tokenizer_3=None, torch_dtype=torch.float32
    )
    measured: dict[str, Any] = {
        "held_out": clause_rates(shipped, count=pictures, seed=100, held_out=True),
        "seen": clause_rates(shipped, count=pictures, seed=101, held_out=False),
        "guided": clause_rates(shipped, count=pictures, seed=100, held_out=True, guidance_scale=3.0),
    }
    for name in ("clip", "judge"):
        measured[f"retrieval_{name}"] = retrieval(parts[name].float(), tokenizer, seed=200)
    sizes = {
        "denoiser": _count(parts["denoiser"]),
        "VAE": _count(parts["vae"]),
        "text encoders": _count(parts["encoders"]),
        "CLIP (reward)": _count(parts["clip"]),
        "CLIP (judge)": _count(parts["judge"]),
    }
    card = _card(measured, sizes=sizes, recipe=asdict(recipe), seconds=seconds, pictures=pictures)
    (output / "README.md").write_text(card, encoding="utf-8")
    return measured


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _card(
    measured: dict[str, Any],
    *,
    sizes: dict[str, int],
    recipe: dict[str, int],
    seconds: dict[str, float],
    pictures: int,
) -> str:
    rows = "\n".join(
        f"| {clause} | {measured['held_out'][clause]:.1%} | {measured['seen'][clause]:.1%} | "
        f"{measured['guided'][clause]:.1%} |"
        for clause in CLAUSES
    )
    parameters = "\n".join(f"| {name} | {count / 1e6:.2f} M |" for name, count in sizes.items())
    times = "\n".join(f"| {stage} | {spent / 60:.0f} min |" for stage, spent in seconds.items())
    return f"""# The embedded models

A small `StableDiffusion3Pipeline` (64 × 64 pixels, latents 8 × 16 × 16, no third text encoder) and two small
CLIPs, in the layouts that `from_pretrained` reads, float16. They exist so that the framework runs for real on
a laptop; they know coloured shapes and nothing else.

```python
import torch
from diffusers import StableDiffusion3Pipeline
from recast_pl.assets import EMBEDDED

pipe = StableDiffusion3Pipeline.from_pretrained(
    EMBEDDED["tiny"], text_encoder_3=None, tokenizer_3=None, torch_dtype=torch.float32
)
pipe(
    "a red circle left of a blue square on a white background",
    num_inference_steps=10,
    guidance_scale=3.0,
    max_sequence_length=1,
).images[0]
```

`max_sequence_length=1`: the zeros in the place of the missing T5 are one token, as in training.

## Data

Scenes drawn by `recast_pl.scenes`: one to three equal objects, or two in a relation (left of, above), of 4
shapes and 6 colours, on 3 backgrounds, their centres on a lattice of 8 pixels; half of the pictures blurred,
half of low contrast, a fifth with grain. Captions say nothing of that quality. Half of the combinations of
count, colour, shape and relation never appear in the captions of pipeline and VAE ("held out"); the CLIPs saw
both halves. {recipe["scenes"]} scenes for the denoiser, fresh ones at every update for the CLIPs.

## Training

`python -m recast_pl.assets.make --output recast_pl/assets/tiny` with {recipe}.

| part | parameters |
|---|---|
{parameters}

| stage | wall time on 2 CPU cores, shared with other work |
|---|---|
{times}

The VAE's code is given, not learnt: three channels are the whitened mean colours of 4 × 4 patches, five
their strongest details. Its decoder is trained by the absolute and squared error of pictures and the absolute
error of their differences between neighbouring pixels. The denoiser and its two text encoders are trained
together by flow matching (logit-normal times shifted by {SHIFT:g}, 10 % empty prompts, AdamW, averaged
weights), each CLIP by its contrastive loss.

## Measured quality

Share of {pictures} pictures whose clause is wholly right, by a detector without networks (colour segmentation
and connected components), 10 Euler steps:

| clause | held-out captions | seen captions | held-out, guidance 3 |
|---|---|---|---|
{rows}

32-way retrieval of held-out scenes' captions: {measured["retrieval_clip"]:.1%} (reward CLIP),
{measured["retrieval_judge"]:.1%} (judge CLIP).

## Limits

Sixty words of English; no people, no text, no photographs. Not for anything but trying out this framework.
"""
