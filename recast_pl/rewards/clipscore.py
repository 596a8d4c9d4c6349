"""CLIPScore: cosine of the picture's and the prompt's CLIP embeddings."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from recast_pl.assets import resolve
from recast_pl.rewards.base import Reward
from recast_pl.rewards.networks import backbones
from recast_pl.rewards.networks.weights import Precision, torch_dtype
from recast_pl.types import Prompt


class CLIPScore(Reward):
    """Cosine in [−1, 1] of a transformers `CLIPModel`, pictures prepared by its own image processor.

    Args:
        pretrained: a folder or hub id in transformers' layout, or an embedded CLIP (`recast_pl://clip`).
        dtype: precision of the weights; scores are float32.

    Reference: Hessel et al., "CLIPScore: A reference-free evaluation metric for image captioning", 2021,
    without its factor 2.5 and its floor at 0.
    """

    range = (-1.0, 1.0)

    def __init__(
        self, *, pretrained: str = "openai/clip-vit-large-patch14", dtype: Precision = "float32"
    ) -> None:
        self.source = resolve(pretrained, key="CLIPScore.pretrained")
        self.dtype = torch_dtype(dtype, key="CLIPScore.dtype")
        self._scorer: backbones.CLIPScorer | None = None

    def load(self, device: torch.device) -> None:
        """Loads model, tokenizer and image processor."""
        key = "CLIPScore.pretrained"
        backbone = backbones.load_clip(self.source, dtype=self.dtype, device=device, key=key)
        self._scorer = backbones.CLIPScorer(
            backbone,
            backbones.load_tokenizer(self.source, backbone, key=key),
            backbones.load_preparation(self.source, key=key),
        )

    def unload(self) -> None:
        """Lets go of the model."""
        self._scorer = None

    def networks(self) -> Iterable[nn.Module]:
        return backbones.networks_of(self._scorer)

    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Cosines [B]."""
        scorer: backbones.CLIPScorer = backbones.held(self._scorer, self)
        return scorer.cosines(images_B3HW, [prompt.text for prompt in prompts])
