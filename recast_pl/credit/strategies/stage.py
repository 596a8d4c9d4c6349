"""Stage: the denoising in three stages, each with rewards of its own."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from recast_pl.credit.base import CreditStrategy
from recast_pl.credit.estimators.preview_gains import GainMeter
from recast_pl.credit.probe import Probe
from recast_pl.path import log_snr

STAGES = ("early", "middle", "late")  # from noise to clean
KEY = "credit.strategy.init_args"


class Stage(CreditStrategy):
    """A reward counts at the steps of its own stages, and nowhere else.

    With the steps S_m of reward m's stages: under `keep: budgets` W_mj = λ_m/Σλ / |S_m| for j in S_m, so rows
    are the budgets and the columns' sums follow from them; under `keep: steps` every step counts 1/K, shared
    among its stage's rewards by their budgets, so columns are equal and the rows follow. Both sum to 1.

    Stages are told from one another by the noise level at which a step starts, or by what steps change:

    - `by: snr`: with log SNR(t) = 2 log((1 − t)/t), early below the first of two thresholds, late from the
      second on, middle between them.
    - `by: change`: the change of a step is the root mean square gain of the preview's rewards within prompts
      (as in `StepwiseGain`), over its sum, in the mean of all rewards with a budget. Early ends after the step
      at which the sum of changes is nearest to the first of two shares, middle likewise with the second; each
      stage has one step at least.

    Only third-party notes of the paper were at hand: three stages by signal-to-noise ratio and semantic change,
    one target a stage. Our reading: thresholds of the one or shares of the other set the stages, the change of
    preview rewards stands for the semantic one, and targets are sets of rewards by name.

    Args:
        stages: rewards of `early`, `middle` and `late`; a reward may be in several. Each reward with a budget
            above 0 is in one at least, and each stage has such a reward.
        by: what tells stages apart.
        log_snr: the two thresholds, rising (−3: t = .82; 0: t = ½).
        change: the two shares of all change, in (0, 1), rising.
        keep: what holds exactly, `budgets` (rows) or `steps` (columns).
        samples: for `by: change`, samples of an iteration and process that are looked at; None: all.
        memory: for `by: change`, factor on the weight of older evidence, in [0, 1].

    Reference: "SGPO", 2026 (arXiv 2608.06768), after third-party notes.
    """

    def __init__(
        self,
        *,
        stages: dict[str, list[str]],
        by: Literal["snr", "change"] = "snr",
        log_snr: tuple[float, float] = (-3.0, 0.0),
        change: tuple[float, float] = (1 / 3, 2 / 3),
        keep: Literal["budgets", "steps"] = "budgets",
        samples: int | None = None,
        memory: float = 0.9,
    ) -> None:
        if set(stages) != set(STAGES):
            raise ValueError(
                f"{KEY}.stages: expected rewards of {', '.join(STAGES)}, got {', '.join(stages) or 'none'}"
            )
        for name, choice, known in (("by", by, ("snr", "change")), ("keep", keep, ("budgets", "steps"))):
            if choice not in known:
                raise ValueError(f"{KEY}.{name}: expected one of {', '.join(known)}, got {choice}")
        if not log_snr[0] < log_snr[1]:
            raise ValueError(f"{KEY}.log_snr: expected two rising numbers, got {log_snr[0]}, {log_snr[1]}")
        if not 0 < change[0] < change[1] < 1:
            raise ValueError(
                f"{KEY}.change: expected two rising shares in (0, 1), got {change[0]}, {change[1]}"
            )
        self.stages = {stage: tuple(stages[stage]) for stage in STAGES}
        self.by, self.log_snr, self.change, self.keep = by, log_snr, change, keep
        self.meter = GainMeter(samples=samples, memory=memory)
        self.needs_evidence = by == "change"

    @property
    def ready(self) -> bool:
        """Whether the stages' steps can be told."""
        return not self.needs_evidence or self.meter.sizes_RK is not None

    def check(self, names: Sequence[str], budgets_R: Tensor, steps: int) -> None:
        """Refuses unknown rewards, rewards with a budget and no stage, and stages without a budget."""
        listed = [name for stage in STAGES for name in self.stages[stage]]
        if unknown := [name for name in dict.fromkeys(listed) if name not in names]:
            raise ValueError(
                f"{KEY}.stages: names {', '.join(unknown)}, but the rewards are {', '.join(names)}"
            )
        paid = [name for name, budget in zip(names, budgets_R.tolist(), strict=True) if budget > 0]
        if left := [name for name in paid if name not in listed]:
            raise ValueError(
                f"{KEY}.stages: {', '.join(left)} has a budget, but no stage; name it in one, or give it the "
                "budget 0 (rewards.budgets)"
            )
        for stage in STAGES:
            if not set(self.stages[stage]) & set(paid):
                raise ValueError(
                    f"{KEY}.stages.{stage}: no reward with a budget above 0; the rewards with one are "
                    f"{', '.join(paid)}"
                )

    def observe(self, probe: Probe) -> None:
        """Measures what steps change, and averages with what was measured before."""
        self.meter.observe(probe)

    def stage_of_steps(self, budgets_R: Tensor, levels: Tensor) -> Tensor:
        """The stage of each step, 0, 1 or 2: K, int64.

        Raises:
            ValueError: where a stage has no step.
            RuntimeError: for `by: change` before any evidence.
        """
        if self.by == "snr":
            return stages_by_snr(levels, self.log_snr)
        sizes_RK = self.meter.sizes_RK
        if sizes_RK is None:
            raise RuntimeError("Stage's W is asked for before any evidence: call observe() first")
        return stages_by_change(sizes_RK[budgets_R > 0].mean(0), self.change)

    def table(self, names: Sequence[str], budgets_R: Tensor, levels: Tensor) -> Tensor:
        """See the class.

        Raises:
            ValueError: as `check`, and where a stage has no step.
            RuntimeError: for `by: change` before any evidence.

        >>> levels = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.0])
        >>> stage = Stage(stages={"early": ["a"], "middle": ["a", "b"], "late": ["b"]})
        >>> stage.table(("a", "b"), torch.tensor([3.0, 1.0]), levels).tolist()
        [[0.25, 0.25, 0.25, 0.0], [0.0, 0.0, 0.125, 0.125]]
        """
        self.check(names, budgets_R, len(levels) - 1)
        of_K = self.stage_of_steps(budgets_R, levels)
        member_RS = torch.tensor([[name in self.stages[stage] for stage in STAGES] for name in names])
        on_RK = member_RS[:, of_K].double() * (budgets_R.double() / budgets_R.double().sum())[:, None]
        if self.keep == "steps":
            return on_RK / on_RK.sum(0) / len(of_K)
        return on_RK / member_RS[:, of_K].sum(1, keepdim=True).clamp_min(1)

    def state_dict(self) -> Mapping[str, Any]:
        """What steps change, as measured."""
        return self.meter.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts `state_dict` back."""
        self.meter.load_state_dict(state)


def stages_by_snr(levels: Tensor, thresholds: tuple[float, float]) -> Tensor:
    """0, 1, 2 by the log signal-to-noise ratio 2 log((1 − t)/t) at which a step starts: K + 1 levels → K.

    >>> stages_by_snr(torch.tensor([1.0, 0.9, 0.7, 0.4, 0.0]), (-3.0, 0.0)).tolist()
    [0, 0, 1, 2]
    """
    ratio_K = log_snr(levels[:-1].double())
    of_K = torch.bucketize(ratio_K, torch.tensor(thresholds, dtype=torch.float64), right=True)
    for number, stage in enumerate(STAGES):
        if not (of_K == number).any():
            raise ValueError(
                f"{KEY}.log_snr: no step starts in the stage {stage!r} of the thresholds {thresholds[0]:g}, "
                f"{thresholds[1]:g}; the steps' log SNR is {[round(ratio, 2) for ratio in ratio_K.tolist()]}"
            )
    return of_K


def stages_by_change(change_K: Tensor, shares: tuple[float, float]) -> Tensor:
    """0, 1, 2 by what steps have changed so far: a stage ends where the sum is nearest to its share.

    Raises:
        ValueError: for fewer than three steps.

    >>> stages_by_change(torch.tensor([0.1, 0.3, 0.3, 0.1, 0.1, 0.1]), (1 / 3, 2 / 3)).tolist()
    [0, 0, 1, 2, 2, 2]
    """
    steps = len(change_K)
    if steps < len(STAGES):
        raise ValueError(f"{KEY}.stages: three stages need 3 denoising steps or more, the rollout has {steps}")
    so_far_K = (change_K.double() / change_K.double().sum()).cumsum(0)
    first = 1 + int((so_far_K[: steps - 2] - shares[0]).abs().argmin())
    second = first + 1 + int((so_far_K[first : steps - 1] - shares[1]).abs().argmin())
    step_K = torch.arange(steps)
    return (step_K >= first).long() + (step_K >= second).long()
