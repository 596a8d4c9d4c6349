"""Preview: how well the reward of the one-step clean estimate predicts the reward of the sample."""

import time
from functools import partial

import torch
from torch import Tensor

from recast_pl.credit.estimators.base import (
    ProfileEstimator,
    Tilt,
    attempted,
    evidence_of,
    own_scores,
    renoised,
    scored,
)
from recast_pl.credit.evidence import Evidence
from recast_pl.credit.mathematics.moments import Moment, Normalisation
from recast_pl.credit.mathematics.regression import Regression, predicted_moment
from recast_pl.credit.probe import Probe
from recast_pl.path import clean_estimate


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

    def check(self, tilt: Tilt) -> None:
        """Under `ratio` the bound can be pooled over prompts without bias for order 2 only."""
        if tilt.normalisation == "ratio" and tilt.alpha != 2:
            raise ValueError(
                f"credit.strategy.init_args.alpha: with normalisation 'ratio' Preview measures order 2, got "
                f"{tilt.alpha}; take 'optimality', or PairedCompletions for order 3"
            )

    @torch.no_grad()
    def measure(self, probe: Probe, tilt: Tilt) -> Evidence:
        """See the class."""
        began, clean_RB = time.perf_counter(), own_scores(probe)
        rollout = probe.experience.rollout
        steps = len(probe.levels) - 1
        moments: list[list[Moment]] = [[] for _ in clean_RB]
        for step in range(steps):
            t = float(probe.levels[step + 1])
            preview = renoised(probe, step)
            if t > 0:
                preview = clean_estimate(preview, probe.velocity(preview, t, rollout.text), t)
            preview_RB = scored(probe, preview)
            for row, pair in enumerate(zip(preview_RB, clean_RB, strict=True)):
                moments[row].append(self.moment(*pair, probe.experience.group_B.cpu(), tilt))
        return evidence_of(
            probe, moments, reward_calls=steps * clean_RB.numel(), seconds=time.perf_counter() - began
        )

    def moment(self, preview_B: Tensor, score_B: Tensor, group_B: Tensor, tilt: Tilt) -> Moment:
        """A lower bound on E[g^α] at one level from preview scores and final scores, NaN where masked."""
        normalisation: Normalisation = tilt.normalisation
        return attempted(
            partial(
                predicted_moment,
                preview_B,
                score_B,
                group_B,
                alpha=tilt.alpha,
                normalisation=normalisation,
                clip=tilt.clip,
                regression=self.regression,
            )
        )
