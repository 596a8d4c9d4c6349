"""PairedCompletions: what two clean samples of one noisy sample still agree on."""

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
from recast_pl.credit.mathematics.moments import Moment, paired_moment
from recast_pl.credit.probe import Probe
from recast_pl.noise import Purpose, keyed_normal
from recast_pl.rollout.solvers import ancestral


class PairedCompletions(ProfileEstimator):
    """E[g²] = E[ρ(x0) ρ(x0')] with x0' completed stochastically from the re-noised x0; E[g³] from triples.

    The reference method: no regression, and no bias but that of the completion's finite steps. The rollout's
    own x0 is one draw from p(x0 | x_t), so α − 1 completions make a pair (α = 2) or a triple (α = 3). At t = 0
    the picture is scored again: a reward that is noise then shows as one.

    Steps too coarse make completions too narrow and D too large. On Gaussians of standard deviation 3, 1 and .3
    with a probit reward, in closed form (`tests/benchmarks/completion_steps.py`), the largest relative
    excess of D at t ≤ .9 is, for order 2: with 10 steps .16, .15 and .22, with 25 steps .07, .06 and .11, with
    100 steps .02, .02 and .03; for order 3: with 10 steps .21, .20 and .30, with 25 steps
    .08, .09 and .14, with 100 steps .02, .02 and .04. It is alike at most levels, and W follows shapes.

    Costs (α − 1)·K·B pictures scored, and about half a rollout's network calls for each of the K levels.

    Args:
        num_steps: denoising steps from noise to clean, of which a completion takes those below its level;
            None: the rollout's own.
    """

    def __init__(self, *, num_steps: int | None = None) -> None:
        if num_steps is not None and num_steps < 1:
            raise ValueError(
                f"credit.strategy.init_args.estimator.init_args.num_steps: expected 1 or more, got {num_steps}"
            )
        self.num_steps = num_steps

    def check(self, tilt: Tilt) -> None:
        """Products of independent scores exist for whole orders: 2 and 3."""
        if tilt.alpha not in (2, 3):
            raise ValueError(
                f"credit.strategy.init_args.alpha: PairedCompletions measures orders 2 and 3, got "
                f"{tilt.alpha}; Preview and ValueHead measure every order above 1"
            )

    @torch.no_grad()
    def measure(self, probe: Probe, tilt: Tilt) -> Evidence:
        """See the class."""
        began, clean_RB = time.perf_counter(), own_scores(probe)
        steps, draws = len(probe.levels) - 1, int(tilt.alpha)
        group_B = probe.experience.group_B.cpu()
        moments: list[list[Moment]] = [[] for _ in clean_RB]
        for step in range(steps):
            x_t = renoised(probe, step)
            drawn = [scored(probe, self.complete(probe, x_t, step, draw)) for draw in range(1, draws)]
            for row, scores_MB in enumerate(torch.stack([clean_RB, *drawn], dim=1)):
                measured = partial(
                    paired_moment, scores_MB, group_B, normalisation=tilt.normalisation, clip=tilt.clip
                )
                moments[row].append(attempted(measured))
        return evidence_of(
            probe,
            moments,
            reward_calls=steps * (draws - 1) * clean_RB.numel(),
            seconds=time.perf_counter() - began,
        )

    def complete(self, probe: Probe, x_t: Tensor, step: int, draw: int) -> Tensor:
        """An independent clean sample from x_t at the destination of `step`."""
        rollout = probe.experience.rollout
        t = probe.levels[step + 1]
        if t == 0:
            return x_t
        schedule = probe.levels if self.num_steps is None else probe.schedule(self.num_steps)
        levels = torch.cat([t[None], schedule[schedule < t - 1e-6]])

        def noise(j: int) -> Tensor:
            return keyed_normal(
                x_t.shape[1:],
                seed=probe.seed,
                iteration=probe.iteration,
                samples=rollout.batch.sample_B.tolist(),
                steps=[(draw * 1000 + step) * 1000 + j] * len(x_t),
                purpose=Purpose.COMPLETE,
            ).to(x_t.device)

        return ancestral(lambda x, t: probe.velocity(x, t, rollout.text), x_t, levels, noise)
