"""What an estimator found, and its average over recomputations.

Each reward and noise level has evidence of its own, so that a reward whose scores are masked, or a level that
was not trained, keeps what was known of it.

Shape suffixes: R rewards, K denoising steps (column j belongs to the step's destination t_{j+1}).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recast_pl.credit.mathematics.moments import Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Estimates of E[g^α], their standard errors, what they rest on, and what they cost.

    Where nothing is known (no samples) the moment is 1 and its error infinite.
    """

    names: tuple[str, ...]  # R
    levels: Tensor  # K + 1
    moments_RK: Tensor  # float64
    errors_RK: Tensor  # float64
    samples_RK: Tensor  # float64; valid samples, older ones discounted
    units_RK: Tensor  # float64; independent groups or samples behind the errors, likewise
    reward_calls: int  # pictures scored, by all rewards together
    seconds: float

    def __post_init__(self) -> None:
        known_RK = self.samples_RK > 0
        for row, name in enumerate(self.names):
            known = known_RK[row]
            if not (self.moments_RK[row].isfinite().all() and self.errors_RK[row][known].isfinite().all()):
                raise ValueError(f"the evidence on the reward {name!r} is not finite")

    @classmethod
    def of(
        cls,
        moments: Sequence[Sequence[Moment]],
        *,
        names: tuple[str, ...],
        levels: Tensor,
        reward_calls: int,
        seconds: float,
    ) -> "Evidence":
        """Evidence from R × K moments."""

        def table(field: str) -> Tensor:
            return torch.tensor([[getattr(m, field) for m in row] for row in moments], dtype=torch.float64)

        return cls(
            names=names,
            levels=levels,
            moments_RK=table("value"),
            errors_RK=table("error"),
            samples_RK=table("samples"),
            units_RK=table("units"),
            reward_calls=reward_calls,
            seconds=seconds,
        )

    def about(self, names: tuple[str, ...]) -> "Evidence":
        """The rows of these rewards, in this order; a reward's row says nothing of the others.

        Raises:
            ValueError: where it has none of a reward; names what there is.
        """
        lacking = [name for name in names if name not in self.names]
        if lacking:
            raise ValueError(f"no evidence on {', '.join(lacking)}; it is of {', '.join(self.names)}")
        rows = [self.names.index(name) for name in names]
        tables = ("moments_RK", "errors_RK", "samples_RK", "units_RK")
        return replace(self, names=names, **{table: getattr(self, table)[rows] for table in tables})

    def silent(self) -> tuple[str, ...]:
        """Rewards of which nothing is known at any level."""
        return tuple(name for name, row in zip(self.names, self.samples_RK, strict=True) if not (row > 0).any())


class EvidenceAverage:
    """Evidence over recomputations: a weighted mean, in which what is older counts less.

    Args:
        memory: factor on the weight of all older evidence at each new one, in [0, 1]; 1 keeps everything (for
            a policy that does not change), 0 nothing.
    """

    def __init__(self, *, memory: float) -> None:
        if not 0 <= memory <= 1:
            raise ValueError(f"credit.strategy.init_args.memory: expected a number in [0, 1], got {memory}")
        self.memory = memory
        self.latest: Evidence | None = None

    def add(self, new: Evidence) -> Evidence:
        """Takes new evidence in and returns the average, its costs added up.

        A reward and level of which the new evidence knows nothing keeps its average.

        Raises:
            ValueError: where it is of other rewards or noise levels than what is there; names both.
        """
        if self.latest is None:
            self.latest = new
            return new
        old = self.latest
        check_same(old, new.names, new.levels, what="the evidence so far")
        known_RK = new.samples_RK > 0
        memory_RK = torch.where(known_RK, self.memory, 1.0).double()
        old_weight = memory_RK * old.samples_RK
        weight = old_weight + new.samples_RK
        old_share = torch.where(weight > 0, old_weight / weight.clamp_min(1e-300), 0.0)

        def mixed(a: Tensor, b: Tensor, old_share: Tensor, new_share: Tensor) -> Tensor:
            """Shares of 0 take nothing, not even from infinity."""
            return torch.where(old_share > 0, old_share * a, 0.0) + torch.where(
                new_share > 0, new_share * b, 0.0
            )

        new_share = torch.where(known_RK, 1 - old_share, 0.0)
        variances_RK = mixed(old.errors_RK.square(), new.errors_RK.square(), old_share**2, new_share**2)
        nothing_RK = weight <= 0
        self.latest = Evidence(
            names=new.names,
            levels=new.levels,
            moments_RK=mixed(old.moments_RK, new.moments_RK, old_share, new_share).masked_fill(nothing_RK, 1.0),
            errors_RK=variances_RK.sqrt().masked_fill(nothing_RK, torch.inf),
            samples_RK=weight,
            units_RK=memory_RK * old.units_RK + new.units_RK,
            reward_calls=old.reward_calls + new.reward_calls,
            seconds=old.seconds + new.seconds,
        )
        return self.latest

    def state_dict(self) -> dict[str, Any]:
        """Plain types and tensors."""
        return {} if self.latest is None else as_state(self.latest)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts `state_dict` back."""
        self.latest = from_state(state) if state else None


def as_state(evidence: Evidence) -> dict[str, Any]:
    """Evidence as plain types and tensors."""
    fields = {name: getattr(evidence, name) for name in Evidence.__dataclass_fields__}
    return {**fields, "names": list(evidence.names)}


def from_state(state: dict[str, Any]) -> Evidence:
    """The inverse of `as_state`."""
    return Evidence(**{**state, "names": tuple(state["names"])})


def check_same(found: Any, names: tuple[str, ...], levels: Tensor, *, what: str) -> None:
    """Refuses a W, table or evidence of other rewards or another schedule.

    Raises:
        ValueError: naming both.
    """
    if tuple(found.names) != tuple(names):
        raise ValueError(
            f"{what} is of the rewards {', '.join(found.names)}, this run's are {', '.join(names)}"
        )
    check_levels(found, levels, what=what)


def check_steps(found: Any, steps: int, *, what: str) -> None:
    """Refuses a W, table or evidence of another number of steps: what can be told before the policy is loaded.

    Raises:
        ValueError: naming both.
    """
    if len(found.levels) - 1 != steps:
        raise ValueError(
            f"{what} is of {len(found.levels) - 1} denoising steps, this run's rollout has {steps} "
            "(model.rollout.init_args.num_steps)"
        )


def check_levels(found: Any, levels: Tensor, *, what: str) -> None:
    """Refuses a W, table or evidence of another schedule.

    Raises:
        ValueError: naming both.
    """
    if found.levels.shape != levels.shape or not torch.allclose(
        found.levels.double(), levels.double(), atol=1e-4
    ):
        raise ValueError(
            f"{what} is of the noise levels {[round(t, 4) for t in found.levels.tolist()]}, this run's are "
            f"{[round(t, 4) for t in levels.tolist()]} (model.rollout.init_args.num_steps and the scheduler)"
        )
