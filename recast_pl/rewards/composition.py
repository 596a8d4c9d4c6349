"""Composition: the share of a scene's clauses that a picture fulfils, read by a detector without networks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from recast_pl.rewards.base import Reward
from recast_pl.rewards.images import nan_where_broken
from recast_pl.types import Prompt


class Composition(Reward):
    """Mean over the prompt's clauses (count, shape, colour, position, background), each in [0, 1].

    Prompts carry GenEval's `include`; pictures are read by `recast_pl.scenes.detect`, which knows the scene
    grammar's shapes and colours only.

    Reference: after Ghosh et al., "GenEval: An object-focused framework for evaluating text-to-image
    alignment", 2023, with partial credit.
    """

    range = (0.0, 1.0)
    required_metadata = ("include",)

    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Shares [B]."""
        from recast_pl.scenes import clauses

        scores = []
        for image, prompt in zip(images_B3HW.cpu().numpy(), prompts, strict=True):
            values = clauses(image, dict(prompt.metadata)).values()
            scores.append(sum(values) / len(values))
        return nan_where_broken(torch.tensor(scores, device=images_B3HW.device), images_B3HW)
