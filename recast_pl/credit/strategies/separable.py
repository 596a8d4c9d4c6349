"""Separable: one time weight for all rewards, times one weight for each reward."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from recast_pl.credit.base import CreditStrategy
from recast_pl.credit.estimators import ProfileEstimator
from recast_pl.credit.mathematics.moments import Normalisation
from recast_pl.credit.probe import Probe
from recast_pl.credit.profile import Profile
from recast_pl.credit.strategies.recast import ReCAST
from recast_pl.types import UpdatePart

KEY = "credit.strategy.init_args"


class Separable(CreditStrategy):
    """W_mj = μ_m · ω_j, Σμ = Σω = 1: rank 1, so no reward can count at other steps than another.

    - Time, ω: given by `time`; or, from evidence, the mean of the rewards' relative gains in discriminability,
      ω_j = Σ_m λ_m/Σλ · Δ_mj / Σ_j Δ_mj. A reward that is not told from noise counts as even.
    - Objectives, μ: `budgets`, λ/Σλ, so that rows are the budgets; or `evidence`,
      μ_m ∝ λ_m · mean_j D_m(t_j): within the budgets, a reward that can be told at more of the noise levels
      counts more, and rows are no longer the budgets. Where no reward can be told at all it is `budgets`.

    Columns are not equal, by design. The profiles are ReCAST's, measured and averaged in the same way.

    From the paper's abstract alone (its text was not at hand) we have the product of a time weight, from the
    importance of denoising steps, and weights that combine the rewards and adapt; how both are computed there
    we do not know. Gains and divergences in their places are our reading.

    Args:
        time: ω at each of the K steps, from noise to clean, at least 0, of any sum; None: from evidence.
        objectives: where μ comes from.
        alpha: Rényi order, above 1.
        estimator: measures the profiles; None: Preview.
        normalisation: what makes a reward a density ratio; see `recast_pl.credit.mathematics.moments`.
        clip: advantage scale A of the `optimality` ratio.
        samples: of an iteration and process, how many are looked at; None: all.
        memory: factor on the weight of older evidence at each recomputation, in [0, 1].
        shrink: move gains towards even ones by their noise.

    Reference: Li et al., "Learning to credit the right steps: Objective-aware process optimization for visual
    generation" (OTCA), 2026 (arXiv 2604.19234).
    """

    def __init__(
        self,
        *,
        time: list[float] | None = None,
        objectives: Literal["budgets", "evidence"] = "budgets",
        alpha: float = 2.0,
        estimator: ProfileEstimator | None = None,
        normalisation: Normalisation = "optimality",
        clip: float = 5.0,
        samples: int | None = None,
        memory: float = 0.9,
        shrink: bool = True,
    ) -> None:
        if objectives not in ("budgets", "evidence"):
            raise ValueError(f"{KEY}.objectives: expected budgets or evidence, got {objectives}")
        if time is not None and not (all(weight >= 0 for weight in time) and 0 < sum(time) < float("inf")):
            raise ValueError(f"{KEY}.time: expected finite weights of at least 0, not all 0, got {time}")
        self.time, self.objectives = time, objectives
        self.measured = ReCAST(
            alpha=alpha,
            estimator=estimator,
            normalisation=normalisation,
            clip=clip,
            samples=samples,
            memory=memory,
            shrink=shrink,
        )
        self.needs_evidence = time is None or objectives == "evidence"
        self.needs_updates = self.needs_evidence and self.measured.needs_updates
        self.profile: Profile | None = None

    @property
    def ready(self) -> bool:
        """Whether there is evidence, or none is needed."""
        return not self.needs_evidence or self.profile is not None

    def check(self, names: Sequence[str], budgets_R: Tensor, steps: int) -> None:
        """Refuses a `time` of another number of steps, and what the estimator cannot measure."""
        if self.needs_evidence:
            self.measured.check(names, budgets_R, steps)
        if self.time is not None and len(self.time) != steps:
            raise ValueError(
                f"{KEY}.time: {len(self.time)} weights, but the rollout has {steps} steps "
                "(model.rollout.init_args.num_steps)"
            )

    def observe(self, probe: Probe) -> None:
        """Measures, and averages with what was measured before."""
        self.measured.observe(probe)
        self.profile = self.measured.profile

    def watch(self, part: UpdatePart) -> None:
        """Hands the update to the estimator."""
        self.measured.watch(part)

    def learn(self, total: Callable[[Tensor], Tensor]) -> None:
        """Lets the estimator learn."""
        self.measured.learn(total)

    def table(self, names: Sequence[str], budgets_R: Tensor, levels: Tensor) -> Tensor:
        """See the class.

        Raises:
            RuntimeError: before any evidence, where it is needed.
            ValueError: for a `time` of another number of steps.

        >>> Separable(time=[1.0, 3.0]).table(("a", "b"), torch.ones(2), torch.tensor([1.0, 0.5, 0.0])).tolist()
        [[0.125, 0.375], [0.125, 0.375]]
        """
        if not self.ready:
            raise RuntimeError("Separable's W is asked for before any evidence: call observe() first")
        share_R, steps = budgets_R.double() / budgets_R.double().sum(), len(levels) - 1
        self.check(names, budgets_R, steps)
        if self.time is not None:
            time_K = torch.tensor(self.time, dtype=torch.float64)
        else:
            assert self.profile is not None
            time_K = mean_gain(self.profile.gains_RK, share_R)
        weight_R = share_R
        if self.objectives == "evidence":
            assert self.profile is not None
            weight_R = told_share(self.profile.monotone_RK, share_R)
        return weight_R[:, None] * (time_K / time_K.sum())

    def state_dict(self) -> Mapping[str, Any]:
        """The evidence and the estimator's state."""
        return self.measured.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts `state_dict` back; see `ReCAST.load_state_dict`."""
        self.measured.load_state_dict(state)
        self.profile = self.measured.profile


def mean_gain(gains_RK: Tensor, share_R: Tensor) -> Tensor:
    """Σ_m λ_m · Δ_mj / Σ_j Δ_mj, with 1/K for a reward without gains: K, sum 1.

    >>> mean_gain(torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([0.5, 0.5])).tolist()
    [0.375, 0.625]
    """
    total_R1 = gains_RK.sum(1, keepdim=True)
    relative_RK = torch.where(total_R1 > 0, gains_RK / total_R1.clamp_min(1e-300), 1 / gains_RK.shape[1])
    return share_R @ relative_RK


def told_share(divergence_RK: Tensor, share_R: Tensor) -> Tensor:
    """λ_m · mean_j D_m(t_j) over its sum; λ itself where all divergences are 0: R, sum 1.

    >>> told_share(torch.tensor([[0.5, 1.0], [0.0, 0.5]]), torch.tensor([0.5, 0.5])).tolist()
    [0.75, 0.25]
    """
    told_R = share_R * divergence_RK.mean(1)
    return told_R / told_R.sum() if told_R.sum() > 0 else share_R
