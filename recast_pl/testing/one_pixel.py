"""Policies of one parameter whose optimum is known, and a reward that tells where it is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from recast_pl.policy import Policy, Role
from recast_pl.rewards import Reward
from recast_pl.types import Prompt, TextEmbeddings


class OnePixel(Policy):
    """Samples x0 ~ N(θ, 0.2²): the exact velocity field of that Gaussian, shifted by the one parameter θ.

    θ starts at 0. A picture shows x0 in all its pixels, unclipped.
    """

    spread = 0.2
    latent_shape = (1, 1, 1)

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict()
        self.role: Role = "default"

    def load(self, *, seed: int) -> None:
        if not self.weights:
            for role in ("default", "old", "reference", *["averaged"] * self.averaged):
                self.weights[role] = nn.Parameter(torch.zeros(()), requires_grad=role == "default")

    def levels(self, num_steps: int) -> Tensor:
        return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)

    def text(self, texts: Sequence[str]) -> TextEmbeddings:
        return TextEmbeddings(sequence_BLD=torch.zeros(len(texts), 1, 1), pooled_BD=torch.zeros(len(texts), 1))

    def velocity(self, x_NCHW: Tensor, t_N: Tensor, text: TextEmbeddings) -> Tensor:
        t = t_N[:, None, None, None]
        mean, variance = self.weights[self.role], self.spread**2
        total = (1 - t) ** 2 * variance + t**2
        centred = x_NCHW - (1 - t) * mean
        velocity_NCHW: Tensor = t / total * centred - (mean + (1 - t) * variance / total * centred)
        return velocity_NCHW

    def decode(self, x0_BCHW: Tensor) -> Tensor:
        return x0_BCHW.expand(-1, 3, 2, 2)

    @contextmanager
    def using(self, role: Role) -> Iterator[None]:
        self.role = role
        try:
            yield
        finally:
            self.role = "default"

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [self.weights["default"]]

    def update_old(self, decay: float) -> None:
        self.weights["old"].data.lerp_(self.weights["default"].data, 1 - decay)

    def update_average(self, decay: float) -> None:
        self.weights["averaged"].data.lerp_(self.weights["default"].data, 1 - decay)

    def distance_to_old(self) -> Tensor:
        distance: Tensor = (self.weights["default"] - self.weights["old"]).detach().abs()
        return distance

    def saved_state(self) -> dict[str, Tensor]:
        return {role: value.detach().clone() for role, value in self.weights.items()}

    def load_saved_state(self, state: dict[str, Tensor]) -> None:
        for role, value in state.items():
            self.weights[role].data.copy_(value)


class TwoModes(OnePixel):
    """Samples x0 ~ p N(1, 0.2²) + (1 − p) N(−1, 0.2²), p = σ(θ): the exact velocity field of that mixture."""

    def velocity(self, x_NCHW: Tensor, t_N: Tensor, text: TextEmbeddings) -> Tensor:
        t = t_N[:, None, None, None]
        total = (1 - t) ** 2 * self.spread**2 + t**2
        gain = (1 - t) * self.spread**2 / total
        # each mode's responsibility, from its prior odds and the densities of x_t
        odds = self.weights[self.role] + 2 * (1 - t) * x_NCHW / total
        right = torch.sigmoid(odds)
        clean_NCHW = torch.zeros_like(x_NCHW)
        for share, mode in ((right, 1), (1 - right, -1)):
            clean_NCHW = clean_NCHW + share * (mode + gain * (x_NCHW - (1 - t) * mode))
        return (x_NCHW - clean_NCHW) / t


class Near(Reward):
    """−|x − target|, scaled."""

    def __init__(self, target: float, scale: float = 1.0) -> None:
        self.target, self.scale = target, scale

    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        return -self.scale * (images_B3HW.mean(dim=(1, 2, 3)) - self.target).abs()
