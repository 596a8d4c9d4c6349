"""ReCAST: within the budgets, every reward counts where its feedback is worth something."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from recast_pl.credit.base import CreditStrategy
from recast_pl.credit.estimators import Preview, ProfileEstimator
from recast_pl.credit.evidence import EvidenceAverage, Probe, Profile, profile_of
from recast_pl.credit.moments import Normalisation, TooFewScores
from recast_pl.credit.transport import transport_weights
from recast_pl.types import UpdatePart


class ReCAST(CreditStrategy):
    """W follows each reward's gain in Rényi discriminability, with budgets as rows and equal columns.

    Args:
        alpha: Rényi order, above 1.
        temperature: τ of the kernel exp(gain / mean gain / τ); one for all, or by reward. Large: even rows.
        estimator: measures the profiles; None: Preview.
        normalisation: what makes a reward a density ratio; see `recast_pl.credit.moments`.
        clip: advantage scale A of the `optimality` ratio ρ = 1 + z / A.
        samples: of an iteration and process, how many are looked at (a multiple of the group size keeps groups
            whole); None: all.
        memory: factor on the weight of older evidence at each recomputation, in [0, 1].
        shrink: move gains towards even ones by their noise. A reward whose profile cannot be told from noise
            gets an even row and a warning.

    Reference: "ReCAST", 2026 (arXiv 2609.13425); the estimation of profiles is this package's own.
    """

    needs_evidence = True

    def __init__(
        self,
        *,
        alpha: float = 2.0,
        temperature: float | dict[str, float] = 1.0,
        estimator: ProfileEstimator | None = None,
        normalisation: Normalisation = "optimality",
        clip: float = 5.0,
        samples: int | None = None,
        memory: float = 0.9,
        shrink: bool = True,
    ) -> None:
        if not alpha > 1:
            raise ValueError(f"credit.strategy.init_args.alpha: expected above 1, got {alpha}")
        for value in temperature.values() if isinstance(temperature, dict) else [temperature]:
            if not value > 0:
                raise ValueError(f"credit.strategy.init_args.temperature: expected above 0, got {value}")
        if not clip > 0:
            raise ValueError(f"credit.strategy.init_args.clip: expected above 0, got {clip}")
        if samples is not None and samples < 2:
            raise ValueError(f"credit.strategy.init_args.samples: expected 2 or more, got {samples}")
        self.samples = samples
        self.alpha, self.temperature, self.estimator = alpha, temperature, estimator or Preview()
        self.normalisation: Normalisation = normalisation
        self.clip, self.shrink = clip, shrink
        self.average = EvidenceAverage(memory=memory)
        self.profile: Profile | None = None
        self._undetected: set[str] = set()  # as the user has been told
        self.estimator.check(self)

    @property
    def needs_updates(self) -> bool:  # type: ignore[override]
        """Whether the estimator learns from the policy update."""
        return type(self.estimator).watch is not ProfileEstimator.watch

    def observe(self, probe: Probe) -> None:
        """Measures, and averages with what was measured before.

        Raises:
            TooFewScores: where nearly all scores are masked and there is no W yet to keep.
        """
        probe = probe if self.samples is None else probe.first(self.samples)
        try:
            measured = self.estimator.measure(probe, self)
        except TooFewScores as error:
            if self.profile is None:
                raise
            rank_zero_warn(f"W stays as it was: {error} in the evidence of this iteration")
            return
        evidence = self.average.add(measured)
        self.profile = profile_of(evidence, alpha=self.alpha, shrink=self.shrink)
        news = set(self.profile.undetected) - self._undetected
        if evidence.samples > 1:  # a value head has nothing to say at first
            self._undetected = set(self.profile.undetected)
        if news and evidence.samples > 1:
            rank_zero_warn(
                f"the profile of {', '.join(self.profile.undetected)} cannot be told from noise with "
                f"{evidence.samples} samples a time; W is even there until it can (more samples, a larger "
                "credit.strategy.init_args.memory, or a smaller credit.every_n_steps)"
            )

    def watch(self, part: UpdatePart) -> None:
        """Hands the update to the estimator."""
        self.estimator.watch(part)

    def table(self, names: Sequence[str], budgets_R: Tensor, levels: Tensor) -> Tensor:
        """The transport projection of the latest gains; see `transport_weights`.

        Raises:
            RuntimeError: before any evidence.
            ValueError: where `temperature` names other rewards.
        """
        if self.profile is None:
            raise RuntimeError("ReCAST's W is asked for before any evidence: call observe() first")
        temperatures_R = self._temperatures(names)
        return transport_weights(self.profile.gains_RK, budgets_R, temperatures_R, names=names)

    def _temperatures(self, names: Sequence[str]) -> Tensor:
        if not isinstance(self.temperature, dict):
            return torch.full((len(names),), float(self.temperature), dtype=torch.float64)
        if set(self.temperature) != set(names):
            raise ValueError(
                f"credit.strategy.init_args.temperature: names {', '.join(self.temperature)}, but the rewards "
                f"are {', '.join(names)}"
            )
        return torch.tensor([self.temperature[name] for name in names], dtype=torch.float64)

    def state_dict(self) -> Mapping[str, Any]:
        """The evidence so far, and the estimator's own state."""
        return {
            "alpha": self.alpha,
            "evidence": self.average.state_dict(),
            "estimator": dict(self.estimator.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts `state_dict` back.

        Raises:
            ValueError: for evidence of another order; names both.
        """
        if state["alpha"] != self.alpha:
            raise ValueError(
                f"the checkpoint's evidence is of order alpha {state['alpha']}, this run's is {self.alpha} "
                "(credit.strategy.init_args.alpha)"
            )
        self.average.load_state_dict(state["evidence"])
        self.estimator.load_state_dict(state["estimator"])
        if self.average.latest is not None:
            self.profile = profile_of(self.average.latest, alpha=self.alpha, shrink=self.shrink)
