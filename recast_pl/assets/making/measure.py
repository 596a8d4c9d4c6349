"""How good the embedded pipeline is, by a detector that no network is part of."""

from collections import defaultdict

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline

from recast_pl.assets.making.text import NULL_TOKENS
from recast_pl.scenes import clauses, sample_scene


@torch.no_grad()
def clause_rates(
    pipeline: StableDiffusion3Pipeline,
    *,
    count: int,
    seed: int,
    held_out: bool = True,
    steps: int = 10,
    guidance_scale: float = 1.0,
    batch_size: int = 64,
) -> dict[str, float]:
    """Share of pictures that fulfil each clause of their caption wholly, and `all` of them at once."""
    generator = np.random.default_rng(seed)
    scenes = [sample_scene(generator, held_out=held_out) for _ in range(count)]
    noise = torch.Generator().manual_seed(seed)
    right: dict[str, list[bool]] = defaultdict(list)
    pipeline.set_progress_bar_config(disable=True)
    for first in range(0, count, batch_size):
        part = scenes[first : first + batch_size]
        pictures = pipeline(
            prompt=[scene.caption for scene in part],
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            max_sequence_length=NULL_TOKENS,
            generator=noise,
            output_type="np",
        ).images
        for picture, scene in zip(pictures, part, strict=True):
            values = clauses(picture.transpose(2, 0, 1), scene.metadata)
            for clause, value in values.items():
                right[clause].append(value == 1)
            right["all"].append(all(value == 1 for value in values.values()))
    return {clause: float(np.mean(hits)) for clause, hits in right.items()}
