"""Deterministic rollouts along the probability-flow ODE."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from recast_pl.rollout.base import Keys, RolloutSampler
from recast_pl.rollout.solvers import Velocity, euler, multistep
from recast_pl.types import Trajectory


class ODERollout(RolloutSampler):
    """Steps on the scheduler's own noise levels; with `euler` what the plain diffusers pipeline does.

    Args:
        num_steps: denoising steps K.
        guidance_scale: of classifier-free guidance; 1 is none.
        micro_batch_size: samples that pass through the network at a time.
        progress_bar: show a bar for rollouts that take longer than a few seconds.
        solver: `euler`, or `multistep`: of second order at the same number of network calls.
    """

    def __init__(
        self,
        *,
        num_steps: int = 10,
        guidance_scale: float = 1.0,
        micro_batch_size: int = 64,
        progress_bar: bool = True,
        solver: Literal["euler", "multistep"] = "euler",
    ) -> None:
        super().__init__(
            num_steps=num_steps,
            guidance_scale=guidance_scale,
            micro_batch_size=micro_batch_size,
            progress_bar=progress_bar,
        )
        solvers = {"euler": euler, "multistep": multistep}
        if solver not in solvers:
            raise ValueError(f"model.rollout.init_args.solver: expected 'euler' or 'multistep', got {solver!r}")
        self.solver = solvers[solver]

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
        """See `solvers.euler` and `solvers.multistep`; there is no trajectory to record."""
        return self.solver(velocity, noise_BCHW, levels, on_step=on_step), None
