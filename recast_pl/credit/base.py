"""What every credit strategy is: budgets and noise levels (and evidence) to K·W.

Column order is the scheduler's, here and wherever a W is shown or saved: column 0 is the first denoising step,
from pure noise; column j is used when training at the step's source level t_j, and holds the gain from t_j to
t_{j+1}. (The tables of ReCAST's released code are stored the other way round.)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from recast_pl.credit.probe import Probe
from recast_pl.credit.profile import Profile
from recast_pl.types import UpdatePart, Weights


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

    def weights(self, names: Sequence[str], budgets_R: Tensor, levels: Tensor) -> Weights:
        """K·W as training uses it, with the names and levels that it belongs to."""
        table_RK = self.table(names, budgets_R.double(), levels)
        return Weights(names=tuple(names), levels=levels, values_RK=table_RK * table_RK.shape[1])

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

    def weights(self, names: Sequence[str], budgets_R: Tensor, levels: Tensor) -> Weights:
        """K·W = λ/Σλ itself, without the rounding of a division and a multiplication by K."""
        rows = budgets_R.double() / budgets_R.double().sum()
        values_RK = rows[:, None].expand(-1, len(levels) - 1).clone()
        return Weights(names=tuple(names), levels=levels, values_RK=values_RK)
