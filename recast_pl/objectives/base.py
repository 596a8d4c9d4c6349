"""What every objective is: a loss over trained pairs, their velocities and per-step advantages.

Shape suffixes: B samples, K denoising steps, N trained (sample, step) pairs, C H W latent (or C F H W).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from recast_pl.policy.base import Policy, Role
from recast_pl.rollout.base import RolloutSampler
from recast_pl.shapes import check_shapes
from recast_pl.types import Loss, NoisedSamples, Rollout, TextEmbeddings, TrainingSamples, Velocities
from recast_pl.update.pairs import Pairs

S = TypeVar("S", bound=TrainingSamples)


class Objective(ABC, Generic[S]):
    """Turns velocities at trained pairs into a loss; holds its coefficients and no state.

    What a pair's training sample is belongs to the kind of objective: `NoisedObjective` and
    `TrajectoryObjective` draw theirs, and a further kind is one more class beside them.
    """

    needs_old: bool  # whether `velocities.old_NCHW` is read
    records: bool = False  # whether the rollout is to keep its stochastic steps
    renoises: bool = False  # whether samples are clean ones noised anew, whatever steps led to them
    whole_groups: bool = False  # whether a call must see all samples of a group at one step, or none of them

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether `velocities.reference_NCHW` is read."""

    @abstractmethod
    def check(self, rollout: RolloutSampler) -> None:
        """Refuses a rollout that this objective cannot train on, and warns of one that it is not meant for.

        Raises:
            ValueError: naming the key and what would do.
        """

    @abstractmethod
    def trained_steps(
        self,
        levels: Tensor,
        sampler: RolloutSampler,
        *,
        min_noise_level: float,
        timesteps_per_sample: int | None,
    ) -> Tensor:
        """Which of the K steps of the rollout's usual schedule are trained at all: [K], bool.

        Args:
            levels: K + 1 noise levels.
            sampler: that rolls out.
            min_noise_level: steps that start below are not trained.
            timesteps_per_sample: steps of each sample that are asked for; None: all that can be.

        Raises:
            ValueError: where there are not as many; names the key.
        """

    @abstractmethod
    def trainable(self, rollout: Rollout, *, min_noise_level: float) -> Tensor:
        """Which steps of each sample's own schedule may be trained: [B, K], bool."""

    @abstractmethod
    def draw(self, rollout: Rollout, advantages_BK: Tensor, pairs: Pairs, *, seed: int) -> S:
        """What is trained on at the pairs.

        Args:
            rollout: B samples.
            advantages_BK: of each sample at each column of W, on the CPU.
            pairs: N of them.
            seed: of the run.
        """

    @abstractmethod
    def velocity(self, policy: Policy, sampler: RolloutSampler, samples: S, text: TextEmbeddings) -> Tensor:
        """The velocity that the loss is about, of the policy in the role that is in use, N C H W."""

    def predict(self, policy: Policy, sampler: RolloutSampler, samples: S, text: TextEmbeddings) -> Velocities:
        """Predictions at x_t; of the old and the reference policy only where the loss reads them.

        Args:
            policy: with its trained, old and reference weights.
            sampler: that rolled out.
            samples: N of them.
            text: their prompts' embeddings, N.
        """

        def without_gradient(role: Role) -> Tensor:
            with torch.no_grad(), policy.using(role):
                return self.velocity(policy, sampler, samples, text)

        old = without_gradient("old") if self.needs_old else None
        reference = without_gradient("reference") if self.needs_reference else None
        current = self.velocity(policy, sampler, samples, text)
        return Velocities(current_NCHW=current, old_NCHW=old, reference_NCHW=reference)

    @abstractmethod
    def loss(self, velocities: Velocities, samples: S) -> Loss:
        """The loss over N pairs; gradients flow through `velocities.current_NCHW` alone.

        Args:
            velocities: N C H W, as `predict` gives them.
            samples: as `draw` gives them.

        Raises:
            ValueError: for velocities of other shapes than the samples' latents.
        """

    @abstractmethod
    def blank(self, latents: Callable[[], Tensor], count: int) -> S:
        """Training samples of `count` pairs without content: what a loss needs, for measuring its memory."""


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


def check_velocities(velocities: Velocities, latents_NCHW: Tensor, advantage_N: Tensor) -> None:
    """Every loss begins with it: what broadcasts in silence would change the loss.

    Raises:
        ValueError: naming what does not have the shape of the samples' latents.
    """
    check_shapes(
        latents_NZ=latents_NCHW,
        current_NZ=velocities.current_NCHW,
        old_NZ=velocities.old_NCHW,
        reference_NZ=velocities.reference_NCHW,
        advantage_N=advantage_N,
    )


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
