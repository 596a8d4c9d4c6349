"""Discriminability profiles: from averaged evidence to the gains that W follows.

Shape suffixes: R rewards, K denoising steps (column j belongs to the step's destination t_{j+1}).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from recast_pl.credit.evidence import Evidence
from recast_pl.credit.mathematics.divergence import (
    divergence_of_moments,
    gains,
    inverse_variances,
    monotone,
    shrunk,
    signal_share,
)

FALSE_ALARMS = 0.01
"""Nominal share of rewards that are noise and are taken for more at some level of their profile.

Measured on noise in groups of 8: 2 to 3 % by `PairedCompletions` from 32 to 128 samples and 1 % from 256, for
the errors of few groups are rough; none of 600 by `Preview`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Each reward's discriminability over noise levels."""

    names: tuple[str, ...]  # R
    levels: Tensor  # K + 1
    divergence_RK: Tensor  # as estimated
    errors_RK: Tensor  # standard errors of these; infinite where nothing is known
    monotone_RK: Tensor  # never falling towards clean
    gains_RK: Tensor  # of the monotone curve, shrunk by signal_R; rows sum to its last column
    signal_R: Tensor  # share of the gains' unevenness that is more than noise, in [0, 1]
    detected_R: Tensor  # bool; whether it is told from 0 at some level before clean

    @property
    def total_R(self) -> Tensor:
        """D at clean: the whole discriminability."""
        return self.monotone_RK[:, -1]

    @property
    def undetected(self) -> tuple[str, ...]:
        """Rewards whose profile is not told from noise."""
        return tuple(
            name for name, found in zip(self.names, self.detected_R.tolist(), strict=True) if not found
        )

    def half_level(self, row: int) -> float:
        """The noise level at which a reward's curve reaches half of its end (linear in t between levels)."""
        curve = torch.cat([torch.zeros(1, dtype=torch.float64), self.monotone_RK[row]])
        half = curve[-1] / 2
        if not half > 0:
            return float("nan")
        j = int((curve >= half).nonzero()[0])
        share = (half - curve[j - 1]) / (curve[j] - curve[j - 1])
        return float(self.levels[j - 1] + share * (self.levels[j] - self.levels[j - 1]))


def profile_of(evidence: Evidence, *, alpha: float, shrink: bool = True) -> Profile:
    """Divergences, their monotone projection, and gains shrunk towards an even profile by their noise.

    A reward that is told from noise at no level before the clean end gets even gains. The end itself says
    nothing of when: a reward that gives the same picture the same score is always told there, however few
    samples there are.
    """
    divergence_RK = divergence_of_moments(evidence.moments_RK, alpha)
    errors_RK = evidence.errors_RK / evidence.moments_RK.clamp_min(1e-12) / (alpha - 1)
    monotone_RK, gains_RK = torch.empty_like(divergence_RK), torch.empty_like(divergence_RK)
    signal_R = torch.zeros(len(evidence.names), dtype=torch.float64)
    before_clean = (divergence_RK[:, :-1], errors_RK[:, :-1], evidence.units_RK[:, :-1])
    detected_R = detected(*before_clean)
    for r, (row, error) in enumerate(zip(divergence_RK, errors_RK, strict=True)):
        monotone_RK[r] = monotone(row, inverse_variances(error))
        raw_K = gains(monotone_RK[r])
        if detected_R[r]:
            signal_R[r] = signal_share(raw_K, error) if shrink else 1.0
        gains_RK[r] = shrunk(raw_K, float(signal_R[r]))
    return Profile(
        names=evidence.names,
        levels=evidence.levels,
        divergence_RK=divergence_RK,
        errors_RK=errors_RK,
        monotone_RK=monotone_RK,
        gains_RK=gains_RK,
        signal_R=signal_R,
        detected_R=detected_R,
    )


def detected(divergence_RK: Tensor, errors_RK: Tensor, units_RK: Tensor) -> Tensor:
    """Whether each reward's divergence is told from 0 at some level: R, bool.

    One-sided t tests of its K levels at `FALSE_ALARMS` / K (Bonferroni's bound), with as many degrees of
    freedom as the errors have independent parts, less one.
    """
    from scipy.stats import t as student

    steps = max(1, divergence_RK.shape[1])
    freedom = (units_RK - 1).clamp_min(1).numpy()
    limit_RK = torch.from_numpy(student.isf(FALSE_ALARMS / steps, freedom))
    return (divergence_RK > limit_RK * errors_RK).any(1)
