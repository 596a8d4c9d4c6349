"""From scores to E[g^α], with standard errors: where a reward becomes a density ratio ρ, in one place.

A reward's ρ(x0, c) ≥ 0 has mean 1 over the samples of prompt c; g(x_t) = E[ρ | x_t, c]. Two ways to make one:

- `optimality`: ρ = 1 + z / A, with z the reward standardised within its prompt and A the advantage clip: twice
  the optimality probability that DiffusionNFT trains with, so the divergence is that of the tilt which one
  update aims at. A constant added to the reward changes nothing, and rewards may be negative. (The clip itself
  is left out: the standard score of one of k samples is at most √(k − 1).)
- `ratio`: ρ = r / E[r | c], the released code's; for rewards that are at least 0, and offsets matter.

Independent clean samples x0, x0' from one x_t give E[ρ ρ'] = E[g²], and three give E[g³]: products of
independent scores instead of powers of noisy means. All group statistics are U-statistics (unbiased in groups
of any size above α), pooled over groups before anything is divided: a ratio of two small-group estimates would
be biased by order 1/k. Pooling weighs a prompt by its variance (`optimality`) or squared mean (`ratio`).

Shape suffixes: M draws of one x_t (2 or 3), N samples, G groups, S power sums, P pooled statistics.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

Normalisation = Literal["optimality", "ratio"]
CLUSTERS = 8  # from this many groups on, whole groups are left out for standard errors, else samples
LEFT_OVER = [2, 1, 0]  # of three draws the one that the pairs (0, 1), (0, 2), (1, 2) do not name
RELATIVE_SPREAD = 1e-6  # below this share of its size a reward's spread is rounding


class TooFewScores(ValueError):
    """So many scores were masked that nothing can be said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An estimate of E[g^α]."""

    value: float
    error: float  # standard error
    samples: int  # that it rests on
    units: int  # independent ones, groups or samples, that the error was computed from


UNKNOWN = Moment(value=1.0, error=float("inf"), samples=0, units=0)
"""Where there are too few scores to say anything."""


def paired_moment(
    scores_MN: Tensor, group_N: Tensor, *, normalisation: Normalisation = "optimality", clip: float = 5.0
) -> Moment:
    """E[g^α] for α = M from the scores of M independent clean samples of each x_t.

    Args:
        scores_MN: M = 2 or 3 rows; entries of one column come from one x_t. Columns with a NaN are left out.
        group_N: int64, the prompt of each x_t.
        normalisation: see the module.
        clip: A, for `optimality`.

    Returns:
        The moment; 1 ± 0 for a constant reward.

    Raises:
        TooFewScores: where no group has M valid samples, or only one has and no more than those.
        ValueError: for `ratio` where a score is negative.

    The standard error leaves out one group at a time, or one sample where there are fewer than `CLUSTERS`
    groups (then the prompts are taken as given).

    Reference: Hoeffding, "A class of statistics with asymptotically normal distribution", 1948, for
    U-statistics; Efron and Stein, "The jackknife estimate of variance", 1981.
    """
    draws = len(scores_MN)
    if draws not in (2, 3):
        raise ValueError(f"paired moments exist for 2 or 3 draws (alpha 2 or 3), got {draws}")
    keep_N = scores_MN.isfinite().all(0)
    x_MN, group_N = scores_MN[:, keep_N].double(), group_N[keep_N]
    if normalisation == "ratio" and (x_MN < 0).any():
        raise ValueError(
            "normalisation 'ratio' needs scores of at least 0, but one is "
            f"{float(x_MN.min()):g}; take 'optimality'"
        )
    _, index_N, count_G = group_N.unique(return_inverse=True, return_counts=True)
    if not len(count_G) or int(count_G.max()) < draws:
        raise TooFewScores(f"no group has {draws} valid samples")
    if normalisation == "optimality":
        size = float(x_MN.abs().max())
        x_MN = x_MN - x_MN.mean()  # only for rounding's sake
        statistics = _central
        finish: Callable[..., Tensor]
        finish = partial(_optimality, clip=clip, floor=(RELATIVE_SPREAD * size) ** 2)
    else:
        statistics, finish = _raw, _ratio
    terms_NS = _power_terms(x_MN)
    sums_GS = torch.zeros(len(count_G), terms_NS.shape[1], dtype=torch.float64)
    sums_GS = sums_GS.index_add_(0, index_N, terms_NS)
    per_group_GP = statistics(sums_GS, draws)
    pooled_P = per_group_GP.sum(0)
    if int((count_G >= draws).sum()) >= CLUSTERS:
        without = pooled_P - per_group_GP[count_G >= draws]
    else:
        own_NP = per_group_GP[index_N]
        without = pooled_P - own_NP + statistics(sums_GS[index_N] - terms_NS, draws)
    left_out = finish(without, draws)
    units = len(left_out)
    error = ((left_out - left_out.mean()).square().sum() * (units - 1) / units).sqrt()
    if not error.isfinite():  # without one of them nothing is left
        raise TooFewScores(f"{units} valid samples are too few for an error")
    return Moment(
        value=float(finish(pooled_P, draws)), error=float(error), samples=int(keep_N.sum()), units=units
    )


def _power_terms(x_MN: Tensor) -> Tensor:
    """Each sample's share in the group sums: 1, x_i, x_i x_j (i ≤ j), and x_0 x_1 x_2 for three draws."""
    draws = len(x_MN)
    terms = [torch.ones_like(x_MN[0]), *x_MN, *(x * x for x in x_MN)]
    terms += [x_MN[i] * x_MN[j] for i, j in combinations(range(draws), 2)]
    if draws == 3:
        terms.append(x_MN.prod(0))
    return torch.stack(terms, dim=1)


