"""Sharpness: how steep a picture's edges are, above the roughness of its flat parts."""

from collections.abc import Sequence

from torch import Tensor

from recast_pl.rewards.base import Reward
from recast_pl.types import Prompt


def acutance(images_B3HW: Tensor, *, edge_share: float = 0.05) -> Tensor:
    """Mean gradient of the steepest `edge_share` of the pixels, minus the median gradient; in [−1, 1].

    The gradient of a pixel is the length of its differences to the right and lower neighbour, as a root mean
    square over colours, so that colour edges count like luminance edges. Subtracting the median makes grain,
    which is everywhere, no detail.

    >>> import torch
    >>> edge = torch.zeros(1, 3, 8, 8); edge[..., 4:] = 1
    >>> round(acutance(edge).item(), 3), acutance(torch.rand(1, 3, 1, 1).expand(1, 3, 8, 8)).item()
    (1.0, 0.0)
    """
    right = images_B3HW[..., :-1, 1:] - images_B3HW[..., :-1, :-1]
    down = images_B3HW[..., 1:, :-1] - images_B3HW[..., :-1, :-1]
    gradient_BP = ((right.square() + down.square()).mean(dim=1)).sqrt().flatten(1)
    count = max(1, round(edge_share * gradient_BP.shape[1]))
    return gradient_BP.topk(count, dim=1).values.mean(dim=1) - gradient_BP.median(dim=1).values


class Sharpness(Reward):
    """Acutance of a picture.

    Args:
        edge_share: share of the pixels that count as edges, in (0, 1).
    """

    range = (-2.0, 2.0)

    def __init__(self, *, edge_share: float = 0.05) -> None:
        if not 0 < edge_share < 1:
            raise ValueError(f"Sharpness.edge_share: expected between 0 and 1, got {edge_share}")
        self.edge_share = edge_share

    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """See `acutance`."""
        return acutance(images_B3HW, edge_share=self.edge_share)
