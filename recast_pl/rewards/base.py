"""What every reward is: a score for each picture, given its prompt."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from recast_pl.types import Prompt


class Reward(ABC):
    """Scores pictures. Not a module: it reaches no checkpoint and no gradient.

    A subclass overrides `score` and whatever below differs. Loading one needs no other reward's packages: what
    is not in this project's own dependencies is imported in `load`.
    """

    range: tuple[float, float] = (float("-inf"), float("inf"))
    """Scores outside are failures."""

    higher_is_better: bool = True
    """If not, the suite negates the scores, so that everywhere after it more is better."""

    required_metadata: tuple[str, ...] = ()
    """Keys that every prompt's metadata must have; checked before training."""

    def check(self, prompt: Prompt) -> str | None:
        """What makes a prompt unfit for this reward, in words; None if nothing does.

        For what `required_metadata` cannot say, e.g. a text in quotes. Asked before training, of every prompt,
        after its keys were checked and before anything is loaded.
        """
        return None

    def load(self, device: torch.device) -> None:  # noqa: B027 - most rewards have nothing to load
        """Reads weights and moves them to `device`; called once, before the first score."""

    def unload(self) -> None:  # noqa: B027
        """Frees what `load` took."""

    def networks(self) -> Iterable[nn.Module]:
        """The loaded networks, which a suite may move between devices; none for most."""
        return ()

    @abstractmethod
    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [B] of pictures in [0, 1] (float32, on the device of `load`); picture b is of prompt b.

        A picture that cannot be scored is NaN, or the whole call raises; never a made-up number.
        """
