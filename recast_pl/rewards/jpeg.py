"""JPEG size as a reward, either way.

Reference: Black et al., "Training diffusion models with reinforcement learning", 2023 (DDPO): size at quality
95 in kB.
"""

import io
from collections.abc import Sequence

import torch
from torch import Tensor

from recast_pl.rewards.base import Reward
from recast_pl.rewards.images import nan_where_broken, to_pil
from recast_pl.types import Prompt

QUALITY = 95


def jpeg_kilobytes(images_B3HW: Tensor) -> Tensor:
    """Size of each picture as a JPEG of quality 95, in kB of 1000 bytes; [B], on the pictures' device."""
    sizes = []
    for image in to_pil(images_B3HW):
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=QUALITY)
        sizes.append(buffer.tell() / 1000)
    return nan_where_broken(torch.tensor(sizes, device=images_B3HW.device), images_B3HW)


class JPEGIncompressibility(Reward):
    """The size in kB: detail and texture are rewarded."""

    range = (0.0, float("inf"))

    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Sizes [B]."""
        return jpeg_kilobytes(images_B3HW)


class JPEGCompressibility(Reward):
    """The negative size in kB: plain pictures are rewarded."""

    range = (float("-inf"), 0.0)

    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Negative sizes [B]."""
        return -jpeg_kilobytes(images_B3HW)
