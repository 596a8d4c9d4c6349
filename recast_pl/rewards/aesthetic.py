"""Aesthetic: a linear head on CLIP-L's picture embedding, fitted to people's ratings from 1 to 10."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast_pl.assets import resolve
from recast_pl.rewards.base import Reward
from recast_pl.rewards.networks import backbones
from recast_pl.rewards.networks.score_head import linear_head
from recast_pl.rewards.networks.weights import Precision, check_source, read_state_dict, torch_dtype
from recast_pl.types import Prompt


class Aesthetic(Reward):
    """Predicted rating of a picture, whatever its prompt; about 1 to 10.

    Args:
        pretrained: a folder or hub id of the `CLIPModel` and its image processor; with CLIPScore's the model
            is shared.
        weights: the head's state dict: a file (`sac+logos+ava1-l14-linearMSE.pth` of the reference), a folder
            that holds `filename`, or the hub id of one.
        filename: the file's name in the folder or on the hub.
        dtype: precision of the CLIP; the head and scores are float32.

    Reference: Schuhmann, "Improved aesthetic predictor", 2022, the linear model trained on SAC, Logos and AVA.
    """

    def __init__(
        self,
        *,
        pretrained: str = "openai/clip-vit-large-patch14",
        weights: str = "camenduru/improved-aesthetic-predictor",
        filename: str = "sac+logos+ava1-l14-linearMSE.pth",
        dtype: Precision = "float32",
    ) -> None:
        self.source = resolve(pretrained, key="Aesthetic.pretrained")
        self.weights = check_source(weights, key="Aesthetic.weights", holds=(filename,), files=True)
        self.filename = filename
        self.dtype = torch_dtype(dtype, key="Aesthetic.dtype")
        self._loaded: tuple[backbones.CLIPBackbone, backbones.Preparation, nn.Module] | None = None

    def load(self, device: torch.device) -> None:
        """Loads the head, the model and the image processor."""
        key = "Aesthetic.pretrained"
        state = read_state_dict(self.weights, self.filename, key="Aesthetic.weights")
        backbone = backbones.load_clip(self.source, dtype=self.dtype, device=device, key=key)
        head = linear_head(state, width=backbone.model.config.projection_dim, key="Aesthetic.weights")
        self._loaded = (backbone, backbones.load_preparation(self.source, key=key), head.to(device))

    def unload(self) -> None:
        """Lets go of the model."""
        self._loaded = None

    def networks(self) -> Iterable[nn.Module]:
        return () if self._loaded is None else (self._loaded[0].model, self._loaded[2])

    @torch.no_grad()
    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Ratings [B]."""
        backbone, preparation, head = backbones.held(self._loaded, self)
        image_BD = F.normalize(backbone.embed_images(images_B3HW, preparation), dim=-1)
        scores: Tensor = head(image_BD).to(images_B3HW.device)
        return scores
