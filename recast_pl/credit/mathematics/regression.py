"""From predictions of a reward to lower bounds on E[g^α], by regressions that never see what they predict.

For every convex power and every prediction f > 0 of ρ that was not fitted on it,
E[g^α] ≥ E[f^α + α f^(α−1) (ρ − f)]: the tangent at f, with equality where f = E[ρ | x_t, c]. A plug-in of f
alone would be too large wherever f is noisy.

Shape suffixes: N samples, G groups.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from recast_pl.credit.mathematics.moments import CLUSTERS, RELATIVE_SPREAD, Moment, Normalisation, TooFewScores

Regression = Literal["linear", "isotonic"]


def predicted_moment(
    predictor_B: Tensor,
    score_B: Tensor,
    group_B: Tensor,
    *,
    alpha: float,
    normalisation: Normalisation,
    clip: float,
    regression: Regression,
) -> Moment:
    """A lower bound on E[g^α]: what a number known at x_t says of the sample's own score, within prompts.

    Under `optimality` ρ = 1 + z/A with z the standardised score. Under `ratio` order 2 alone:
    E[g²] = 1 + E[Var(h | c)] / E[μ_c²] with h = E[r | x_t, c] and the prompts' means μ_c, numerator by the
    tangent in units of the score, denominator by products of different samples, each pooled before the
    division.

    Args:
        predictor_B: one number for each sample, NaN where masked.
        score_B: the samples' scores, NaN where masked.
        group_B: int64.
        alpha: order.
        normalisation: see `recast_pl.credit.mathematics.moments`.
        clip: A, for `optimality`.
        regression: see `cross_fitted`.

    Raises:
        TooFewScores: where no group has two valid samples.
        ValueError: for `ratio` where a score is negative.
    """
    keep_B = predictor_B.isfinite() & score_B.isfinite()
    group_N = group_B[keep_B]
    if not (group_N.unique(return_counts=True)[1] > 1).any():
        raise TooFewScores("no group has 2 valid samples")
    score_N, several_N = score_B[keep_B].double(), in_groups_of_several(group_N)
    score_N, group_N = score_N[several_N], group_N[several_N]
    predictor_N = standardised(predictor_B[keep_B][several_N], group_N)
    if normalisation == "optimality":
        z_N = standardised(score_N, group_N)
        if not z_N.any():
            return _certain(group_N)
        prediction_N = cross_fitted(predictor_N, z_N, group_N, regression=regression)
        terms_N = tangent_terms(1 + z_N / clip, 1 + prediction_N / clip, alpha)
        return mean_moment(terms_N, z_N.square(), group_N)
    if (score_N < 0).any():
        raise ValueError(
            f"normalisation 'ratio' needs scores of at least 0, but one is {float(score_N.min()):g}; take "
            "'optimality'"
        )
    centred_N, square_N = centred(score_N, group_N), squared_means(score_N, group_N)
    if not centred_N.any() or not square_N.sum() > 0:
        return _certain(group_N)
    prediction_N = cross_fitted(predictor_N, centred_N, group_N, regression=regression)
    return ratio_moment(2 * centred_N * prediction_N - prediction_N.square(), square_N, group_N)


def _certain(group_N: Tensor) -> Moment:
    """Of a constant reward: nothing to tell."""
    return Moment(value=1.0, error=0.0, samples=len(group_N), units=len(group_N))


def in_groups_of_several(group_N: Tensor) -> Tensor:
    """Which samples are not alone in their group: N, bool."""
    _, index_N, count_G = group_N.unique(return_inverse=True, return_counts=True)
    several: Tensor = count_G[index_N] > 1
    return several


def centred(values_N: Tensor, group_N: Tensor) -> Tensor:
    """(x − group mean) √(k/(k−1)): products of two such have the covariance as their mean, in any k ≥ 2."""
    _, index_N, count_G = group_N.unique(return_inverse=True, return_counts=True)
    x_N, k_N = values_N.double(), count_G[index_N].double()
    sums_G = torch.zeros(len(count_G), dtype=torch.float64).index_add_(0, index_N, x_N)
    centred_N = (x_N - sums_G[index_N] / k_N) * (k_N / (k_N - 1).clamp_min(1)).sqrt()
    spread = centred_N.square().mean().sqrt()
    rounding = not spread > RELATIVE_SPREAD * x_N.abs().max()
    return torch.zeros_like(x_N) if rounding else centred_N


def standardised(values_N: Tensor, group_N: Tensor) -> Tensor:
    """`centred`, over its pooled spread: mean square 1; 0 where nothing varies. Groups of one are left at 0."""
    centred_N = centred(values_N, group_N)
    several_N = in_groups_of_several(group_N)
    if not several_N.any() or not centred_N.any():
        return torch.zeros_like(centred_N)
    result: Tensor = centred_N / centred_N[several_N].square().mean().sqrt()
    return result


def squared_means(values_N: Tensor, group_N: Tensor) -> Tensor:
    """x_i times the mean of the others in its group, whose mean is the squared mean of the group's law."""
    _, index_N, count_G = group_N.unique(return_inverse=True, return_counts=True)
    x_N, k_N = values_N.double(), count_G[index_N].double()
    sums_G = torch.zeros(len(count_G), dtype=torch.float64).index_add_(0, index_N, x_N)
    product_N: Tensor = x_N * (sums_G[index_N] - x_N) / (k_N - 1)
    return product_N


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


def mean_moment(terms_N: Tensor, square_N: Tensor, group_N: Tensor) -> Moment:
    """The mean of terms, with its standard error over groups (over samples below `CLUSTERS` groups).

    The mean of z² is fixed by construction, so what counts for the error is a term's deviation from its share
    of that: a reward that is wholly known has the error 0.
    """
    return ratio_moment(terms_N - 1, square_N / square_N.mean(), group_N)


def ratio_moment(part_N: Tensor, whole_N: Tensor, group_N: Tensor) -> Moment:
    """1 + Σ part / Σ whole, with the standard error of a ratio over groups (over samples if they are few)."""
    _, index_N, count_G = group_N.unique(return_inverse=True, return_counts=True)
    ratio = part_N.sum() / whole_N.sum()
    deviations = part_N - ratio * whole_N
    if len(count_G) >= CLUSTERS:
        deviations = torch.zeros(len(count_G), dtype=torch.float64).index_add_(0, index_N, deviations)
    units = len(deviations)
    error = (deviations.square().sum() * units / max(units - 1, 1)).sqrt() / whole_N.sum().abs()
    return Moment(value=float(1 + ratio), error=float(error), samples=len(part_N), units=units)