def _unpacked(sums: Tensor, draws: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """k, Σx_i, Σx_i², Σx_i x_j and Σxyz (or nothing) from the last dimension."""
    k, rest = sums[..., :1], sums[..., 1:]
    single, square = rest[..., :draws], rest[..., draws : 2 * draws]
    pairs = rest[..., 2 * draws : 2 * draws + draws * (draws - 1) // 2]
    return k, single, square, pairs, rest[..., 2 * draws + pairs.shape[-1] :]


def _central(sums: Tensor, draws: int) -> Tensor:
    """k, and k times unbiased variances, covariances and (three draws) third co-cumulant within each group."""
    k, single, square, pairs, triple = _unpacked(sums, draws)
    enough, count = k >= draws, k.clamp_min(draws)
    i, j = (list(side) for side in zip(*combinations(range(draws), 2), strict=True))
    parts = [
        k,
        (square - single.square() / count) * count / (count - 1),
        (pairs - single[..., i] * single[..., j] / count) * count / (count - 1),
    ]
    if draws == 3:  # Σ (x − x̄)(y − ȳ)(z − z̄)
        centred = triple - (pairs * single[..., LEFT_OVER]).sum(-1, keepdim=True) / count
        centred = centred + 2 * single.prod(-1, keepdim=True) / count.square()
        parts.append(centred * count.square() / ((count - 1) * (count - 2)))
    return torch.where(enough, torch.cat(parts, dim=-1), 0.0)


def _optimality(pooled: Tensor, draws: int, *, clip: float, floor: float) -> Tensor:
    """E[Π (1 + z_i / A)] = 1 + Σ corr_ij / A² (+ co-skewness / A³) from pooled central statistics."""
    k, rest = pooled[..., 0], pooled[..., 1:]
    variances, covariances = rest[..., :draws] / k[..., None], rest[..., draws:] / k[..., None]
    constant = (variances <= floor).any(-1)
    spread = variances.clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    moment = torch.ones_like(k)
    for number, (i, j) in enumerate(combinations(range(draws), 2)):
        moment = moment + covariances[..., number] / (spread[..., i] * spread[..., j]) / clip**2
    if draws == 3:
        moment = moment + covariances[..., 3] / spread.prod(-1) / clip**3
    return torch.where(constant, 1.0, moment)


def _raw(sums: Tensor, draws: int) -> Tensor:
    """K times the unbiased E[Π r_i] and E[r]^draws within each group."""
    k, single, _, pairs, triple = _unpacked(sums, draws)
    enough, count = k >= draws, k.clamp_min(draws)
    products = single.prod(-1, keepdim=True)
    if draws == 2:
        parts = [pairs, (products - pairs) / (count - 1)]
    else:  # the sum over three different samples
        distinct = products - (pairs * single[..., LEFT_OVER]).sum(-1, keepdim=True) + 2 * triple
        parts = [triple, distinct / ((count - 1) * (count - 2))]
    return torch.where(enough, torch.cat(parts, dim=-1), 0.0)


def _ratio(pooled: Tensor, draws: int) -> Tensor:
    """E[Π r_i] / E[r]^draws from pooled raw statistics; 1 for a reward that is always 0."""
    return torch.where(pooled[..., 1] > 0, pooled[..., 0] / pooled[..., 1], 1.0)
