"""Step-wise gains of preview rewards: what each denoising step changes in the score of the clean estimate.

Shape suffixes: L = K + 1 noise levels, R rewards, K denoising steps, B samples.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from recast_pl.credit.estimators.base import attempted, evidence_of, own_scores, scored
from recast_pl.credit.evidence import Evidence, EvidenceAverage
from recast_pl.credit.mathematics.moments import Moment, TooFewScores
from recast_pl.credit.mathematics.regression import centred, in_groups_of_several, ratio_moment
from recast_pl.credit.probe import Probe
from recast_pl.noise import Purpose, keyed_normal
from recast_pl.path import clean_estimate


def noising_path(probe: Probe) -> Iterator[tuple[int, Tensor]]:
    """(j, x at levels[j]) for j = K − 1, …, 0: stochastic trajectories to the clean samples, run backwards.

    In y = x / (1 − t) = x0 + σ ε with σ = t / (1 − t), the forward process is a Brownian motion in σ²:
    y_t = y_s + √(σ_t² − σ_s²) z. Its time reversal is the fine-step law of `solvers.ancestral`. So neighbouring
    levels are as alike as in one stochastic rollout, and each alone has the law (1 − t) x0 + t ε. At t = 1 what
    is left is noise alone.
    """
    rollout = probe.experience.rollout
    x0, walk, before = rollout.x0_BCHW, torch.zeros_like(rollout.x0_BCHW), 0.0
    for j in reversed(range(len(probe.levels) - 1)):
        t = float(probe.levels[j])
        z = keyed_normal(
            x0.shape[1:],
            seed=probe.seed,
            iteration=probe.iteration,
            samples=rollout.batch.sample_B.tolist(),
            steps=[j] * len(x0),
            purpose=Purpose.PROBE,
        ).to(x0)
        if t < 1:
            variance = (t / (1 - t)) ** 2
            walk, before = walk + (variance - before) ** 0.5 * z, variance
            yield j, (1 - t) * (x0 + walk)
        else:
            yield j, z


@torch.no_grad()
def preview_scores(probe: Probe) -> Tensor:
    """Scores of x̂0 = x_t − t v at all levels of `noising_path`, and of the pictures themselves: L R B.

    Costs K network calls and K reward calls for each sample; at t = 0 the samples' own scores are taken.
    """
    text = probe.experience.rollout.text
    scores = [own_scores(probe)]
    for j, x_t in noising_path(probe):
        t = float(probe.levels[j])
        scores.append(scored(probe, clean_estimate(x_t, probe.velocity(x_t, t, text), t)))
    return torch.stack(scores[::-1])


def gain_moment(before_B: Tensor, after_B: Tensor, group_B: Tensor) -> Moment:
    """The mean square of a step's gain, less its prompt's mean gain: E[Var(after − before | prompt)].

    Unbiased in groups of any size from two; NaN entries are left out.

    Raises:
        TooFewScores: where no group has two valid samples.
    """
    keep_B = before_B.isfinite() & after_B.isfinite()
    group_N = group_B[keep_B]
    several_N = in_groups_of_several(group_N)
    if not several_N.any():
        raise TooFewScores("no group has 2 valid samples")
    before_N, after_N, group_N = before_B[keep_B][several_N], after_B[keep_B][several_N], group_N[several_N]
    # centred one by one: what is rounding is told by the size of a score, not by that of a gain
    square_N = (centred(after_N, group_N) - centred(before_N, group_N)).square()
    moment = ratio_moment(square_N, torch.ones_like(square_N), group_N)
    return replace(moment, value=float(square_N.mean()))  # 1 + mean would lose the digits of a small one


def gain_evidence(probe: Probe) -> Evidence:
    """`gain_moment` of each reward at each step (column j: from levels[j] to levels[j + 1]), with its cost."""
    began, scores_LRB, group_B = time.perf_counter(), preview_scores(probe), probe.experience.group_B.cpu()
    moments = [
        [attempted(partial(gain_moment, before, after, group_B)) for before, after in pairwise(scores_LB)]
        for scores_LB in scores_LRB.transpose(0, 1)
    ]
    calls = scores_LRB[1:].numel()
    return evidence_of(probe, moments, reward_calls=calls, seconds=time.perf_counter() - began)


def relative_sizes(evidence: Evidence) -> Tensor:
    """Root mean square gains, R × K, each row over its sum: when a reward moves, whatever its scale.

    A step of which nothing is known has the mean of those that are. A reward without any gain, or of which
    nothing is known, has an even row.
    """
    known_RK = evidence.samples_RK > 0
    rms_RK = torch.where(known_RK, evidence.moments_RK.sqrt(), 0.0)
    mean_R1 = rms_RK.sum(1, keepdim=True) / known_RK.sum(1, keepdim=True).clamp_min(1)
    rms_RK = torch.where(known_RK, rms_RK, mean_R1)
    total_R1 = rms_RK.sum(1, keepdim=True)
    return torch.where(total_R1 > 0, rms_RK / total_R1.clamp_min(1e-300), 1 / rms_RK.shape[1])


class GainMeter:
    """Gains over recomputations: measured, averaged, kept.

    Args:
        samples: of an iteration and process, how many are looked at; None: all.
        memory: factor on the weight of older evidence at each recomputation, in [0, 1].
    """

    def __init__(self, *, samples: int | None, memory: float) -> None:
        if samples is not None and samples < 2:
            raise ValueError(f"credit.strategy.init_args.samples: expected 2 or more, got {samples}")
        self.samples, self.average = samples, EvidenceAverage(memory=memory)

    @property
    def sizes_RK(self) -> Tensor | None:
        """`relative_sizes` as they are known by now, if they are."""
        return None if self.average.latest is None else relative_sizes(self.average.latest)

    def observe(self, probe: Probe) -> None:
        """Measures, and averages with what was measured before."""
        self.average.add(gain_evidence(probe if self.samples is None else probe.first(self.samples)))

    def state_dict(self) -> Mapping[str, Any]:
        """Plain types and tensors."""
        return {"gains": self.average.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts `state_dict` back; a state without gains leaves none."""
        self.average.load_state_dict(state.get("gains", {}))
