"""Objectives on trajectories: the rollout's own stochastic steps, which have log-probabilities."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from recast_pl.objectives.base import Objective
from recast_pl.policy.base import Policy
from recast_pl.rollout.base import RolloutSampler
from recast_pl.schedule import counted_steps
from recast_pl.types import GaussianSteps, Rollout, TextEmbeddings, Transitions
from recast_pl.update.geometry import stochastic_steps, trainable_steps
from recast_pl.update.pairs import Pairs
from recast_pl.update.samples import transitions


class TrajectoryObjective(Objective[Transitions]):
    """Trains the velocity that the rollout followed, guidance included, at the latents that it came through."""

    records = True

    def check(self, rollout: RolloutSampler) -> None:
        """Refuses a rollout without stochastic steps.

        Raises:
            ValueError: naming the key and what would do.
        """
        if not rollout.stochastic_steps:
            raise ValueError(
                f"model.rollout: {type(self).__name__} trains on the rollout's log-probabilities, and a "
                f"deterministic sampler has no log-probability: got {type(rollout).__name__}, take "
                "recast_pl.rollout.SDERollout"
            )

    def trained_steps(
        self,
        levels: Tensor,
        sampler: RolloutSampler,
        *,
        min_noise_level: float,
        timesteps_per_sample: int | None,
    ) -> Tensor:
        """Those that the rollout's stochastic steps may be."""
        return stochastic_steps(
            levels,
            possible=sampler.stochastic_range,
            count=sampler.stochastic_steps,
            min_noise_level=min_noise_level,
            timesteps_per_sample=timesteps_per_sample,
        )

    def trainable(self, rollout: Rollout, *, min_noise_level: float) -> Tensor:
        """The sample's own stochastic steps that start at `min_noise_level` or above.

        Raises:
            ValueError: where the rollout has kept no trajectory.
        """
        trajectory = rollout.trajectory
        if trajectory is None:
            raise ValueError(f"{type(self).__name__} trains on the rollout's own steps, and none were kept")
        place_BK = torch.arange(rollout.levels_BT.shape[1] - 1) - trajectory.first_B[:, None]
        stochastic_BK = (place_BK >= 0) & (place_BK < trajectory.count_B[:, None])
        noisy_BK = trainable_steps(rollout.levels_BT, min_noise_level=min_noise_level)
        return stochastic_BK & noisy_BK & counted_steps(rollout.levels_BT, rollout.steps_B)

    def draw(self, rollout: Rollout, advantages_BK: Tensor, pairs: Pairs, *, seed: int) -> Transitions:
        """See `update.transitions`; nothing is drawn anew."""
        return transitions(rollout, advantages_BK, pairs)

    def velocity(
        self, policy: Policy, sampler: RolloutSampler, samples: Transitions, text: TextEmbeddings
    ) -> Tensor:
        """The guided one, which the step was taken along."""
        return sampler.velocity(policy, samples.x_t_NCHW, samples.t_N, text)

    def blank(self, latents: Callable[[], Tensor], count: int) -> Transitions:
        """Latents as given, numbers without content."""
        numbers = partial(torch.empty, count)
        return Transitions(
            before_NCHW=latents(),
            x_next_NCHW=latents(),
            t_N=numbers(),
            t_next_N=numbers(),
            steps_N=GaussianSteps(x_N=numbers(), velocity_N=numbers(), std_N=numbers()),
            log_prob_old_N=numbers(),
            advantage_N=numbers(),
        )
