"""Solvers of the probability-flow ODE dx/dt = v(x, t) from noise (t = 1) to clean (t = 0)."""

from collections.abc import Callable

from torch import Tensor

Velocity = Callable[[Tensor, float], Tensor]  # (x_BCHW, t) → v_BCHW


def euler(
    velocity: Velocity, x: Tensor, levels: Tensor, *, on_step: Callable[[int], None] | None = None
) -> Tensor:
    """Euler's method, x ← x + (t_{j+1} − t_j) v(x, t_j), in float32 whatever the network's precision.

    Args:
        velocity: the policy's velocity at one noise level.
        x: noise, B C H W.
        levels: K + 1 descending noise levels, the last 0.
        on_step: called after each step with its index.

    Returns:
        The clean samples, B C H W, float32.

    Reference: Liu, Gong and Liu, "Flow straight and fast", 2022; diffusers' `FlowMatchEulerDiscreteScheduler`
    does the same arithmetic.
    """
    x = x.float()
    for step, (t, t_next) in enumerate(zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True)):
        x = x + (t_next - t) * velocity(x, t).float()
        if on_step is not None:
            on_step(step)
    return x


def clean_estimate(x_t: Tensor, velocity: Tensor, t: Tensor) -> Tensor:
    """The one-step estimate of the clean sample, x̂0 = x_t − t v."""
    return x_t - t * velocity
