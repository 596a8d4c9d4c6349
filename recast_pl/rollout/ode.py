"""Deterministic rollouts along the probability-flow ODE."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from recast_pl.noise import Purpose, keyed_normal
from recast_pl.policy.base import Policy
from recast_pl.rollout.solvers import euler
from recast_pl.types import PromptBatch, TextEmbeddings


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

    def velocity(self, policy: Policy, x: Tensor, t: float, text: TextEmbeddings) -> Tensor:
        """The guided velocity v∅ + s (v − v∅); at s = 1 the unconditional one is not evaluated."""
        t_B = torch.full((len(x),), t, device=x.device)
        velocity = policy.velocity(x, t_B, text)
        if self.guidance_scale == 1:
            return velocity
        unconditional = policy.velocity(x, t_B, policy.text([""] * len(x)))
        return unconditional + self.guidance_scale * (velocity - unconditional)

    @torch.no_grad()
    def sample(
        self,
        policy: Policy,
        batch: PromptBatch,
        text: TextEmbeddings,
        *,
        seed: int,
        on_samples: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Clean latents [B, C, H, W] of the batch; sample b's noise is keyed by (seed, iteration, b).

        Args:
            policy: whose velocity is followed, in the role that is in use.
            batch: prompts and sample indices.
            text: the prompts' embeddings.
            seed: of the run.
            on_samples: is given each micro-batch's clean latents as soon as they are there.
        """
        levels = policy.levels(self.num_steps)
        noise_BCHW = keyed_normal(
            policy.latent_shape,
            seed=seed,
            iteration=batch.iteration,
            samples=batch.sample_B.tolist(),
            purpose=Purpose.START,
        ).to(text.pooled_BD.device)
        chunks = range(0, len(batch), self.micro_batch_size)
        done = []
        bar: tqdm[Any] = tqdm(
            total=len(chunks) * self.num_steps,
            desc="rollout",
            leave=False,
            delay=5,
            disable=not self.progress_bar,
        )
        with bar:
            for start in chunks:
                rows = slice(start, start + self.micro_batch_size)
                done.append(self.solve(policy, noise_BCHW[rows], levels, text[rows], bar))
                if on_samples is not None:
                    on_samples(done[-1])
        return torch.cat(done)

    @abstractmethod
    def solve(
        self,
        policy: Policy,
        noise_BCHW: Tensor,
        levels: Tensor,
        text: TextEmbeddings,
        bar: "tqdm[Any]",
    ) -> Tensor:
        """Brings noise to clean latents, moving the bar by one for each step."""


class ODERollout(RolloutSampler):
    """Euler steps on the scheduler's own noise levels: what the plain diffusers pipeline does."""

    def solve(
        self,
        policy: Policy,
        noise_BCHW: Tensor,
        levels: Tensor,
        text: TextEmbeddings,
        bar: "tqdm[Any]",
    ) -> Tensor:
        """See `solvers.euler`."""
        return euler(
            lambda x, t: self.velocity(policy, x, t, text),
            noise_BCHW,
            levels,
            on_step=lambda step: _advance(bar),
        )


def _advance(bar: "tqdm[Any]") -> None:
    bar.update()
