"""Objectives on the forward process: clean samples, noised anew at each trained step."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from recast_pl.objectives.base import Objective
from recast_pl.parallel.processes import warn
from recast_pl.policy.base import Policy
from recast_pl.rollout.base import RolloutSampler
from recast_pl.schedule import counted_steps
from recast_pl.types import NoisedSamples, Rollout, TextEmbeddings
from recast_pl.update.geometry import noised_steps, trainable_steps
from recast_pl.update.pairs import Pairs
from recast_pl.update.samples import renoise


class NoisedObjective(Objective[NoisedSamples]):
    """Trains the unguided velocity at x_t = (1 − t) x0 + t ε; how x0 was sampled does not matter."""

    renoises = True
    shared_noise: bool = False  # whether the samples of a group are noised alike

    def check(self, rollout: RolloutSampler) -> None:
        """Warns of a guided rollout."""
        if rollout.guidance_scale != 1:
            warn(
                f"model.rollout.init_args.guidance_scale is {rollout.guidance_scale}, but the objective "
                "trains the unguided velocity; the published recipes roll out at 1.0"
            )

    def trained_steps(
        self,
        levels: Tensor,
        sampler: RolloutSampler,
        *,
        min_noise_level: float,
        timesteps_per_sample: int | None,
    ) -> Tensor:
        """Those that start at `min_noise_level` or above."""
        return noised_steps(levels, min_noise_level=min_noise_level, timesteps_per_sample=timesteps_per_sample)

    def trainable(self, rollout: Rollout, *, min_noise_level: float) -> Tensor:
        """Those of the sample's own schedule that start at `min_noise_level` or above."""
        counted_BK = counted_steps(rollout.levels_BT, rollout.steps_B)
        return counted_BK & trainable_steps(rollout.levels_BT, min_noise_level=min_noise_level)

    def draw(self, rollout: Rollout, advantages_BK: Tensor, pairs: Pairs, *, seed: int) -> NoisedSamples:
        """See `update.renoise`."""
        return renoise(rollout, advantages_BK, pairs, seed=seed, shared_noise=self.shared_noise)

    def velocity(
        self, policy: Policy, sampler: RolloutSampler, samples: NoisedSamples, text: TextEmbeddings
    ) -> Tensor:
        """The unguided one."""
        return policy.velocity(samples.x_t_NCHW, samples.t_N, text)

    def blank(self, latents: Callable[[], Tensor], count: int) -> NoisedSamples:
        """Latents as given, numbers without content."""
        numbers = partial(torch.empty, count)
        return NoisedSamples(
            x0_NCHW=latents(),
            noise_NCHW=latents(),
            t_N=numbers(),
            advantage_N=numbers(),
            group_N=torch.empty(count, dtype=torch.int64),
        )
