"""Pictures as rewards and files want them."""

import numpy as np
from PIL import Image
from torch import Tensor


def to_uint8(images_B3HW: Tensor) -> Tensor:
    """Pictures in [0, 1] to uint8 by rounding, as the pipeline's own postprocessing does."""
    return (images_B3HW.detach().float().clamp(0, 1) * 255).round().byte()


def to_pil(images_B3HW: Tensor) -> list[Image.Image]:
    """Pictures in [0, 1] as B PIL images."""
    arrays: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = (
        to_uint8(images_B3HW).permute(0, 2, 3, 1).cpu().numpy()
    )
    return [Image.fromarray(array) for array in arrays]
