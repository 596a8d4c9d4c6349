"""PickScore: a CLIP-H that was trained on people's choices between two pictures of one prompt."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from recast_pl.assets import resolve
from recast_pl.rewards.base import Reward
from recast_pl.rewards.networks import backbones
from recast_pl.rewards.networks.weights import Precision, check_source, torch_dtype
from recast_pl.types import Prompt

SCALE = 26.0  # brings scores near 1; the divisor of the public RL recipes


class PickScore(Reward):
    """exp(logit scale) · cosine / 26; about 0.75 to 0.9 for good pictures.

    Args:
        pretrained: a folder or hub id of the `CLIPModel`.
        processor: a folder or hub id of the tokenizer and the image processor; the weights come without.
        dtype: precision of the weights; scores are float32.

    Reference: Kirstain et al., "Pick-a-Pic: An open dataset of user preferences for text-to-image
    generation", 2023.
    """

    range = (-100.0 / SCALE, 100.0 / SCALE)  # CLIP's training keeps the logit scale's exponential at most 100

    def __init__(
        self,
        *,
        pretrained: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        dtype: Precision = "float32",
    ) -> None:
        self.source = resolve(pretrained, key="PickScore.pretrained")
        self.processor = check_source(
            processor, key="PickScore.processor", holds=("preprocessor_config.json", "processor_config.json")
        )
        self.dtype = torch_dtype(dtype, key="PickScore.dtype")
        self._scorer: backbones.CLIPScorer | None = None

    def load(self, device: torch.device) -> None:
        """Loads model, tokenizer and image processor."""
        backbone = backbones.load_clip(self.source, dtype=self.dtype, device=device, key="PickScore.pretrained")
        key = "PickScore.processor"
        self._scorer = backbones.CLIPScorer(
            backbone,
            backbones.load_tokenizer(self.processor, backbone, key=key),
            backbones.load_preparation(self.processor, key=key),
        )

    def unload(self) -> None:
        """Lets go of the model."""
        self._scorer = None

    def networks(self) -> Iterable[nn.Module]:
        return backbones.networks_of(self._scorer)

    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [B]."""
        scorer: backbones.CLIPScorer = backbones.held(self._scorer, self)
        cosine_B = scorer.cosines(images_B3HW, [prompt.text for prompt in prompts])
        scale: Tensor = scorer.backbone.model.logit_scale.detach().float().exp().to(cosine_B.device)
        return scale * cosine_B / SCALE
