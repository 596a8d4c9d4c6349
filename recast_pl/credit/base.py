"""What every credit strategy is: budgets and noise levels (and evidence) to W.

Column order is the scheduler's, here and wherever a W is shown or saved: column 0 is the first denoising step,
from pure noise; column j is used when training at the step's source level t_j, and holds the gain from t_j to
t_{j+1}. (The tables of ReCAST's released code are stored the other way round.)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recast_pl.credit.probe import Probe
from recast_pl.credit.profile import Profile
from recast_pl.rollout.base import RolloutSampler
from recast_pl.shapes import check_shapes
from recast_pl.types import UpdatePart, Weights

EVEN = 1e-9  # relative; columns that are equal but for rounding are left as they are


class CreditStrategy(ABC):
    """Says how much each reward's advantage counts at each denoising step."""

    needs_evidence: bool = False
    """Whether `observe` wants clean samples and their scores before each recomputation."""

    needs_updates: bool = False
    """Whether `watch` wants to see the policy update."""

    profile: Profile | None = None
    """The latest discriminability profile, for strategies that measure one."""

    @property
    def ready(self) -> bool:
        """Whether `table` can be asked for as things stand."""
        return not self.needs_evidence

    def follow(self, sampler: RolloutSampler) -> None:  # noqa: B027 - most follow nothing
        """Sees how the run rolls out, once and before `check`."""

    def check(self, names: Sequence[str], budgets_R: Tensor, steps: int) -> None:  # noqa: B027 - most go with all
        """Refuses rewards, budgets and K = `steps` that it does not go with, before any weight is loaded.

        Raises:
            ValueError: naming the key and what would do.
        """

    @abstractmethod
    def table(self, names: Sequence[str], budgets_R: Tensor, levels: Tensor) -> Tensor:
        """W [R, K], float64, at least 0, sum 1; rows sum to λ_r / Σλ, unless an option says otherwise.

        Columns sum to 1 / K for column-balanced strategies (`Uniform`, `ReCAST`).

        Args:
            names: of the rewards.
            budgets_R: λ, at least 0; a reward of budget 0 has a row of zeros.
            levels: K + 1 noise levels, from 1 down to 0.
        """

    def weights(
        self, names: Sequence[str], budgets_R: Tensor, levels: Tensor, trained_K: Tensor | None = None
    ) -> Weights:
        """W as training uses it: the rewards' shares of each step, and how much the step counts.

        Args:
            names: of the rewards.
            budgets_R: λ, at least 0.
            levels: K + 1 noise levels, from 1 down to 0.
            trained_K: bool, which steps are trained at all; None: all.

        Raises:
            ValueError: where the table is not R × K, or leaves nothing to the steps that are trained.
        """
        budgets_R = budgets_R.double()
        table_RK = self.table(names, budgets_R, levels)
        if table_RK.shape != (len(names), len(levels) - 1):
            raise ValueError(
                f"W of the shape {tuple(table_RK.shape)} by {type(self).__name__} does not fit {len(names)} × "
                f"{len(levels) - 1} (rewards × steps) and the rewards {', '.join(names)}"
            )
        shares_RK, step_weights_K = shares_and_step_weights(table_RK, budgets_R, trained_K)
        made_RK = table_RK * table_RK.shape[1]
        return Weights.of_table(tuple(names), levels, shares_RK, step_weights_K, made_RK=made_RK)

    def observe(self, probe: Probe) -> None:  # noqa: B027 - most strategies look at nothing
        """Takes in evidence, before a recomputation."""

    def watch(self, part: UpdatePart) -> None:  # noqa: B027
        """Sees N (sample, step) pairs of the policy update; changes nothing in it."""

    def learn(self, total: Callable[[Tensor], Tensor]) -> None:  # noqa: B027
        """After an iteration's update, once on every process; `total` sums a tensor over processes."""

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint must hold: plain types and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Puts `state_dict` back."""


class Uniform(CreditStrategy):
    """W = λ/Σλ ⊗ 1/K: every reward counts by its budget at every step. The plain multi-reward method."""

    def table(self, names: Sequence[str], budgets_R: Tensor, levels: Tensor) -> Tensor:
        """See the class.

        >>> import torch
        >>> Uniform().table(("a", "b"), torch.tensor([3.0, 1.0]), torch.tensor([1.0, 0.5, 0.0])).tolist()
        [[0.375, 0.375], [0.125, 0.125]]
        """
        steps = len(levels) - 1
        rows = budgets_R.double() / budgets_R.double().sum()
        return (rows / steps)[:, None].expand(-1, steps).clone()

    def weights(
        self, names: Sequence[str], budgets_R: Tensor, levels: Tensor, trained_K: Tensor | None = None
    ) -> Weights:
        """λ/Σλ itself, without the rounding of a division and a multiplication by K."""
        rows = budgets_R.double() / budgets_R.double().sum()
        shares_RK = rows[:, None].expand(-1, len(levels) - 1).clone()
        trained_K = torch.ones(len(levels) - 1, dtype=torch.bool) if trained_K is None else trained_K
        return Weights.of_table(tuple(names), levels, shares_RK, trained_K.double(), made_RK=shares_RK)


def shares_and_step_weights(
    table_RK: Tensor, budgets_R: Tensor, trained_K: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """W taken apart: who shares a step [R, K] (columns sum to 1), and how much the step counts [K].

    A step's weight is its column's sum, over the mean of the trained steps' sums; a step that is not trained
    has none, so that no weight is lost on it. A column of zeros is shared by the budgets.

    Args:
        table_RK: W, at least 0.
        budgets_R: λ, at least 0.
        trained_K: bool; None: all are trained.

    Raises:
        ValueError: where the columns of all trained steps are zeros.

    >>> shares, steps = shares_and_step_weights(torch.tensor([[0.3, 0.2], [0.3, 0.2]]), torch.ones(2))
    >>> shares.tolist(), [round(weight, 6) for weight in steps.tolist()]
    ([[0.5, 0.5], [0.5, 0.5]], [1.2, 0.8])
    """
    check_shapes(table_RK=table_RK, budgets_R=budgets_R, trained_K=trained_K)
    column_K, steps = table_RK.sum(0), table_RK.shape[1]
    trained_K = torch.ones(steps, dtype=torch.bool) if trained_K is None else trained_K
    if torch.allclose(column_K, column_K.mean(), rtol=EVEN, atol=0.0):  # as transport leaves them: no division
        return table_RK * steps, trained_K.to(table_RK)
    given_R = (budgets_R / budgets_R.sum()).to(table_RK)
    shares_RK = torch.where(column_K > 0, table_RK / column_K.clamp_min(1e-300), given_R[:, None])
    mean = column_K[trained_K].mean()
    if not mean > 0:
        raise ValueError(
            "credit.strategy: W gives nothing to any of the steps that are trained (model.min_noise_level, and "
            f"the stochastic steps of model.rollout): these are {trained_K.nonzero().flatten().tolist()}, "
            f"and W counts {(column_K > 0).nonzero().flatten().tolist()}"
        )
    return shares_RK, torch.where(trained_K, column_K / mean, 0.0)
