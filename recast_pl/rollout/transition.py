"""Stochastic denoising steps as Gaussians: what they are, and the log-probability of what they drew.

The rollout that takes a step and the objective that trains on it call the same functions of this file. Both
kinds of step have a mean that is affine in x and in the velocity v, so a step is three numbers:
x_next ~ N(a x + b v, std²).

Shape suffixes: K denoising steps, N steps of samples, C H W latent.
"""

import math

import torch
from torch import Tensor

from recast_pl.types import GaussianSteps


def flow_grpo_steps(levels: Tensor, *, noise_level: float = 0.7) -> GaussianSteps:
    """Euler–Maruyama steps of the SDE that has the flow's marginals, with σ_t = noise_level √(t / (1 − t)).

        mean = x (1 + σ²/(2t) dt) + v (1 + σ² (1 − t)/(2t)) dt,  std = σ √|dt|,  dt = t_next − t < 0

    At t = 1, where σ_t has no value, 1 − t under the root is replaced by 1 − t_1 of the schedule's second
    level, as in the released code. The marginals are exact for small steps only; the first step leaves the
    noise level at √(1 + a⁴/4) of what it should be (a = noise_level), however many steps there are.

    Args:
        levels: K + 1 noise levels, from at most 1 down to 0.
        noise_level: a, above 0.

    Reference: Liu et al., "Flow-GRPO: Training flow matching models via online RL", 2025 (arXiv 2505.05470),
    and its released code.

    >>> round(flow_grpo_steps(torch.tensor([0.5, 0.4, 0.0], dtype=torch.float64)).std_N[0].item(), 6)
    0.221359
    """
    t, t_next = levels[:-1].double(), levels[1:].double()
    dt = t_next - t
    rest = 1 - torch.where(t == 1, t_next, t)
    variance = noise_level**2 * t / rest  # σ², a rate
    return GaussianSteps(
        x_N=1 + variance / (2 * t) * dt,
        velocity_N=(1 + variance * (1 - t) / (2 * t)) * dt,
        std_N=(variance * -dt).sqrt(),
    )


def cps_steps(levels: Tensor, *, noise_level: float = 0.7) -> GaussianSteps:
    """Coefficients-preserving steps: part of the noise is drawn anew, so that its level stays the schedule's.

        mean = (1 − s) x̂0 + √(s² − std²) x̂1,  std = s sin(noise_level π/2),  s = t_next

    with the clean estimate x̂0 = x − t v and the noise estimate x̂1 = x + (1 − t) v. The coefficients of clean
    sample and noise in x_next are 1 − s and √(s² − std² + std²) = s: where the estimates are right, x_next lies
    at level s exactly, for steps of any size. Collected by x and v, with r = √(s² − std²):
    a = 1 − s + r, b = (1 − t) r − t (1 − s). The last step, to s = 0, is deterministic.

    Args:
        levels: K + 1 noise levels, from at most 1 down to 0.
        noise_level: in (0, 1]; at 1 all noise is drawn anew.

    Reference: Wang and Yu, "Coefficients-preserving sampling for reinforcement learning with flow matching",
    2025 (arXiv 2509.05952), and its released code.
    """
    t, s = levels[:-1].double(), levels[1:].double()
    std = s * math.sin(noise_level * math.pi / 2)
    kept = (s.square() - std.square()).clamp_min(0).sqrt()
    return GaussianSteps(x_N=1 - s + kept, velocity_N=(1 - t) * kept - t * (1 - s), std_N=std)


def step_mean(steps_N: GaussianSteps, x_NCHW: Tensor, velocity_NCHW: Tensor) -> Tensor:
    """The mean a x + b v of where each step leads."""
    return _along(steps_N.x_N, x_NCHW) * x_NCHW + _along(steps_N.velocity_N, x_NCHW) * velocity_NCHW


def step_draw(steps_N: GaussianSteps, mean_NCHW: Tensor, noise_NCHW: Tensor) -> Tensor:
    """Where each step leads with that standard normal noise: mean + std · noise."""
    return mean_NCHW + _along(steps_N.std_N, mean_NCHW) * noise_NCHW


def step_log_prob(steps_N: GaussianSteps, mean_NCHW: Tensor, x_next_NCHW: Tensor) -> Tensor:
    """The log-density N(x_next; mean, std²) of each step, as a mean over dimensions: [N].

    The mean rather than the sum, as in the released code of Flow-GRPO and of DDPO: ratios and clip ranges then
    mean the same for latents of any size. The density is the whole Gaussian's for every kind of step (Flow-CPS'
    released code leaves out its constants and the factor 1 / (2 std²)).
    """
    std = _along(steps_N.std_N, mean_NCHW)
    z = (x_next_NCHW - mean_NCHW) / std
    log_density = -0.5 * z.square() - std.log() - 0.5 * math.log(2 * math.pi)
    return log_density.mean(dim=tuple(range(1, log_density.ndim)))


def step_divergence(steps_N: GaussianSteps, mean_NCHW: Tensor, other_NCHW: Tensor) -> Tensor:
    """KL of N(mean, std²) from N(other, std²): (mean − other)² / (2 std²), mean over dimensions: [N]."""
    z = (mean_NCHW - other_NCHW) / _along(steps_N.std_N, mean_NCHW)
    return 0.5 * z.square().mean(dim=tuple(range(1, z.ndim)))


def _along(value_N: Tensor, like: Tensor) -> Tensor:
    """Values of N steps, shaped to go along with N C H W."""
    return value_N.to(like.device, like.dtype).view(-1, *[1] * (like.ndim - 1))
