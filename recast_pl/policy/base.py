"""What the rest of the framework asks of a policy: text, velocities, pictures, and three sets of weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from recast_pl.types import TextEmbeddings

Role = Literal["default", "old", "averaged", "reference"]
"""The trained policy, the one that collects rollouts and trails it, its average (by option), the base model."""


class Policy(nn.Module, ABC):
    """A text-to-image flow model with a trained, an old and a reference set of weights.

    Velocity convention: x_t = (1 − t) x0 + t ε, v = ε − x0; t = 1 is noise, t = 0 is clean. The constructor
    only checks its arguments; `load` reads weights.
    """

    averaged: bool = False
    """Whether weights for the role `averaged` are kept; set before `load`."""

    @abstractmethod
    def load(self, *, seed: int) -> None:
        """Reads the weights and adds the trainable ones, drawn by `seed`; a second call does nothing."""

    def shard(self, shard: Callable[[nn.Module], None]) -> None:
        """Calls `shard` on the parts of the network that compute as one, then on the network, once.

        Raises:
            ValueError: where this policy's weights cannot be shared out over processes.
        """
        raise ValueError(
            f"trainer.strategy: {type(self).__name__} does not say how its weights are shared out over "
            "processes; take ddp"
        )

    @property
    @abstractmethod
    def latent_shape(self) -> tuple[int, int, int]:
        """C, H, W of one latent."""

    @abstractmethod
    def levels(self, num_steps: int) -> Tensor:
        """The scheduler's noise levels for `num_steps` steps: [num_steps + 1], descending to 0, float64."""

    @abstractmethod
    def text(self, texts: Sequence[str]) -> TextEmbeddings:
        """Embeddings of B prompts; each different prompt is encoded once."""

    @abstractmethod
    def velocity(self, x_NCHW: Tensor, t_N: Tensor, text: TextEmbeddings) -> Tensor:
        """The velocity v(x_t, t | text) of the policy in use, float32."""

    @abstractmethod
    def decode(self, x0_BCHW: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] in [0, 1], float32, of clean latents."""

    @abstractmethod
    @contextmanager
    def using(self, role: Role) -> Iterator[None]:
        """Within the context `velocity` is that of `role`; outside it is that of `default`."""
        yield

    @abstractmethod
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters of `default` that the optimiser changes."""

    @abstractmethod
    def update_old(self, decay: float) -> None:
        """θ_old ← decay · θ_old + (1 − decay) · θ."""

    def update_average(self, decay: float) -> None:
        """θ_averaged ← decay · θ_averaged + (1 − decay) · θ.

        Raises:
            ValueError: where this policy keeps no such weights.
        """
        raise ValueError(f"model.average: {type(self).__name__} keeps no averaged weights")

    @abstractmethod
    def distance_to_old(self) -> Tensor:
        """‖θ − θ_old‖₂ over the trainable parameters; a scalar."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Constructor arguments without which `saved_state` means something else; a checkpoint keeps them."""
        return {}

    @abstractmethod
    def saved_state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold: the trained and the old weights, not the base model's."""

    @abstractmethod
    def load_saved_state(self, state: dict[str, Tensor]) -> None:
        """Puts `saved_state` back.

        Raises:
            ValueError: where names or shapes are not this policy's; the message names the difference.
        """
