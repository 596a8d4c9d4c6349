"""What every rollout is: keyed noise, micro-batches, guidance; how noise becomes clean is the subclass's."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from recast_pl.noise import Purpose, keyed_normal
from recast_pl.policy.base import Policy
from recast_pl.rollout.solvers import Velocity
from recast_pl.schedule import shared_schedule
from recast_pl.types import GaussianSteps, PromptBatch, TextEmbeddings, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What the noise of some of a batch's samples is keyed by."""

    seed: int
    iteration: int
    sample_B: tuple[int, ...]
    group_B: tuple[int, ...]

    @classmethod
    def of(cls, batch: PromptBatch, rows: slice, *, seed: int) -> "Keys":
        """The keys of some rows of a batch."""
        return cls(
            seed=seed,
            iteration=batch.iteration,
            sample_B=tuple(batch.sample_B[rows].tolist()),
            group_B=tuple(batch.group_B[rows].tolist()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Clean latents, the schedule of each, and how they came about where that was asked for."""

    x0_BCHW: Tensor
    levels_BT: Tensor  # each sample's noise levels, padded with zeros
    steps_B: Tensor  # how many denoising steps it has
    trajectory: Trajectory | None


class RolloutSampler(ABC):
    """Draws clean samples from the policy in use.

    Args:
        num_steps: denoising steps K.
        guidance_scale: of classifier-free guidance; 1 is none.
        micro_batch_size: samples that pass through the network at a time.
        progress_bar: show a bar for rollouts that take longer than a few seconds.
    """

    def __init__(
        self,
        *,
        num_steps: int = 10,
        guidance_scale: float = 1.0,
        micro_batch_size: int = 64,
        progress_bar: bool = True,
    ) -> None:
        for name, value in (("num_steps", num_steps), ("micro_batch_size", micro_batch_size)):
            if value < 1:
                raise ValueError(f"model.rollout.init_args.{name}: expected 1 or more, got {value}")
        if guidance_scale < 1:
            raise ValueError(
                f"model.rollout.init_args.guidance_scale: expected 1 (none) or more, got {guidance_scale}"
            )
        self.num_steps, self.guidance_scale = num_steps, guidance_scale
        self.micro_batch_size, self.progress_bar = micro_batch_size, progress_bar

    @property
    def stochastic_range(self) -> range:
        """The steps that may be stochastic; none for deterministic rollouts."""
        return range(0)

    @property
    def stochastic_steps(self) -> int:
        """S: how many steps of each sample are."""
        return len(self.stochastic_range)

    def velocity(self, policy: Policy, x: Tensor, t: float | Tensor, text: TextEmbeddings) -> Tensor:
        """The guided velocity v∅ + s (v − v∅); at s = 1 the unconditional one is not evaluated.

        Args:
            policy: whose velocity it is, in the role that is in use.
            x: B C H W.
            t: one noise level, or B of them.
            text: the prompts' embeddings, B.
        """
        t_B = t if isinstance(t, Tensor) else torch.full((len(x),), t, device=x.device)
        velocity = policy.velocity(x, t_B, text)
        if self.guidance_scale == 1:
            return velocity
        unconditional = policy.velocity(x, t_B, policy.text([""] * len(x)))
        return unconditional + self.guidance_scale * (velocity - unconditional)

    def sample(
        self,
        policy: Policy,
        batch: PromptBatch,
        text: TextEmbeddings,
        *,
        seed: int,
        on_samples: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Clean latents [B, C, H, W] alone; see `draw`."""
        return self.draw(policy, batch, text, seed=seed, on_samples=on_samples).x0_BCHW

    @torch.no_grad()
    def draw(
        self,
        policy: Policy,
        batch: PromptBatch,
        text: TextEmbeddings,
        *,
        seed: int,
        record: bool = False,
        on_samples: Callable[[Tensor], None] | None = None,
    ) -> Drawn:
        """Clean latents of the batch; sample b's noise is keyed by (seed, iteration, b, step).

        Args:
            policy: whose velocity is followed, in the role that is in use.
            batch: prompts, sample and group indices.
            text: the prompts' embeddings.
            seed: of the run.
            record: keep the stochastic steps, if there are any.
            on_samples: is given each micro-batch's clean latents as soon as they are there.
        """
        levels = policy.levels(self.num_steps)
        chunks = range(0, len(batch), self.micro_batch_size)
        done: list[tuple[Tensor, Trajectory | None]] = []
        bar = self._bar(len(chunks) * self.num_steps)
        noise_BCHW = keyed_normal(
            policy.latent_shape,
            seed=seed,
            iteration=batch.iteration,
            samples=batch.sample_B.tolist(),
            purpose=Purpose.START,
        ).to(text.pooled_BD.device)
        with bar:
            for start in chunks:
                rows = slice(start, start + self.micro_batch_size)
                done.append(
                    self.solve(
                        lambda x, t, part=text[rows]: self.velocity(policy, x, t, part),  # type: ignore[misc]
                        noise_BCHW[rows],
                        levels,
                        keys=Keys.of(batch, rows, seed=seed),
                        record=record,
                        on_step=lambda step: _advance(bar),
                    )
                )
                if on_samples is not None:
                    on_samples(done[-1][0])
        levels_BT, steps_B = shared_schedule(levels, len(batch))
        return Drawn(
            x0_BCHW=torch.cat([x0 for x0, _ in done]),
            levels_BT=levels_BT,
            steps_B=steps_B,
            trajectory=_joined([part for _, part in done if part is not None]),
        )

    def _bar(self, total: int) -> "tqdm[Any]":
        return tqdm(total=total, desc="rollout", leave=False, delay=5, disable=not self.progress_bar)

    @abstractmethod
    def solve(
        self,
        velocity: Velocity,
        noise_BCHW: Tensor,
        levels: Tensor,
        *,
        keys: Keys,
        record: bool,
        on_step: Callable[[int], None],
    ) -> tuple[Tensor, Trajectory | None]:
        """Brings noise to clean latents; the trajectory where `record` asks for it and there is one.

        Args:
            velocity: the guided velocity at one noise level.
            noise_BCHW: the starting noise.
            levels: K + 1 descending noise levels, the last 0.
            keys: of further noise.
            record: keep the stochastic steps.
            on_step: called after each step with its index.
        """


def _joined(parts: list[Trajectory]) -> Trajectory | None:
    """One trajectory of consecutive micro-batches."""
    if not parts:
        return None
    return Trajectory(
        first_B=torch.cat([part.first_B for part in parts]),
        count_B=torch.cat([part.count_B for part in parts]),
        latents_BTCHW=torch.cat([part.latents_BTCHW for part in parts]),
        log_prob_BS=torch.cat([part.log_prob_BS for part in parts]),
        steps_BS=GaussianSteps.joined([part.steps_BS for part in parts]),
    )


def _advance(bar: "tqdm[Any]") -> None:
    bar.update()
