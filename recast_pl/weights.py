"""W as training reads it: a function of the noise level, and of the sample where each has its own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from recast_pl.schedule import columns_at
from recast_pl.shapes import check_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """W as a function of the noise level: who shares a step, apart from how much the step counts.

    W_rbk = shares · step weight / K. One table for all samples (the axis B has the size 1), or one for each.
    """

    names: tuple[str, ...]  # R
    levels: Tensor  # K + 1; column j is of the steps that leave a level in (levels[j + 1], levels[j]]
    shares_RBK: Tensor  # [R, 1 or B, K], float64; the rewards' shares of a step sum to 1
    step_weights_BK: Tensor  # [1 or B, K], float64; mean 1 over the trained steps, 0 at the others
    made_RK: Tensor | None = None  # K·W as the strategy made it, steps that are not trained included

    def __post_init__(self) -> None:
        check_shapes(shares_RBK=self.shares_RBK, step_weights_BK=self.step_weights_BK)
        if self.shares_RBK.shape[::2] != (len(self.names), len(self.levels) - 1):
            raise ValueError(
                f"W's shares: expected [{len(self.names)} rewards, 1 or B, {len(self.levels) - 1} steps], got "
                f"{list(self.shares_RBK.shape)}"
            )

    @classmethod
    def of_table(
        cls,
        names: tuple[str, ...],
        levels: Tensor,
        shares_RK: Tensor,
        step_weights_K: Tensor | None = None,
        *,
        made_RK: Tensor | None = None,
    ) -> "Weights":
        """One table for all samples; no step weights: every step counts 1."""
        if step_weights_K is None:
            step_weights_K = torch.ones_like(shares_RK[0])
        return cls(
            names=names,
            levels=levels,
            shares_RBK=shares_RK[:, None],
            step_weights_BK=step_weights_K[None],
            made_RK=made_RK,
        )

    @property
    def values_RBK(self) -> Tensor:
        """K·W as training uses it: shares times step weights, [R, 1 or B, K]."""
        return self.shares_RBK * self.step_weights_BK

    @property
    def values_RK(self) -> Tensor:
        """K·W as the strategy made it, else the mean over samples of what training uses: shown and stored."""
        if self.made_RK is not None:
            return self.made_RK
        values_RBK = self.values_RBK
        return values_RBK[:, 0] if values_RBK.shape[1] == 1 else values_RBK.mean(1)

    def columns(self, t_N: Tensor) -> Tensor:
        """The columns that steps from these noise levels belong to, int64; see `schedule.columns_at`."""
        return columns_at(self.levels, t_N)

    def at(self, t_N: Tensor, row_N: Tensor) -> Tensor:
        """K·W of pairs of a noise level and a sample, [R, N]."""
        check_shapes(t_N=t_N, row_N=row_N)
        values_RBK, column_N = self.values_RBK, self.columns(t_N)
        return values_RBK[:, row_N if values_RBK.shape[1] > 1 else torch.zeros_like(row_N), column_N]
