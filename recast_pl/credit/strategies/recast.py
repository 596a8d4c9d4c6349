"""ReCAST: within the budgets, every reward counts where it comes to be told."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from recast_pl.credit.base import CreditStrategy
from recast_pl.credit.estimators import Preview, ProfileEstimator
from recast_pl.credit.evidence import EvidenceAverage
from recast_pl.credit.mathematics.moments import Normalisation
from recast_pl.credit.mathematics.transport import transport_weights
from recast_pl.credit.probe import Probe
from recast_pl.credit.profile import Profile, profile_of
from recast_pl.types import UpdatePart


class ReCAST(CreditStrategy):
    """W follows each reward's gain in Rényi discriminability, with budgets as rows and equal columns.

    A reward whose profile cannot be told from noise has the even row λ/(KΣλ), with a warning, and the others
    share what it leaves of each column.

    Args:
        alpha: Rényi order, above 1.
        temperature: τ of the kernel exp(gain / mean gain / τ); one for all, or by reward. Large: even rows.
        estimator: measures the profiles; None: Preview.
        normalisation: what makes a reward a density ratio; see `recast_pl.credit.mathematics.moments`.
        clip: advantage scale A of the `optimality` ratio ρ = 1 + z / A; what the objective clips at
            (`advantage_clip`), unless you have a reason.
        samples: of an iteration and process, how many are looked at (a multiple of the group size keeps groups
            whole); None: all.
        memory: factor on the weight of older evidence at each recomputation, in [0, 1].
        shrink: move gains towards even ones by their noise.

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
        self._told: set[str] = set()  # undetected rewards that the user has been told of
        self.estimator.check(self)

    def check(self, names: Sequence[str], budgets_R: Tensor, steps: int) -> None:
        """Refuses temperatures of other rewards, and what the estimator cannot measure."""
        self.estimator.check_run(names, steps)
        if isinstance(self.temperature, dict) and set(self.temperature) != set(names):
            raise ValueError(
                f"credit.strategy.init_args.temperature: names {', '.join(self.temperature)}, but the rewards "
                f"are {', '.join(names)}"
            )

    @property
    def ready(self) -> bool:
        """Whether there is evidence."""
        return self.profile is not None

    @property
    def needs_updates(self) -> bool:  # type: ignore[override]
        """Whether the estimator learns from the policy update."""
        return type(self.estimator).watch is not ProfileEstimator.watch

    def watch(self, part: UpdatePart) -> None:
        """Hands the update to the estimator."""
        self.estimator.watch(part)

    def learn(self, total: Callable[[Tensor], Tensor]) -> None:
        """Lets the estimator learn."""
        self.estimator.learn(total)

    def observe(self, probe: Probe) -> None:
        """Measures, and averages with what was measured before."""
        probe = probe if self.samples is None else probe.first(self.samples)
        measured = self.estimator.measure(probe, self)
        if self.estimator.repeats:  # the same evidence again is no more evidence
            self.average.latest = None
        evidence = self.average.add(measured)
        self.profile = profile_of(evidence, alpha=self.alpha, shrink=self.shrink)
        if masked := _masked(probe):
            rank_zero_warn(
                f"all scores of {', '.join(masked)} are masked in the samples that credit looked at; W keeps "
                "to what was known before, or to an even row"
            )
        silent, undetected = set(evidence.silent()), set(self.profile.undetected)
        if undetected - self._told and not undetected <= silent:
            samples = int(probe.experience.scores.values_RB.shape[1])
            rank_zero_warn(
                f"the profile of {', '.join(self.profile.undetected)} cannot be told from noise with {samples} "
                "samples a time; it counts as even until it can (more samples, a larger "
                "credit.strategy.init_args.memory, or a smaller credit.every_n_steps)"
            )
            self._told = undetected

    def table(self, names: Sequence[str], budgets_R: Tensor, levels: Tensor) -> Tensor:
        """The transport projection of the latest gains; see `transport_weights`.

        Raises:
            RuntimeError: before any evidence.
            ValueError: where `temperature` names other rewards.
        """
        if self.profile is None:
            raise RuntimeError("ReCAST's W is asked for before any evidence: call observe() first")
        self.check(names, budgets_R, len(levels) - 1)
        share_R, steps = budgets_R.double() / budgets_R.double().sum(), len(levels) - 1
        table_RK = (share_R / steps)[:, None].expand(-1, steps).clone()
        follows_R = self.profile.detected_R & (share_R > 0)
        if follows_R.any():
            table_RK[follows_R] = share_R[follows_R].sum() * transport_weights(
                self.profile.gains_RK[follows_R],
                share_R[follows_R],
                self._temperatures(names)[follows_R],
                names=[name for name, follows in zip(names, follows_R.tolist(), strict=True) if follows],
            )
        return table_RK

    def _temperatures(self, names: Sequence[str]) -> Tensor:
        if isinstance(self.temperature, dict):
            return torch.tensor([self.temperature[name] for name in names], dtype=torch.float64)
        return torch.full((len(names),), float(self.temperature), dtype=torch.float64)

    # ------------------------------------------------------------------ checkpoints

    @property
    def _divergence(self) -> dict[str, Any]:
        """What evidence is evidence of."""
        return {"alpha": self.alpha, "normalisation": self.normalisation, "clip": self.clip}

    def state_dict(self) -> Mapping[str, Any]:
        """The evidence so far, what it is of, and the estimator's own state."""
        return {
            **self._divergence,
            "estimator": type(self.estimator).__name__,
            "evidence": self.average.state_dict(),
            "estimator_state": dict(self.estimator.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts `state_dict` back. Another estimator starts its evidence anew, with a warning.

        Raises:
            ValueError: for evidence of another divergence; names both.
        """
        for key, value in self._divergence.items():
            if state[key] != value:
                raise ValueError(
                    f"the checkpoint's evidence is of {key} {state[key]}, this run's is {value} "
                    f"(credit.strategy.init_args.{key})"
                )
        if state["estimator"] != type(self.estimator).__name__:
            rank_zero_warn(
                f"the checkpoint's evidence is of {state['estimator']}, this run's estimator is "
                f"{type(self.estimator).__name__}: credit starts its evidence anew"
            )
            return
        self.average.load_state_dict(state["evidence"])
        self.estimator.load_state_dict(state["estimator_state"])
        if self.average.latest is not None:
            self.profile = profile_of(self.average.latest, alpha=self.alpha, shrink=self.shrink)


def _masked(probe: Probe) -> list[str]:
    scores = probe.experience.scores
    return [name for name, valid in zip(scores.names, scores.valid_RB, strict=True) if not valid.any()]
