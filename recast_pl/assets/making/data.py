"""Scenes as training data: pictures and captions, each a function of (seed, index)."""

import numpy as np
import torch
from torch import Tensor

from recast_pl.scenes import Scene, draw, sample_scene


def drawn_scenes(
    count: int, *, seed: int, first: int = 0, held_out: bool = False
) -> tuple[Tensor, list[Scene]]:
    """`count` drawn scenes: uint8 pictures [count, 3, 64, 64] and what they show.

    Scene i depends on (seed, first + i) alone, so that any slice can be drawn again.
    """
    pictures, shown = [], []
    for index in range(first, first + count):
        generator = np.random.default_rng([seed, index, int(held_out)])
        scene = sample_scene(generator, held_out=held_out)
        shown.append(scene)
        pictures.append(torch.from_numpy((draw(scene, generator) * 255 + 0.5).astype(np.uint8)))
    return torch.stack(pictures), shown


def as_float(pictures: Tensor) -> Tensor:
    """uint8 pictures to float32 in [−1, 1]."""
    return pictures.float().div_(127.5).sub_(1)
