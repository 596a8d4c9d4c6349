"""The head that turns an embedding into one number, as Aesthetic and ImageReward release it.

Shape suffixes: B samples, D width.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from recast_pl.rewards.networks.weights import freeze, load_strictly, tensor


class LinearHead(nn.Module):
    """Embeddings [B, D] to scores [B]; float32 unless it is converted."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, embeddings_BD: Tensor) -> Tensor:
        """Float32 scores, where the layers are."""
        scores_B1: Tensor = self.layers(embeddings_BD.to(next(self.layers.parameters())))
        return scores_B1[:, 0].float()


def linear_head(state: Mapping[str, Tensor], *, width: int, key: str) -> LinearHead:
    """Linear layers under `layers.<n>`, nothing between them; float32.

    The numbers skip the dropouts of training (0, 2, 4, 6, 7), which do nothing here. Sizes are the weights'.

    Args:
        state: the head's state dict.
        width: of the embedding that the head is to read.
        key: the YAML key of the file, for errors.

    Raises:
        ValueError: for keys or shapes that are no such head, or a head for another width.
    """
    first = tensor(state, "layers.0.weight", key=key)
    if first.shape[1] != width:
        raise ValueError(f"{key}: the head reads embeddings of {first.shape[1]}, the backbone gives {width}")
    numbers = [name.removeprefix("layers.").partition(".")[0] for name in state]
    layers = nn.Sequential()
    for number in range(1 + max(int(number) for number in numbers if number.isdigit())):
        weight = state.get(f"layers.{number}.weight")
        layers.append(nn.Identity() if weight is None else nn.Linear(weight.shape[1], weight.shape[0]))
    head = LinearHead(layers)
    load_strictly(head, state, key=key)
    last = layers[-1]
    if not isinstance(last, nn.Linear) or last.out_features != 1:
        raise ValueError(f"{key}: expected a head that ends in one number, got {last}")
    freeze(head.float())
    return head
