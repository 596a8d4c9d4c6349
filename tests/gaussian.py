"""A policy whose every distribution is known: x0 ~ N(0, scale²), and rewards of x0 alone.

E[x0 | x_t] and Var[x0 | x_t] are linear in x_t and constant, so estimators of discriminability can be held
against closed forms.
"""

import math
from dataclasses import dataclass, field

import torch

from recast_pl.credit import PairedCompletions, Probe
from recast_pl.types import Experience, Prompt, PromptBatch, Rollout, Scores, TextEmbeddings

LEVELS = torch.linspace(1, 0, 11, dtype=torch.float64)
FEW_LEVELS = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0], dtype=torch.float64)


@dataclass
class Gaussian:
    scale: float = 1.0
    rewards: dict = field(default_factory=dict)  # name → function of x0 [B]
    levels: torch.Tensor = field(default_factory=lambda: LEVELS)

    def posterior(self, x_t, t):
        """Mean and standard deviation of x0 given x_t."""
        precision = (1 - t) ** 2 * self.scale**2 + t**2
        return (1 - t) * self.scale**2 / precision * x_t, self.scale * t / math.sqrt(precision)

    def velocity(self, x, t, text=None):
        return (x - self.posterior(x, t)[0]) / t

    def scores(self, x0, prompts=None):
        values = torch.stack([reward(x0.flatten()) for reward in self.rewards.values()])
        return Scores(names=tuple(self.rewards), values_RB=values, valid_RB=values.isfinite())

    def probe(self, *, samples, group_size=None, seed=0, x0=None):
        """Fresh clean samples in groups of `group_size` (one group if None)."""
        generator = torch.Generator().manual_seed(seed)
        if x0 is None:
            x0 = self.scale * torch.randn(samples, 1, 1, 1, generator=generator, dtype=torch.float64)
        index = torch.arange(samples)
        group_B = index // (group_size or samples)
        batch = PromptBatch(
            iteration=seed,
            prompts=(Prompt(text="", metadata={}),) * samples,
            group_B=group_B,
            sample_B=index,
        )
        text = TextEmbeddings(sequence_BLD=torch.zeros(samples, 1, 1), pooled_BD=torch.zeros(samples, 1))
        rollout = Rollout.on_schedule(self.levels, batch=batch, text=text, x0_BCHW=x0, images_B3HW=x0)
        return Probe(
            experience=Experience(
                rollout=rollout, scores=self.scores(x0), group_B=group_B, own=slice(0, samples)
            ),
            levels=self.levels,
            iteration=seed,
            velocity=self.velocity,
            decode=lambda latents: latents,
            score=self.scores,
            schedule=lambda steps: torch.linspace(1, 0, steps + 1, dtype=torch.float64),
            seed=seed,
        )


class ExactCompletions(PairedCompletions):
    """Completions drawn from the known posterior."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def complete(self, probe, x_t, step, draw):
        mean, spread = self.policy.posterior(x_t, float(probe.levels[step + 1]))
        generator = torch.Generator().manual_seed(10_000 * probe.seed + 100 * step + draw)
        return mean + spread * torch.randn(x_t.shape, generator=generator, dtype=x_t.dtype)


def probit(slope):
    return lambda x0: torch.special.ndtr(slope * x0.double())


def probit_divergence(scale, slope, t, *, alpha):
    """D_α of a probit reward, by quadrature over x_t of the closed-form g = 2Φ(aτu / √(1 + a²(1 − τ²)))."""
    share = (1 - t) ** 2 * scale**2 / ((1 - t) ** 2 * scale**2 + t**2)
    u = torch.linspace(-8, 8, 20_001, dtype=torch.float64)
    density = torch.exp(-(u**2) / 2) / math.sqrt(2 * math.pi) * (u[1] - u[0])
    a = slope * scale
    g = 2 * torch.special.ndtr(a * math.sqrt(share) * u / math.sqrt(1 + a**2 * (1 - share)))
    return math.log(float((density * g**alpha).sum())) / (alpha - 1)
