"""From predictions of a reward to lower bounds on E[g^α], by regressions that never see what they predict.

For every convex power and every prediction f > 0 of ρ that was not fitted on it,
E[g^α] ≥ E[f^α + α f^(α−1) (ρ − f)]: the tangent at f, with equality where f = E[ρ | x_t, c]. A plug-in of f
alone would be too large wherever f is noisy.

Shape suffixes: N samples.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from recast_pl.credit.moments import CLUSTERS, RELATIVE_SPREAD, Moment, Normalisation

Regression = Literal["linear", "isotonic"]


def standardised(values_N: Tensor, group_N: Tensor) -> Tensor:
    """(x − group mean) √(k/(k−1)) / pooled spread: variance 1 also in small groups; 0 where nothing varies."""
    _, index_N, count_G = group_N.unique(return_inverse=True, return_counts=True)
    x_N, k_N = values_N.double(), count_G[index_N].double()
    sums_G = torch.zeros(len(count_G), dtype=torch.float64).index_add_(0, index_N, x_N)
    centred_N = (x_N - sums_G[index_N] / k_N) * (k_N / (k_N - 1).clamp_min(1)).sqrt()
    several = k_N > 1
    if not several.any():
        return torch.zeros_like(x_N)
    spread = centred_N[several].square().mean().sqrt()
    if not spread > RELATIVE_SPREAD * x_N.abs().max():
        return torch.zeros_like(x_N)
    result: Tensor = centred_N / spread
    return result


def density_ratio(scores_N: Tensor, group_N: Tensor, *, normalisation: Normalisation, clip: float) -> Tensor:
    """ρ of each sample; see `recast_pl.credit.moments` for the two ways. Mean about 1.

    For `ratio` the mean that a sample is divided by leaves the sample itself out; its order-1/k excess is
    divided away on average.

    Raises:
        ValueError: for `ratio` where a score is negative.
    """
    if normalisation == "optimality":
        return 1 + standardised(scores_N, group_N) / clip
    if (scores_N < 0).any():
        raise ValueError(
            f"normalisation 'ratio' needs scores of at least 0, but one is {float(scores_N.min()):g}; take "
            "'optimality'"
        )
    _, index_N, count_G = group_N.unique(return_inverse=True, return_counts=True)
    x_N, k_N = scores_N.double(), count_G[index_N].double()
    sums_G = torch.zeros(len(count_G), dtype=torch.float64).index_add_(0, index_N, x_N)
    others_N = (sums_G[index_N] - x_N) / (k_N - 1).clamp_min(1)
    rho_N = torch.where(others_N > 0, x_N / others_N.clamp_min(1e-300), 1.0)
    return rho_N / rho_N.mean()


def cross_fitted(
    predictor_N: Tensor, target_N: Tensor, group_N: Tensor, *, regression: Regression, folds: int = 5
) -> Tensor:
    """E[target | predictor], rising in the predictor, for each sample from the other folds.

    Folds are whole groups where there are enough, else samples.

    Args:
        predictor_N: one number for each sample.
        target_N: what is predicted.
        group_N: int64.
        regression: `linear` (a slope of at least 0; little variance) or `isotonic` (any rising curve).
        folds: how many.
    """
    _, unit_N = group_N.unique(return_inverse=True)
    if int(unit_N.max()) + 1 < folds:
        unit_N = torch.arange(len(predictor_N))
    predicted_N = torch.zeros_like(target_N)
    for fold in range(folds):
        held = unit_N % folds == fold
        if held.any() and not held.all():
            predicted_N[held] = _fit(predictor_N[~held], target_N[~held], predictor_N[held], regression)
    return predicted_N


def _fit(x: Tensor, y: Tensor, at: Tensor, regression: Regression) -> Tensor:
    if regression == "linear":
        x_mean, y_mean = x.mean(), y.mean()
        spread = (x - x_mean).square().sum()
        slope = ((x - x_mean) * (y - y_mean)).sum() / spread if spread > 0 else torch.zeros(())
        return y_mean + slope.clamp_min(0) * (at - x_mean)
    from scipy.optimize import isotonic_regression

    points, index, count = x.unique(return_inverse=True, return_counts=True)
    means = torch.zeros_like(points).index_add_(0, index, y) / count
    curve = isotonic_regression(means.numpy(), weights=count.double().numpy()).x
    return torch.from_numpy(np.interp(at.numpy(), points.numpy(), curve))


def tangent_terms(rho_N: Tensor, prediction_N: Tensor, alpha: float) -> Tensor:
    """f^α + α f^(α−1) (ρ − f) − α (ρ − 1), whose mean is a lower bound on E[g^α].

    The last part has mean 0, for E[ρ] = 1, and takes most of the others' noise away.
    """
    f_N, rho_N = prediction_N.double().clamp_min(1e-6), rho_N.double()
    return f_N.pow(alpha) + alpha * f_N.pow(alpha - 1) * (rho_N - f_N) - alpha * (rho_N - 1)


def mean_moment(terms_N: Tensor, rho_N: Tensor, group_N: Tensor, *, normalisation: Normalisation) -> Moment:
    """The mean of terms, with its standard error over groups (over samples below `CLUSTERS` groups).

    Under `optimality` the mean of (ρ − 1)² is fixed by construction, so what counts for the error is a term's
    deviation from its share of that: a reward that is wholly known has the error 0.
    """
    _, index_N, count_G = group_N.unique(return_inverse=True, return_counts=True)
    value = terms_N.mean()
    deviations = terms_N - value
    if normalisation == "optimality":
        square_N = (rho_N - 1).square()
        deviations = (terms_N - 1) - (value - 1) * square_N / square_N.mean()
    if len(count_G) >= CLUSTERS:
        deviations = torch.zeros(len(count_G), dtype=torch.float64).index_add_(0, index_N, deviations)
    units = len(deviations)
    error = (deviations.square().sum() * units / max(units - 1, 1)).sqrt() / len(terms_N)
    return Moment(value=float(value), error=float(error), samples=len(terms_N))
