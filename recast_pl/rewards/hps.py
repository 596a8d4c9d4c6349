"""HPSv2.1: an OpenCLIP ViT-H-14 that was trained on people's rankings of pictures.

Shape suffixes: B samples, C H W picture.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from recast_pl.rewards.base import Reward
from recast_pl.rewards.images import to_pil
from recast_pl.rewards.networks import backbones
from recast_pl.rewards.networks.openclip import to_clip_model
from recast_pl.rewards.networks.weights import Precision, check_source, read_state_dict, torch_dtype
from recast_pl.types import Prompt

VISION_HEADS, TEXT_HEADS = 16, 16  # ViT-H-14: widths 1280 and 1024, heads of 80 and 64; shapes do not tell
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # OpenAI's CLIP


class HPSv2(Reward):
    """Cosine of version 2.1's embeddings; about 0.2 to 0.35.

    Pictures are fitted into the model's square, longest side to its side, and padded with black. OpenCLIP and
    transformers cut prompts into the same tokens, but OpenCLIP also repairs broken Unicode and HTML escapes,
    which is left out here.

    Args:
        weights: the OpenCLIP state dict: a file, a folder that holds `filename`, or the hub id of one.
        filename: the file's name in the folder or on the hub.
        tokenizer: a folder or hub id of CLIP's tokenizer.
        dtype: precision of the weights; scores are float32.

    Reference: Wu et al., "Human preference score v2: A solid benchmark for evaluating human preferences of
    text-to-image synthesis", 2023.
    """

    range = (-1.0, 1.0)

    def __init__(
        self,
        *,
        weights: str = "xswu/HPSv2",
        filename: str = "HPS_v2.1_compressed.pt",
        tokenizer: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        dtype: Precision = "float32",
    ) -> None:
        self.weights = check_source(weights, key="HPSv2.weights", holds=(filename,), files=True)
        self.filename = filename
        self.tokenizer = check_source(tokenizer, key="HPSv2.tokenizer", holds=("tokenizer.json", "vocab.json"))
        self.dtype = torch_dtype(dtype, key="HPSv2.dtype")
        self._scorer: backbones.CLIPScorer | None = None

    def load(self, device: torch.device) -> None:
        """Loads the state dict into a `CLIPModel`, and the tokenizer."""
        backbone = backbones.share_clip(
            (self.weights, self.filename), dtype=self.dtype, device=device, build=self._build
        )
        size = backbone.model.config.vision_config.image_size
        self._scorer = backbones.CLIPScorer(
            backbone,
            backbones.load_tokenizer(self.tokenizer, backbone, key="HPSv2.tokenizer"),
            backbones.Preparation(("longest side", size), lambda images: fit_into_square(images, size=size)),
        )

    def _build(self) -> Any:
        state = read_state_dict(self.weights, self.filename, key="HPSv2.weights")
        return to_clip_model(state, vision_heads=VISION_HEADS, text_heads=TEXT_HEADS, key="HPSv2.weights")

    def unload(self) -> None:
        """Lets go of the model."""
        self._scorer = None

    def networks(self) -> Iterable[nn.Module]:
        return backbones.networks_of(self._scorer)

    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Cosines [B]."""
        scorer: backbones.CLIPScorer = backbones.held(self._scorer, self)
        return scorer.cosines(images_B3HW, [prompt.text for prompt in prompts])


def fit_into_square(images_B3HW: Tensor, *, size: int) -> Tensor:
    """Longest side to `size` (bicubic), black around it to a square, normalised by `MEAN` and `STD`.

    >>> fit_into_square(torch.ones(1, 3, 8, 16), size=4)[0, 0].sign().tolist()
    [[-1.0, -1.0, -1.0, -1.0], [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, -1.0]]
    """
    height, width = images_B3HW.shape[-2:]
    scale = size / max(height, width)
    small = (max(1, round(width * scale)), max(1, round(height * scale)))
    place = ((size - small[0]) // 2, (size - small[1]) // 2)
    squares = np.zeros((len(images_B3HW), size, size, 3), dtype=np.float32)
    for square, image in zip(squares, to_pil(images_B3HW), strict=True):
        fitted = np.asarray(image.resize(small, Image.Resampling.BICUBIC), dtype=np.float32) / 255
        square[place[1] : place[1] + small[1], place[0] : place[0] + small[0]] = fitted
    normalised = (torch.from_numpy(squares) - torch.tensor(MEAN)) / torch.tensor(STD)
    return normalised.permute(0, 3, 1, 2).contiguous()
