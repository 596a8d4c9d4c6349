"""The path between clean samples and noise, x_t = (1 − t) x0 + t ε, and what is known at a point of it.

At t = 0 lie clean samples x0, at t = 1 noise ε ~ N(0, I). A network says the velocity v = ε̂ − x̂0; clean and
noise estimates follow from it. Noise levels are one number for all samples, or one for each of N. Latents have
any number of dimensions.

Shape suffixes: N samples, Z all dimensions of a latent (C H W, or C F H W of a video).
"""

import torch
from torch import Tensor

Level = Tensor | float
"""A noise level t in [0, 1]: one number, or one for each of N samples."""


def along(value: Level, like_NZ: Tensor) -> Level:
    """Values of N samples, shaped to go along with N × Z; a single number stays what it is.

    >>> along(torch.zeros(3), torch.zeros(3, 4, 8, 8)).shape
    torch.Size([3, 1, 1, 1])
    """
    if isinstance(value, Tensor) and value.ndim == 1:
        return value.view(-1, *[1] * (like_NZ.ndim - 1))
    return value


def noised(x0_NZ: Tensor, noise_NZ: Tensor, t: Level) -> Tensor:
    """The point at level t of the path from x0 to ε: x_t = (1 − t) x0 + t ε, N × Z.

    >>> noised(torch.tensor([[4.0], [4.0]]), torch.tensor([[0.0], [8.0]]), torch.tensor([0.5, 0.25])).tolist()
    [[2.0], [5.0]]
    """
    t = along(t, x0_NZ)
    return (1 - t) * x0_NZ + t * noise_NZ


def target_velocity(x0_NZ: Tensor, noise_NZ: Tensor) -> Tensor:
    """The velocity dx_t/dt along the path, u = ε − x0: what a network's velocity regresses on, N × Z."""
    return noise_NZ - x0_NZ


def clean_estimate(x_t_NZ: Tensor, velocity_NZ: Tensor, t: Level) -> Tensor:
    """The clean sample that a velocity points to, x̂0 = x_t − t v, N × Z."""
    return x_t_NZ - along(t, x_t_NZ) * velocity_NZ


def noise_estimate(x_t_NZ: Tensor, velocity_NZ: Tensor, t: Level) -> Tensor:
    """The noise that a velocity comes from, ε̂ = x_t + (1 − t) v, N × Z."""
    return x_t_NZ + (1 - along(t, x_t_NZ)) * velocity_NZ


def signal_to_noise(t: Tensor) -> Tensor:
    """SNR(t) = ((1 − t)/t)², from 0 at pure noise to ∞ at clean samples; the shape of t.

    >>> signal_to_noise(torch.tensor([1.0, 0.5, 0.2]))
    tensor([ 0.,  1., 16.])
    """
    return ((1 - t) / t).square()


def log_snr(t: Tensor) -> Tensor:
    """The logarithm of that, 2 log((1 − t)/t), from −∞ at pure noise to ∞ at clean samples; the shape of t.

    >>> log_snr(torch.tensor([1.0, 0.5]))
    tensor([-inf, 0.])
    """
    return 2 * ((1 - t) / t).log()


# Variance-preserving models (SD1.5, SDXL) say x_vp = α x0 + σ ε with α² + σ² = 1, and predict ε or
# v_vp = α ε − σ x0. Divided by α + σ that is this path, x_t = x_vp / (α + σ), at t = σ / (α + σ); an Euler step
# of the velocities below is the DDIM step (Song, Meng and Ermon, "Denoising diffusion implicit models", 2021,
# equation 12 with η = 0), exactly.


def vp_levels(alphas_cumprod: Tensor) -> Tensor:
    """Noise levels t = σ/(α + σ) of a variance-preserving schedule's α²; float64, in the same shape.

    >>> vp_levels(torch.tensor([1.0, 0.5, 0.0])).tolist()
    [0.0, 0.5, 1.0]
    """
    squared = alphas_cumprod.double()
    alpha, sigma = squared.sqrt(), (1 - squared).sqrt()
    return sigma / (alpha + sigma)


def vp_scale(t: Level) -> Level:
    """α + σ = 1/√((1 − t)² + t²) of the variance-preserving state at level t: x_vp = (α + σ) x_t.

    It is 1 at both ends and √2 in the middle.
    """
    return ((1 - t) ** 2 + t**2) ** -0.5


def velocity_of_noise(x_t_NZ: Tensor, noise_NZ: Tensor, t: Level) -> Tensor:
    """The velocity of a predicted noise ε̂: v = ε̂ − x̂0 = (ε̂ − x_t) / (1 − t), N × Z; t below 1.

    At t = 1 the state is the noise, and a prediction of it says nothing of x0.
    """
    return (noise_NZ - x_t_NZ) / (1 - along(t, x_t_NZ))


def velocity_of_vp_velocity(x_t_NZ: Tensor, vp_velocity_NZ: Tensor, t: Level) -> Tensor:
    """The velocity of a predicted v_vp = α ε − σ x0, N × Z; t in [0, 1].

    With x̂0 = α x_vp − σ v_vp and ε̂ = α v_vp + σ x_vp, v = ε̂ − x̂0 = (α + σ) v_vp + (σ − α) x_vp. In terms of
    x_t, as α = (1 − t)(α + σ) and σ = t (α + σ): v = (α + σ) v_vp + (α + σ)² (2t − 1) x_t.

    Reference: Salimans and Ho, "Progressive distillation for fast sampling of diffusion models", 2022,
    appendix D.
    """
    t = along(t, x_t_NZ)
    scale = vp_scale(t)
    return scale * vp_velocity_NZ + scale**2 * (2 * t - 1) * x_t_NZ


def vp_timesteps(t_N: Tensor, alphas_cumprod: Tensor) -> Tensor:
    """The schedule's timestep of each level: the inverse of `vp_levels`, linear in log σ/α between integers; N.

    Levels beyond the schedule's ends take its first or last timestep. float64.

    Args:
        t_N: noise levels in [0, 1].
        alphas_cumprod: α² of the schedule's T timesteps, falling.
    """
    levels_T = vp_levels(alphas_cumprod).to(t_N.device)
    own_T, wanted_N = -log_snr(levels_T) / 2, -log_snr(t_N.double()) / 2  # log σ/α, rising
    right = torch.searchsorted(own_T, wanted_N).clamp(1, len(own_T) - 1)
    low, high = own_T[right - 1], own_T[right]
    share = torch.where(wanted_N >= high, 1.0, ((wanted_N - low) / (high - low)).clamp(0, 1))
    return right - 1 + share
