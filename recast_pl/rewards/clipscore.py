"""CLIPScore: cosine of the picture's and the prompt's CLIP embeddings."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recast_pl.assets import resolve
from recast_pl.rewards.base import Reward
from recast_pl.rewards.images import to_pil
from recast_pl.types import Prompt


class CLIPScore(Reward):
    """Cosine in [−1, 1] of a transformers `CLIPModel`, pictures prepared by its own image processor.

    Args:
        pretrained: a folder or hub id in transformers' layout, or an embedded CLIP (`recast_pl://clip`).

    Reference: Hessel et al., "CLIPScore: A reference-free evaluation metric for image captioning", 2021,
    without its factor 2.5 and its floor at 0.
    """

    range = (-1.0, 1.0)

    def __init__(self, *, pretrained: str = "openai/clip-vit-large-patch14") -> None:
        self.source = resolve(pretrained, key="CLIPScore.pretrained")
        self._model: Any = None

    def load(self, device: torch.device) -> None:
        """Loads model, tokenizer and image processor; the latter's PIL class needs no torchvision."""
        from transformers import CLIPModel, CLIPTokenizer
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        self._tokenizer = CLIPTokenizer.from_pretrained(self.source)
        self._processor = CLIPImageProcessorPil.from_pretrained(self.source)
        model = CLIPModel.from_pretrained(self.source, dtype=torch.float32)
        self._model = model.to(device).eval().requires_grad_(False)

    def unload(self) -> None:
        """Drops the model."""
        self._model = None

    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Cosines [B]."""
        device = images_B3HW.device
        pixels = self._processor(images=to_pil(images_B3HW), return_tensors="pt").pixel_values
        tokens = self._tokenizer(
            [prompt.text for prompt in prompts],
            padding="max_length",
            max_length=self._model.config.text_config.max_position_embeddings,
            truncation=True,
            return_tensors="pt",
        ).to(device)
        image_BD = _features(self._model.get_image_features(pixel_values=pixels.to(device)))
        text_BD = _features(self._model.get_text_features(**tokens))
        return F.cosine_similarity(image_BD, text_BD, dim=-1)


def _features(output: Any) -> Tensor:
    """Transformers 5 returns an output object where transformers 4 returned the tensor."""
    features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return features
