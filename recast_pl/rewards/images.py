"""Pictures as rewards and files want them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recast_pl.types import Prompt


def to_uint8(images_B3HW: Tensor) -> Tensor:
    """Pictures in [0, 1] to uint8 by rounding, as the pipeline's own postprocessing does."""
    return (images_B3HW.detach().float().clamp(0, 1) * 255).round().byte()


def to_pil(images_B3HW: Tensor) -> list[Image.Image]:
    """Pictures in [0, 1] as B PIL images."""
    arrays: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = (
        to_uint8(images_B3HW).permute(0, 2, 3, 1).cpu().numpy()
    )
    return [Image.fromarray(array) for array in arrays]


def nan_where_broken(values: Tensor, images_B3HW: Tensor) -> Tensor:
    """`values` [B, …], NaN for pictures that are not finite: they cannot be scored, whatever was computed.

    >>> nan_where_broken(torch.ones(2), torch.tensor([0.5, torch.inf]).view(2, 1, 1, 1))
    tensor([1., nan])
    """
    broken_B = ~images_B3HW.flatten(1).isfinite().all(dim=1).to(values.device)
    return values.masked_fill(broken_B.view(-1, *[1] * (values.ndim - 1)), torch.nan)


def score_finite(
    images_B3HW: Tensor, prompts: Sequence[Prompt], score: Callable[[Tensor, Sequence[Prompt]], Tensor]
) -> Tensor:
    """`score` of the pictures that are finite, NaN for the others, which no server is asked about."""
    finite_B = images_B3HW.flatten(1).isfinite().all(dim=1)
    if finite_B.all():
        return score(images_B3HW, prompts)
    scores = torch.full((len(images_B3HW),), torch.nan, device=images_B3HW.device)
    rows = finite_B.nonzero().flatten()
    if len(rows):
        scores[rows] = score(images_B3HW[rows], [prompts[row] for row in rows.tolist()])
    return scores
