"""How far stochastic completions of few steps are off, on Gaussians with a closed form.

x0 ~ N(0, scale²), reward Φ(slope · x0), D of order 2 and 3 in `ratio` normalisation; 200,000 samples a level.
Printed: the relative excess of D over its closed form at each noise level.

    python benchmarks/completion_steps.py
"""

import argparse
import math

import torch

from recast_pl.credit.moments import paired_moment
from recast_pl.rollout import ancestral

LEVELS = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
LAWS = ((3.0, 0.5), (1.0, 1.5), (0.3, 5.0))  # scale, slope; slope × scale = 1.5


def closed_form(scale: float, slope: float, t: float, alpha: int) -> float:
    """By quadrature over x_t of g = 2 Φ(a τ u / √(1 + a² (1 − τ²)))."""
    share = (1 - t) ** 2 * scale**2 / ((1 - t) ** 2 * scale**2 + t**2)  # τ²
    u = torch.linspace(-8, 8, 20_001, dtype=torch.float64)
    density = torch.exp(-(u**2) / 2) / math.sqrt(2 * math.pi) * (u[1] - u[0])
    a = slope * scale
    g = 2 * torch.special.ndtr(a * math.sqrt(share) * u / math.sqrt(1 + a**2 * (1 - share)))
    return math.log(float((density * g**alpha).sum())) / (alpha - 1)


def excess(scale: float, slope: float, t: float, *, alpha: int, steps: int, samples: int) -> float:
    """(estimate − closed form) / closed form."""

    def velocity(x: torch.Tensor, level: float) -> torch.Tensor:
        mean = (1 - level) * scale**2 / ((1 - level) ** 2 * scale**2 + level**2) * x
        return (x - mean) / level

    grid = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    levels = torch.cat([torch.tensor([t], dtype=torch.float64), grid[grid < t - 1e-6]])
    x0 = scale * torch.randn(samples)
    x_t = (1 - t) * x0 + t * torch.randn(samples)
    drawn = [ancestral(velocity, x_t, levels, lambda _: torch.randn(samples)) for _ in range(alpha - 1)]
    scores = torch.special.ndtr(slope * torch.stack([x0, *drawn]).double())
    moment = paired_moment(scores, torch.zeros(samples, dtype=torch.int64), normalisation="ratio")
    truth = closed_form(scale, slope, t, alpha)
    return (math.log(moment.value) / (alpha - 1) - truth) / truth


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200_000)
    options = parser.parse_args()
    torch.manual_seed(0)
    print("alpha scale steps   " + "".join(f"  t={t:<4}" for t in LEVELS))
    for alpha in (2, 3):
        for scale, slope in LAWS:
            for steps in (10, 25, 100):
                row = [
                    excess(scale, slope, t, alpha=alpha, steps=steps, samples=options.samples) for t in LEVELS
                ]
                print(f"{alpha:5d} {scale:5.1f} {steps:5d}   " + "".join(f" {value:+.3f} " for value in row))


if __name__ == "__main__":
    main()
