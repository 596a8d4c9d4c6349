"""How far completions in finite steps are from draws of p(x0 | x_t), in closed form.

A Gaussian policy x0 ~ N(0, scale²) and the reward Φ(slope · x0): every completion is Gaussian too, and products
of probits of jointly normal numbers are orthant probabilities (Sheppard, "On the application of the theory of
error to cases of normal distribution and normal correlation", 1899). Printed: the relative excess of D at each
noise level, for orders 2 and 3.

    python tests/benchmarks/completion_steps.py
"""

from itertools import combinations
from math import asin, log, pi, sqrt

import torch

from recast_pl.rollout import ancestral

LEVELS = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
LAWS = ((3.0, 0.5), (1.0, 1.5), (0.3, 5.0))  # scale, slope; slope × scale = 1.5


def divergence(slope: float, covariance: torch.Tensor) -> float:
    """D_α of α jointly normal clean samples: E[Π 2Φ(slope x_i)] = 1 + (2/π) Σ asin of probit correlations.

    Args:
        slope: of the probit.
        covariance: α × α, of the clean samples; α is 2 or 3.
    """
    alpha = len(covariance)
    spread = [sqrt(1 + slope**2 * float(covariance[i, i])) for i in range(alpha)]
    arcs = sum(
        asin(slope**2 * float(covariance[i, j]) / (spread[i] * spread[j]))
        for i, j in combinations(range(alpha), 2)
    )
    return log(1 + 2 / pi * arcs) / (alpha - 1)


def completions(scale: float, t: float, steps: int | None) -> tuple[float, float]:
    """A and V of a completion A x_t + √V z from level t, in `steps` from noise to clean; None: exact draws."""
    total = (1 - t) ** 2 * scale**2 + t**2
    if steps is None:
        return (1 - t) * scale**2 / total, scale**2 * t**2 / total

    def velocity(x: torch.Tensor, level: float) -> torch.Tensor:
        mean = (1 - level) * scale**2 / ((1 - level) ** 2 * scale**2 + level**2) * x
        return (x - mean) / level

    grid = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    levels = torch.cat([torch.tensor([t], dtype=torch.float64), grid[grid < t - 1e-6]])
    # one row for x_t and one for each step's noise: the solver is linear in them
    rows = torch.eye(len(levels))
    final = ancestral(velocity, rows[0], levels, lambda step: rows[step + 1])
    return float(final[0]), float(final[1:].square().sum())


def excess(scale: float, slope: float, t: float, *, alpha: int, steps: int) -> float:
    """(D of completions in steps − D of exact draws) / the latter."""

    def of(steps: int | None) -> float:
        A, V = completions(scale, t, steps)
        total = (1 - t) ** 2 * scale**2 + t**2
        covariance = torch.full((alpha, alpha), A * A * total, dtype=torch.float64)
        covariance[0, :] = covariance[:, 0] = A * (1 - t) * scale**2
        covariance += torch.diag(torch.tensor([0.0, *[V] * (alpha - 1)], dtype=torch.float64))
        covariance[0, 0] = scale**2
        return divergence(slope, covariance)

    return of(steps) / of(None) - 1


def main() -> None:
    """Prints the table."""
    print("alpha scale steps   " + "".join(f"  t={t:<4}" for t in LEVELS) + "   largest at t ≤ .6")
    for alpha in (2, 3):
        for scale, slope in LAWS:
            for steps in (10, 25, 100):
                row = [excess(scale, slope, t, alpha=alpha, steps=steps) for t in LEVELS]
                largest = max(abs(value) for t, value in zip(LEVELS, row, strict=True) if t <= 0.6)
                cells = "".join(f" {value:+.3f} " for value in row)
                print(f"{alpha:5d} {scale:5.1f} {steps:5d}   {cells}   {largest:.3f}")


if __name__ == "__main__":
    main()
