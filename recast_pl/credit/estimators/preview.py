"""Preview: how well the reward of the one-step clean estimate predicts the reward of the sample."""

import time

import torch
from torch import Tensor

from recast_pl.credit.estimators.base import ProfileEstimator, Tilt, finished, own_scores, renoised, scored
from recast_pl.credit.evidence import Evidence, Probe
from recast_pl.credit.moments import Moment, Normalisation, TooFewScores
from recast_pl.credit.regression import (
    Regression,
    cross_fitted,
    density_ratio,
    mean_moment,
    standardised,
    tangent_terms,
)
from recast_pl.rollout.solvers import clean_estimate


def preview_moment(
    preview_B: Tensor,
    score_B: Tensor,
    group_B: Tensor,
    *,
    alpha: float,
    normalisation: Normalisation,
    clip: float,
    regression: Regression,
) -> Moment:
    """A lower bound on E[g^α] from preview scores and final scores, NaN where masked.

    Raises:
        TooFewScores: where no group has two valid samples.
    """
    keep_B = preview_B.isfinite() & score_B.isfinite()
    if not (group_B[keep_B].unique(return_counts=True)[1] > 1).any():
        raise TooFewScores("no group has 2 valid previews")
    preview_N, score_N, group_N = preview_B[keep_B], score_B[keep_B], group_B[keep_B]
    rho_N = density_ratio(score_N, group_N, normalisation=normalisation, clip=clip)
    if not (rho_N != 1).any():
        return Moment(value=1.0, error=0.0, samples=len(rho_N))
    x_N = standardised(preview_N, group_N)
    prediction_N = 1 + cross_fitted(x_N, rho_N - 1, group_N, regression=regression)
    terms_N = tangent_terms(rho_N, prediction_N, alpha)
    return mean_moment(terms_N, rho_N, group_N, normalisation=normalisation)


class Preview(ProfileEstimator):
    """Scores x̂0 = x_t − t v, one network call from x_t, and regresses the sample's own score on that.

    A lower bound of the same shape: what the preview cannot show (in blurred estimates, fine detail) is not
    counted. The bound holds on average whatever the regression, for it is cross-fitted.

    Costs one network call and one reward call for each level and sample. At t = 0 the picture is scored again,
    so that a reward which is noise shows as one.

    Args:
        regression: of the final on the preview score, within prompts: `linear` for the few samples of a
            training iteration, `isotonic` from about a thousand.

    Reference: after the Tweedie-estimate rewards of Stepwise-Flow-GRPO (arXiv 2603.28718) and of PSP (arXiv
    2607.21591).
    """

    def __init__(self, *, regression: Regression = "linear") -> None:
        self.regression: Regression = regression

    @torch.no_grad()
    def measure(self, probe: Probe, tilt: Tilt) -> Evidence:
        """See the class."""
        began, clean_RB = time.perf_counter(), own_scores(probe)
        rollout, group_B = probe.experience.rollout, probe.experience.group_B.cpu()
        steps = len(rollout.levels) - 1
        moments: list[list[Moment]] = [[] for _ in clean_RB]
        for step in range(steps):
            t = float(rollout.levels[step + 1])
            preview = renoised(probe, step)
            if t > 0:
                preview = clean_estimate(preview, probe.velocity(preview, t, rollout.text), t)
            preview_RB = scored(probe, preview)
            for row, (preview_B, score_B) in enumerate(zip(preview_RB, clean_RB, strict=True)):
                moments[row].append(
                    preview_moment(
                        preview_B,
                        score_B,
                        group_B,
                        alpha=tilt.alpha,
                        normalisation=tilt.normalisation,
                        clip=tilt.clip,
                        regression=self.regression,
                    )
                )
        return finished(
            probe,
            moments,
            reward_calls=steps * clean_RB.numel(),
            seconds=time.perf_counter() - began,
        )
