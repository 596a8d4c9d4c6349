"""Fixed: a table that was made before."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from recast_pl.credit import npz
from recast_pl.credit.base import CreditStrategy
from recast_pl.credit.evidence import check_same, check_steps

TOLERANCE = 1e-6  # of row sums against budgets


class Fixed(CreditStrategy):
    """W from an NPZ file, as `python -m recast_pl profile` writes it.

    Args:
        path: of the file; see `recast_pl.credit.npz`. Its columns need not be equal.
    """

    def __init__(self, *, path: str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(
                f"credit.strategy.init_args.path: no file {path}; `python -m recast_pl profile --config …` "
                "writes one"
            )
        self.file = npz.read(self.path)
        if self.file.table_RK is None:
            raise ValueError(
                f"credit.strategy.init_args.path: {path} holds no `table`, only "
                f"{', '.join(self.file.ratios) or 'no'} profiles; for these take ReCAST with FromFile"
            )

    def check(self, names: Sequence[str], budgets_R: Tensor, steps: int) -> None:
        """Refuses a table of other rewards, budgets or numbers of steps; names both."""
        assert self.file.table_RK is not None
        what = f"the table in {self.path}"
        check_same(self.file, tuple(names), self.file.levels, what=what)
        check_steps(self.file, steps, what=what)
        wanted_R = budgets_R.double() / budgets_R.double().sum()
        rows_R = self.file.table_RK.sum(1)
        if (rows_R - wanted_R).abs().max() > TOLERANCE:
            raise ValueError(
                f"the table in {self.path} gives the rewards the shares {_listed(rows_R)}, rewards.budgets "
                f"asks for {_listed(wanted_R)}; set the budgets to the table's, or make a table of these"
            )

    def table(self, names: Sequence[str], budgets_R: Tensor, levels: Tensor) -> Tensor:
        """The file's table.

        Raises:
            ValueError: where it is of other rewards, noise levels or budgets; names both.
        """
        assert self.file.table_RK is not None
        self.check(names, budgets_R, len(levels) - 1)
        check_same(self.file, tuple(names), levels, what=f"the table in {self.path}")
        return self.file.table_RK.clone()


def _listed(values: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in values.tolist())
