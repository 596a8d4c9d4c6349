"""Stochastic rollouts, whose steps have log-probabilities."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from recast_pl.noise import Purpose, keyed_normal
from recast_pl.rollout.base import Keys, RolloutSampler
from recast_pl.rollout.solvers import Velocity, euler
from recast_pl.rollout.transition import cps_steps, flow_grpo_steps, step_draw, step_log_prob, step_mean
from recast_pl.rollout.window import StochasticWindow
from recast_pl.types import GaussianSteps, Trajectory

STEPS = {"flow_grpo": flow_grpo_steps, "cps": cps_steps}


class SDERollout(RolloutSampler):
    """Stochastic steps inside a window, Euler's on the ODE outside; all on the scheduler's own noise levels.

    The last step is deterministic always: noise of that step would stay in the picture. Without a window all
    others are stochastic. Held-out prompts are sampled along the ODE, as published, unless asked otherwise.

    Args:
        num_steps: denoising steps K, at least 2.
        guidance_scale: of classifier-free guidance; 1 is none.
        micro_batch_size: samples that pass through the network at a time.
        progress_bar: show a bar for rollouts that take longer than a few seconds.
        step: `flow_grpo` (Euler–Maruyama) or `cps` (keeps the noise level); see `rollout.transition`.
        noise_level: how much noise a step draws: a of σ_t = a √(t / (1 − t)) for `flow_grpo`, above 0; for
            `cps` in (0, 1].
        window: which steps are stochastic; None: all but the last.
        stochastic_evaluation: sample held-out prompts with stochastic steps too.
    """

    def __init__(
        self,
        *,
        num_steps: int = 10,
        guidance_scale: float = 1.0,
        micro_batch_size: int = 64,
        progress_bar: bool = True,
        step: Literal["flow_grpo", "cps"] = "flow_grpo",
        noise_level: float = 0.7,
        window: StochasticWindow | None = None,
        stochastic_evaluation: bool = False,
    ) -> None:
        super().__init__(
            num_steps=num_steps,
            guidance_scale=guidance_scale,
            micro_batch_size=micro_batch_size,
            progress_bar=progress_bar,
        )
        key = "model.rollout.init_args"
        if num_steps < 2:
            raise ValueError(
                f"{key}.num_steps: expected 2 or more, got {num_steps}: the last step is deterministic"
            )
        if step not in STEPS:
            raise ValueError(f"{key}.step: expected 'flow_grpo' or 'cps', got {step!r}")
        if not noise_level > 0 or (step == "cps" and noise_level > 1):
            expected = "above 0, at most 1" if step == "cps" else "above 0"
            raise ValueError(f"{key}.noise_level: expected {expected} for step '{step}', got {noise_level}")
        self.step, self.noise_level = step, noise_level
        self.window = window or StochasticWindow(length=num_steps - 1)
        self.window.within(num_steps)
        self.stochastic_evaluation = stochastic_evaluation

    @property
    def stochastic_range(self) -> range:
        """All steps but the last, or those that the window may hold."""
        return self.window.within(self.num_steps)

    @property
    def stochastic_steps(self) -> int:
        """The window's length."""
        return self.window.length

    def gaussian_steps(self, levels: Tensor) -> GaussianSteps:
        """What each of the K steps is where it is stochastic."""
        return STEPS[self.step](levels, noise_level=self.noise_level)

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
        """Float32 whatever the network's precision; see the class."""
        if keys.iteration < 0 and not self.stochastic_evaluation:
            return euler(velocity, noise_BCHW, levels, on_step=on_step), None
        x, steps_K = noise_BCHW.float(), self.gaussian_steps(levels)
        first_B = torch.tensor(
            self.window.starts(keys.group_B, num_steps=self.num_steps, seed=keys.seed, iteration=keys.iteration)
        )
        count = self.stochastic_steps
        step_BS = first_B[:, None] + torch.arange(count)
        latents_BTCHW = x.new_empty(len(x), count + 1, *x.shape[1:]) if record else x.new_empty(0)
        log_prob_BS = x.new_empty(len(x), count)
        for step, (t, t_next) in enumerate(zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True)):
            place_B = step - first_B
            if record:
                _put(latents_BTCHW, place_B, (place_B >= 0) & (place_B <= count), x)
            v = velocity(x, t).float()
            x_next = x + (t_next - t) * v
            rows = ((place_B >= 0) & (place_B < count)).nonzero().flatten()
            if len(rows):
                here = rows.to(x.device)
                gaussian = steps_K[torch.full((len(rows),), step)]
                mean = step_mean(gaussian, x[here], v[here])
                drawn = step_draw(gaussian, mean, _noise(x, keys, rows, step))
                x_next = x_next.index_copy(0, here, drawn)
                log_prob_BS[here, place_B[rows].to(x.device)] = step_log_prob(gaussian, mean, drawn)
            x = x_next
            on_step(step)
        if not record:
            return x, None
        return x, Trajectory(
            first_B=first_B,
            count_B=torch.full_like(first_B, count),
            latents_BTCHW=latents_BTCHW,
            log_prob_BS=log_prob_BS,
            steps_BS=steps_K[step_BS],
        )


def _put(latents_BTCHW: Tensor, place_B: Tensor, chosen_B: Tensor, x: Tensor) -> None:
    """Keeps the latents of chosen samples at their place in the trajectory."""
    rows = chosen_B.nonzero().flatten()
    latents_BTCHW[rows.to(x.device), place_B[rows].to(x.device)] = x[rows.to(x.device)]


def _noise(x: Tensor, keys: Keys, rows: Tensor, step: int) -> Tensor:
    """The standard normal noise of one step of some samples, keyed by each one's own index."""
    noise = keyed_normal(
        x.shape[1:],
        seed=keys.seed,
        iteration=keys.iteration,
        samples=[keys.sample_B[row] for row in rows.tolist()],
        steps=[step] * len(rows),
        purpose=Purpose.STEP,
    )
    return noise.to(x.device)
