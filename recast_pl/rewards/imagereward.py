"""ImageReward-v1.0: a BLIP that was trained on people's rankings of pictures.

Shape suffixes: B samples, C H W picture, L tokens, D width.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recast_pl.rewards.base import Reward
from recast_pl.rewards.images import nan_where_broken, to_pil
from recast_pl.rewards.networks.backbones import held
from recast_pl.rewards.networks.blip import load_tokenizer, split, to_text_encoder, to_vision_encoder
from recast_pl.rewards.networks.score_head import linear_head
from recast_pl.rewards.networks.weights import Precision, check_source, freeze, read_state_dict, torch_dtype
from recast_pl.types import Prompt

MEAN, SPREAD = 0.16717362830052426, 1.0333394966054072  # of the head's output on the reference's data
MAX_TOKENS = 35


@dataclass(frozen=True, slots=True)
class _Loaded:
    vision: Any
    text: Any
    head: nn.Module
    tokenizer: Any
    processor: Any


class ImageReward(Reward):
    """Standardised preference of a picture for its prompt; about −2.3 to 2.

    The prompt, cut at 35 tokens, is read by BERT with cross-attention to the picture's tokens; a linear head
    scores the first token.

    Args:
        weights: the released state dict: a file, a folder that holds `filename`, or the hub id of one.
        filename: the file's name in the folder or on the hub.
        tokenizer: a folder or hub id of the BERT tokenizer.
        dtype: precision of both encoders; the head and scores are float32.

    Reference: Xu et al., "ImageReward: Learning and evaluating human preferences for text-to-image
    generation", 2023.
    """

    def __init__(
        self,
        *,
        weights: str = "THUDM/ImageReward",
        filename: str = "ImageReward.pt",
        tokenizer: str = "google-bert/bert-base-uncased",
        dtype: Precision = "float32",
    ) -> None:
        self.weights = check_source(weights, key="ImageReward.weights", holds=(filename,), files=True)
        self.filename = filename
        self.tokenizer = check_source(
            tokenizer, key="ImageReward.tokenizer", holds=("tokenizer.json", "vocab.txt")
        )
        self.dtype = torch_dtype(dtype, key="ImageReward.dtype")
        self._loaded: _Loaded | None = None
        self._lock = threading.Lock()  # fast tokenizers keep padding and truncation as state

    def load(self, device: torch.device) -> None:
        """Loads both encoders, the head and the tokenizer."""
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        key = "ImageReward.weights"
        parts = split(read_state_dict(self.weights, self.filename, key=key), key=key)
        vision, text = to_vision_encoder(parts.vision, key=key), to_text_encoder(parts.text, key=key)
        head = linear_head(parts.head, width=text.config.hidden_size, key=key)
        size = vision.config.image_size
        self._loaded = _Loaded(
            vision=freeze(vision).to(device, self.dtype),
            text=freeze(text).to(device, self.dtype),
            head=head.to(device),
            tokenizer=load_tokenizer(self.tokenizer, text, key="ImageReward.tokenizer"),
            # CLIP's defaults are this recipe: shorter side (bicubic), centre crop, OpenAI's mean and spread.
            processor=CLIPImageProcessorPil(
                size={"shortest_edge": size}, crop_size={"height": size, "width": size}
            ),
        )

    def unload(self) -> None:
        """Drops the networks."""
        self._loaded = None

    def networks(self) -> Iterable[nn.Module]:
        if self._loaded is None:
            return ()
        return (self._loaded.vision, self._loaded.text, self._loaded.head)

    @torch.no_grad()
    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Standardised preferences [B]."""
        loaded: _Loaded = held(self._loaded, self)
        device = loaded.vision.device
        pixels = loaded.processor(images=to_pil(images_B3HW), return_tensors="pt").pixel_values
        with self._lock:
            tokens = loaded.tokenizer(
                [prompt.text for prompt in prompts],
                padding="max_length",
                truncation=True,
                max_length=MAX_TOKENS,
                return_tensors="pt",
            ).to(device)
        image_BLD = loaded.vision(pixel_values=pixels.to(device, loaded.vision.dtype)).last_hidden_state
        text_BLD = loaded.text(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask,
            encoder_hidden_states=image_BLD,
        ).last_hidden_state
        scores = (loaded.head(text_BLD[:, 0]) - MEAN) / SPREAD
        return nan_where_broken(scores, images_B3HW).to(images_B3HW.device)
