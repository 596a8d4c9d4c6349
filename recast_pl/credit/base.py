"""What every credit strategy is: budgets and noise levels (and evidence) to K·W.

Column order is the scheduler's, here and wherever a W is shown or saved: column 0 is the first denoising step,
from pure noise; column j is used when training at the step's source level t_j. (The tables of ReCAST's
released code are stored the other way round.)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from recast_pl.types import Weights


class CreditStrategy(ABC):
    """Says how much each reward's advantage counts at each denoising step."""

    @abstractmethod
    def table(self, budgets_R: Tensor, levels: Tensor) -> Tensor:
        """W [R, K], float64: rows sum to λ_r / Σλ; most strategies have columns that sum to 1 / K.

        Args:
            budgets_R: λ, at least 0; a reward of budget 0 has a row of zeros.
            levels: K + 1 noise levels, from 1 down to 0.
        """

    def weights(self, names: Sequence[str], budgets_R: Tensor, levels: Tensor) -> Weights:
        """K·W as training uses it, with the names and levels that it belongs to."""
        table_RK = self.table(budgets_R.double(), levels)
        return Weights(names=tuple(names), levels=levels, values_RK=table_RK * table_RK.shape[1])


class Uniform(CreditStrategy):
    """W = λ/Σλ ⊗ 1/K: every reward counts by its budget at every step. The plain multi-reward method."""

    def table(self, budgets_R: Tensor, levels: Tensor) -> Tensor:
        """See the class.

        >>> import torch
        >>> Uniform().table(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 0.5, 0.0])).tolist()
        [[0.375, 0.375], [0.125, 0.125]]
        """
        steps = len(levels) - 1
        rows = budgets_R.double() / budgets_R.double().sum()
        return (rows / steps)[:, None].expand(-1, steps).clone()
