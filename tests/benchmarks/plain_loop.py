"""One iteration of DiffusionNFT written by hand, as a script would do it: what `iteration.py` measures against.

The same algorithm on the same pipeline: uniform credit, rewards standardised within each group. Nothing here
comes from the framework but the rewards, which get the same pictures. Prompts are encoded in every iteration;
old, reference and trained policy are predicted one after another by peft's own switches; rewards score one
after another, all pictures at a time; each backward pass has one of the trained steps of every sample.

Shape suffixes: B samples in groups of k, S trained steps of each, K denoising steps, C H W latent.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from recast_pl.rewards import Reward
from recast_pl.types import Prompt

STAGES = ("text", "rollout", "decode", "rewards", "advantages", "update", "old_policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The numbers of the algorithm."""

    num_steps: int
    group_size: int
    max_sequence_length: int
    beta: float
    advantage_clip: float
    reference_coefficient: float
    max_grad_norm: float
    budgets: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """What is random in one iteration. It is given, so that drawing it costs this loop nothing."""

    start_BCHW: Tensor
    step_BS: Tensor  # int64
    noise_SBCHW: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an iteration came to."""

    loss: float
    grad_norm: float
    seconds: Mapping[str, float]  # by stage, and of each reward
    cpu_seconds: float  # of all of it


class PlainLoop:
    """A pipeline with two adapters, an optimiser and rewards that are loaded.

    Args:
        pipeline: a StableDiffusion3Pipeline without T5.
        config: of the adapters.
        rewards: by name.
        recipe: of the algorithm.
        optimizer: makes the optimiser of the trained adapter.
    """

    def __init__(
        self, pipeline: Any, config: LoraConfig, rewards: Mapping[str, Reward], recipe: Recipe, optimizer: Any
    ) -> None:
        self.pipeline, self.transformer = pipeline, pipeline.transformer
        self.transformer.requires_grad_(False)
        for adapter in ("old", "default"):
            self.transformer.add_adapter(config, adapter_name=adapter)
        named = dict(self.transformer.named_parameters())
        names = [name for name in named if ".default." in name]
        self.trained = [named[name] for name in names]
        self.old = [named[name.replace(".default.", ".old.")] for name in names]
        self.transformer.set_adapter("default")
        self.rewards, self.recipe = rewards, recipe
        self.optimizer = optimizer(self.trained)
        self.seconds: dict[str, float] = {}

    def iteration(self, prompts: Sequence[Prompt], draws: Draws, decay: float) -> Outcome:
        """Rollout, rewards, advantages, update; then the old policy follows by `decay`."""
        self.seconds, began = {}, time.process_time()
        with torch.no_grad():
            with self._timed("text"):
                text = self._text([prompt.text for prompt in prompts])
            with self._timed("rollout"):
                x0_BCHW, levels = self._rollout(draws.start_BCHW, text)
            with self._timed("decode"):
                images_B3HW = self._decode(x0_BCHW)
            scores = {}
            for name, reward in self.rewards.items():
                with self._timed(name):
                    scores[name] = reward.score(images_B3HW.clone(), prompts)
        self.seconds["rewards"] = sum(self.seconds[name] for name in self.rewards)
        with self._timed("advantages"):
            advantage_B = self._advantages(scores)
        with self._timed("update"):
            loss, norm = self._update(x0_BCHW, text, levels, advantage_B, draws)
        with self._timed("old_policy"), torch.no_grad():
            for old, new in zip(self.old, self.trained, strict=True):
                old.mul_(decay).add_(new, alpha=1 - decay)
        return Outcome(loss=loss, grad_norm=norm, seconds=self.seconds, cpu_seconds=time.process_time() - began)

    def _text(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        sequence, _, pooled, _ = self.pipeline.encode_prompt(
            texts,
            None,
            None,
            do_classifier_free_guidance=False,
            max_sequence_length=self.recipe.max_sequence_length,
        )
        return sequence, pooled

    def _velocity(self, x: Tensor, t: Tensor, text: tuple[Tensor, Tensor]) -> Tensor:
        return self.transformer(
            hidden_states=x,
            timestep=1000 * t,
            encoder_hidden_states=text[0],
            pooled_projections=text[1],
            return_dict=False,
        )[0]

    def _rollout(self, x: Tensor, text: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        self.transformer.set_adapter("old")
        self.pipeline.scheduler.set_timesteps(self.recipe.num_steps)
        levels = self.pipeline.scheduler.sigmas
        for t, t_next in pairwise(levels):
            x = x + (t_next - t) * self._velocity(x, t.expand(len(x)), text)
        self.transformer.set_adapter("default")
        return x, levels

    def _decode(self, x0: Tensor) -> Tensor:
        config = self.pipeline.vae.config
        latents = x0 / config.scaling_factor + config.shift_factor
        return (self.pipeline.vae.decode(latents, return_dict=False)[0] / 2 + 0.5).clamp(0, 1)

    def _advantages(self, scores: Mapping[str, Tensor]) -> Tensor:
        """The budget-weighted mean of z-scores within groups."""
        total = sum(self.recipe.budgets.values())
        mixed = torch.zeros(len(next(iter(scores.values()))), dtype=torch.float64)
        for name, score_B in scores.items():
            score_Gk = score_B.double().view(-1, self.recipe.group_size)
            spread = score_Gk.std(dim=1, correction=0, keepdim=True)
            z = (score_Gk - score_Gk.mean(dim=1, keepdim=True)) / spread.where(spread > 1e-6, torch.inf)
            mixed += self.recipe.budgets[name] / total * z.flatten()
        return mixed.float()

    def _update(
        self, x0: Tensor, text: tuple[Tensor, Tensor], levels: Tensor, advantage_B: Tensor, draws: Draws
    ) -> tuple[float, float]:
        steps, total = draws.step_BS.shape[1], 0.0
        clip = self.recipe.advantage_clip
        r_B = 0.5 + 0.5 * (advantage_B / clip).clamp(-1, 1)
        for j in range(steps):
            t = levels[draws.step_BS[:, j]]
            t_B = t[:, None, None, None]
            x_t = (1 - t_B) * x0 + t_B * draws.noise_SBCHW[j]
            with torch.no_grad():
                self.transformer.set_adapter("old")
                old = self._velocity(x_t, t, text)
                self.transformer.disable_adapters()
                reference = self._velocity(x_t, t, text)
                self.transformer.enable_adapters()
                self.transformer.set_adapter("default")
            loss = self._loss(self._velocity(x_t, t, text), old, reference, x_t, x0, t_B, r_B)
            (loss / steps).backward()
            total += loss.item() / steps
        norm = torch.nn.utils.clip_grad_norm_(self.trained, self.recipe.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm.item()

    def _loss(
        self, v: Tensor, old: Tensor, reference: Tensor, x_t: Tensor, x0: Tensor, t: Tensor, r_B: Tensor
    ) -> Tensor:
        beta = self.recipe.beta

        def error(prediction: Tensor) -> Tensor:
            weight = (prediction - x0).abs().mean(dim=(1, 2, 3)).detach().clamp(min=1e-5)
            return ((prediction - x0) ** 2).mean(dim=(1, 2, 3)) / weight

        positive = error(x_t - t * ((1 - beta) * old + beta * v))
        negative = error(x_t - t * ((1 + beta) * old - beta * v))
        policy = (r_B * positive + (1 - r_B) * negative).mean() * self.recipe.advantage_clip / beta
        return policy + self.recipe.reference_coefficient * ((v - reference) ** 2).mean()

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - began
