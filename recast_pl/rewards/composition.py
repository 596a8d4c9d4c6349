"""Composition: the share of a scene's clauses that a picture fulfils, read by a detector without networks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from recast_pl.rewards.base import Reward
from recast_pl.rewards.images import nan_where_broken
from recast_pl.types import Prompt

CLAUSES = ("count", "shape", "colour", "position", "background")


class Composition(Reward):
    """Mean over the prompt's clauses (count, shape, colour, position, background), each in [0, 1].

    Prompts carry GenEval's `include`; pictures are read by `recast_pl.scenes.detect`, which knows the scene
    grammar's shapes and colours only.

    Args:
        clauses: of these alone, where a prompt has them; None: of all.

    Reference: after Ghosh et al., "GenEval: An object-focused framework for evaluating text-to-image
    alignment", 2023, with partial credit.
    """

    range = (0.0, 1.0)
    required_metadata = ("include",)

    def __init__(self, *, clauses: Sequence[str] | None = None) -> None:
        wanted = CLAUSES if clauses is None else tuple(clauses)
        if not wanted or set(wanted) - set(CLAUSES):
            raise ValueError(f"Composition.clauses: expected some of {', '.join(CLAUSES)}, got {list(wanted)}")
        self.clauses = wanted

    def check(self, prompt: Prompt) -> str | None:
        """A prompt must have one of the clauses."""
        include = prompt.metadata["include"]
        there = {"count", "shape"} if include else set()
        there |= {"colour"} if any("color" in entry for entry in include) else set()
        there |= {"position"} if any("position" in entry for entry in include) else set()
        there |= {"background"} if "background" in prompt.metadata else set()
        return None if there & set(self.clauses) else f"it has none of the clauses {', '.join(self.clauses)}"

    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Shares [B]."""
        from recast_pl.scenes import clauses

        scores = []
        for image, prompt in zip(images_B3HW.cpu().numpy(), prompts, strict=True):
            values = [
                value
                for clause, value in clauses(image, dict(prompt.metadata)).items()
                if clause in self.clauses
            ]
            scores.append(sum(values) / len(values))
        return nan_where_broken(torch.tensor(scores, device=images_B3HW.device), images_B3HW)
