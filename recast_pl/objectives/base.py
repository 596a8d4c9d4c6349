"""What every objective is: a loss over trained pairs, their velocities and per-step advantages.

Shape suffixes: N trained (sample, step) pairs, C H W latent.
"""

import math
from abc import ABC, abstractmethod
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from recast_pl.rollout.base import RolloutSampler
from recast_pl.types import Loss, NoisedSamples, Velocities


class Objective(ABC):
    """Turns velocities at trained pairs into a loss; holds its coefficients and no state."""

    needs_old: bool  # whether `velocities.old_NCHW` is read
    whole_groups: bool = False  # whether a call must see all samples of a group at one step, or none of them
    shared_noise: bool = False  # whether the samples of a group are noised alike

    trains_on: Literal["noised", "trajectory"] = "noised"
    """Clean samples noised anew (`NoisedSamples`), or the rollout's stochastic steps (`Transitions`)."""

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether `velocities.reference_NCHW` is read."""

    def check(self, rollout: RolloutSampler) -> None:
        """Refuses a rollout that this objective cannot train on, and warns of one that it is not meant for.

        Raises:
            ValueError: naming the key and what would do.
        """
        if self.trains_on == "trajectory" and not rollout.stochastic_steps:
            raise ValueError(
                f"model.rollout: {type(self).__name__} trains on the rollout's log-probabilities, and a "
                f"deterministic sampler has no log-probability: got {type(rollout).__name__}, take "
                "recast_pl.rollout.SDERollout"
            )
        if self.trains_on == "noised" and rollout.guidance_scale != 1:
            rank_zero_warn(
                f"model.rollout.init_args.guidance_scale is {rollout.guidance_scale}, but the objective "
                "trains the unguided velocity; the published recipes roll out at 1.0"
            )

    @abstractmethod
    def loss(self, velocities: Velocities, samples: Any) -> Loss:
        """The loss over N pairs; gradients flow through `velocities.current_NCHW` alone.

        Args:
            velocities: N C H W; guided where the objective trains on trajectories and the rollout was.
            samples: NoisedSamples or Transitions, as `trains_on` says.
        """


def checked(name: str, value: float, *, above: float | None = None, at_least: float | None = None) -> float:
    """The coefficient, if it is finite and in its range.

    Raises:
        ValueError: otherwise, naming the YAML key.
    """
    low = above if above is not None else at_least
    good = math.isfinite(value) and (low is None or (value > low if above is not None else value >= low))
    if not good:
        expected = f"above {above}" if above is not None else f"{at_least} or above"
        raise ValueError(f"model.objective.init_args.{name}: expected {expected}, got {value}")
    return value


def pair_mean(x_NCHW: Tensor) -> Tensor:
    """Mean over a pair's dimensions: N C H W to N."""
    return x_NCHW.mean(dim=tuple(range(1, x_NCHW.ndim)))


def target_velocity(samples: NoisedSamples) -> Tensor:
    """The velocity that leads from the clean sample to its noise, u = ε − x0, N C H W."""
    return samples.noise_NCHW - samples.x0_NCHW


def policy_velocity(velocities: Velocities, role: str) -> Tensor:
    """The velocity of the `old` or the `reference` policy, without gradient.

    Raises:
        ValueError: where the velocities do not hold it.
    """
    velocity = velocities.old_NCHW if role == "old" else velocities.reference_NCHW
    if velocity is None:
        raise ValueError(f"the objective needs the {role} policy's velocity")
    return velocity.detach()


def scaled_advantage(advantage_N: Tensor, *, scale: float, clip: float) -> Tensor:
    """The clipped advantage times its scale, scale · clip(advantage, ±clip), N.

    >>> import torch
    >>> scaled_advantage(torch.tensor([-9.0, 0.0, 2.0]), scale=0.1, clip=5.0)
    tensor([-0.5000,  0.0000,  0.2000])
    """
    return scale * advantage_N.detach().clamp(-clip, clip)
