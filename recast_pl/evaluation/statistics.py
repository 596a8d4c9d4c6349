"""Mean, spread and failures of scores over an evaluation, over all processes."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric


class ScoreStatistics(Metric):
    """Collects scores; failed ones (NaN) are left out of mean and spread and counted.

    Args:
        names: of the R rewards.
    """

    values: list[Tensor]
    full_state_update = False

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.add_state("values", default=[], dist_reduce_fx="cat")

    def update(self, values_RB: Tensor) -> None:
        """Adds the scores of B samples."""
        self.values.append(values_RB.T.contiguous())

    def compute(self) -> dict[str, float]:
        """`<name>`, `<name>/spread` (population) and `<name>/masked` of each reward."""
        values_NR = (torch.cat(list(self.values)) if isinstance(self.values, list) else self.values).double()
        result = {}
        for column, name in enumerate(self.names):
            valid = values_NR[:, column].isfinite()
            good = values_NR[valid, column]
            result[name] = good.mean().item()
            result[f"{name}/spread"] = good.std(correction=0).item()
            result[f"{name}/masked"] = float((~valid).sum())
        return result
