"""Discriminability: Rényi divergences of reward-tilted laws, monotone in the noise level, and their gains.

Column order is the scheduler's, from noise to clean. Step j leads from t_j to t_{j+1}; column j of a divergence
belongs to its destination t_{j+1}, so the divergence at pure noise, which is 0, has no column.

Reference: van Erven and Harremoës, "Rényi divergence and Kullback–Leibler divergence", 2014, for order α and
the data-processing inequality; "ReCAST", 2026 (arXiv 2609.13425), for their use as credit.
"""

import torch
from torch import Tensor


def renyi_divergence(ratios: Tensor, alpha: float) -> Tensor:
    """D_α = log E[g^α] / (α − 1) from exact density ratios.

    A plug-in: where the ratios are themselves noisy estimates, E[g^α] is too large, most of all at high noise.
    The estimators use products of independent scores instead (`recast_pl.credit.mathematics.moments`).

    Args:
        ratios: g = E[ρ | x_t] of N samples at the K steps' destinations, N × K, at least 0, mean about 1.
        alpha: order, above 1.

    Returns:
        K divergences, float64.

    Raises:
        ValueError: for an order of 1 or below, and for ratios that are negative or not finite.

    >>> renyi_divergence(torch.tensor([[1.0, 0.5], [1.0, 1.5]]), alpha=2.0).tolist()
    [0.0, 0.22314355131420976]
    """
    _check_order(alpha)
    if not (ratios.isfinite().all() and (ratios >= 0).all()):
        raise ValueError("density ratios must be finite and at least 0")
    return ratios.double().pow(alpha).mean(0).log() / (alpha - 1)


def divergence_of_moments(moments: Tensor, alpha: float) -> Tensor:
    """D_α = log E[g^α] / (α − 1) from moments E[g^α], of any shape."""
    _check_order(alpha)
    return moments.double().clamp_min(torch.finfo(torch.float64).tiny).log() / (alpha - 1)


def monotone(divergence: Tensor, weights: Tensor) -> Tensor:
    """The nearest curve that is at least 0 and never falls towards clean (weighted least squares).

    What is true of every divergence by the data-processing inequality. Clipping negative differences instead
    would break Σ gains = D(clean).

    Args:
        divergence: K values at the steps' destinations, from noise to clean.
        weights: K, above 0; the inverse squared standard errors.

    Returns:
        K, float64.

    >>> monotone(torch.tensor([-0.25, 0.5, 0.25, 0.75]), torch.ones(4)).tolist()
    [0.0, 0.375, 0.375, 0.75]
    """
    from scipy.optimize import isotonic_regression

    fitted = isotonic_regression(divergence.double().numpy(), weights=weights.double().numpy())
    return torch.from_numpy(fitted.x.copy()).clamp_min(0)


def gains(divergence: Tensor) -> Tensor:
    """What each step adds, Δ_j = max(D(t_{j+1}) − D(t_j), 0), with D = 0 at pure noise: K → K.

    After `monotone` nothing is clipped and the gains sum to D(clean).
    """
    D_K = divergence.double()
    return D_K.diff(prepend=D_K.new_zeros(1)).clamp_min(0)


def inverse_variances(errors: Tensor) -> Tensor:
    """1 / error², for `monotone`: errors are kept above a thousandth of the largest finite one.

    What is unknown (an infinite error) counts a millionth of the least of the others; all are equal where none
    has an error.
    """
    errors = errors.double()
    known = errors.isfinite()
    if not known.any() or not errors[known].max() > 0:
        return torch.where(known | ~known.any(), 1.0, 1e-6).double()
    largest = errors[known].max()
    return torch.where(known, errors.clamp_min(1e-3 * largest), 1e3 * largest).pow(-2)


def signal_share(gains_K: Tensor, errors_K: Tensor) -> float:
    """How much of a profile's unevenness is more than its noise: 1 − noise / observed, in [0, 1].

    The positive-part James–Stein factor for shrinking gains towards an even profile, from gains Δ_j and the
    standard errors of the divergences they are differences of (taken as independent, which is cautious:
    neighbouring levels share their clean samples).

    Reference: Efron and Morris, "Stein's estimation rule and its competitors", 1973.
    """
    steps = len(gains_K)
    if steps < 2:
        return 0.0
    known_K = errors_K.isfinite()
    if not known_K.any():
        return 0.0
    variance_K = torch.where(known_K, errors_K, errors_K[known_K].max()).double().square()
    noise = (variance_K + torch.cat([variance_K.new_zeros(1), variance_K[:-1]])).mean() * (steps - 1)
    observed = (gains_K.double() - gains_K.double().mean()).square().sum()
    return float((1 - noise / observed).clamp(0, 1)) if observed > 0 else 0.0


def shrunk(gains_K: Tensor, share: float) -> Tensor:
    """Gains moved towards their mean: share · Δ + (1 − share) · mean Δ. Their sum stays."""
    return share * gains_K + (1 - share) * gains_K.mean()


def _check_order(alpha: float) -> None:
    if not alpha > 1:
        raise ValueError(f"the Rényi order alpha must be above 1, got {alpha}")
