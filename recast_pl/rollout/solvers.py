"""Solvers from noise (t = 1) to clean (t = 0): along the probability-flow ODE dx/dt = v, or stochastic."""

from collections.abc import Callable
from math import inf, log, sqrt

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


def multistep(
    velocity: Velocity, x: Tensor, levels: Tensor, *, on_step: Callable[[int], None] | None = None
) -> Tensor:
    """DPM-Solver++(2M): second order from one velocity a step, by the clean estimates of two steps.

        x ← (s/t) x + (1 − s − s (1 − t)/t) D,  D = x̂0 + (h/h₋)/2 (x̂0 − x̂0₋),  s = t_next

    with x̂0 = x − t v, λ = log((1 − t)/t), h the step in λ and h₋ the one before. Where x̂0 is constant a step of
    any size is exact. From t = 1 the first step's h is infinite: it and the second have D = x̂0. So has the
    last, to t = 0, whose h is infinite as well. In float32 whatever the network's precision.

    Args:
        velocity: the policy's velocity at one noise level.
        x: noise, B C H W.
        levels: K + 1 descending noise levels, the last 0.
        on_step: called after each step with its index.

    Returns:
        The clean samples, B C H W, float32.

    Reference: Lu et al., "DPM-Solver++: Fast solver for guided sampling of diffusion probabilistic models",
    2022 (arXiv 2211.01095), algorithm 2, for α = 1 − t and σ = t; diffusers' `DPMSolverMultistepScheduler` with
    `use_flow_sigmas` does the same arithmetic.
    """
    x, before, h_before = x.float(), x, inf
    for step, (t, s) in enumerate(zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True)):
        clean = clean_estimate(x, velocity(x, t).float(), t)
        h = inf if t == 1 or s == 0 else log((1 - s) * t / (s * (1 - t)))
        direction = clean
        if step > 0 and h_before < inf and s > 0:
            direction = clean + (h / h_before / 2) * (clean - before)
        x = s / t * x + (1 - s - s * (1 - t) / t) * direction
        before, h_before = clean, h
        if on_step is not None:
            on_step(step)
    return x


def ancestral(velocity: Velocity, x: Tensor, levels: Tensor, noise: Callable[[int], Tensor]) -> Tensor:
    """Stochastic steps: a draw of x0 from what x at levels[0] leaves open, p(x0 | x_t), as steps get fine.

    In y = x / (1 − t) = x0 + σ ε with σ = t / (1 − t), each step is the Gaussian posterior of y_s given y_t and
    the clean estimate: y_s = x̂0 + (σ_s/σ_t)² (y_t − x̂0) + σ_s √(1 − (σ_s/σ_t)²) z. The last step, to t = 0,
    returns the clean estimate.

    Args:
        velocity: the policy's velocity at one noise level.
        x: samples at levels[0], B C H W.
        levels: descending noise levels from x's own, at most 1, to 0.
        noise: the standard normal z of step j, like x.

    Returns:
        The clean samples, B C H W, float32.

    Reference: Ho, Jain and Abbeel, "Denoising diffusion probabilistic models", 2020, equation 6, for the
    schedule x_t = (1 − t) x0 + t ε.
    """
    x = x.float()
    for step, (t, s) in enumerate(zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True)):
        clean = clean_estimate(x, velocity(x, t).float(), t)
        if s == 0:
            return clean
        kept = (s * (1 - t) / (t * (1 - s))) ** 2  # (σ_s / σ_t)²
        x = (1 - s) * (1 - kept) * clean + s * s * (1 - t) / (t * t * (1 - s)) * x
        x = x + s * sqrt(1 - kept) * noise(step)
    return x


def clean_estimate(x_t: Tensor, velocity: Tensor, t: Tensor | float) -> Tensor:
    """The one-step estimate of the clean sample, x̂0 = x_t − t v."""
    return x_t - t * velocity
