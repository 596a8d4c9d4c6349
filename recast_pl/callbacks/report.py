"""The rewards on held-out prompts before and after training, as a table at the end of `fit`."""

from collections.abc import Mapping, Sequence

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from recast_pl.module import ReCASTModule


class EvaluationReport(pl.Callback):
    """Prints the first and the last evaluation of a run side by side."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints the table, where there are two evaluations to compare."""
        assert isinstance(pl_module, ReCASTModule)
        if len(pl_module.evaluations) > 1:
            (first, before), (last, after) = pl_module.evaluations[0], pl_module.evaluations[-1]
            table = comparison(pl_module.rewards.names, before, after, first=first, last=last)
            rank_zero_info(table)


def comparison(
    names: Sequence[str],
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    first: int,
    last: int,
) -> str:
    """A table of means before and after, and their change in units of the spread before.

    Rewards that were not there at first (a later stage may add some) have nothing to be compared with.
    """
    names = [name for name in names if f"val/{name}" in before]
    width = max(len(name) for name in (*names, "mean of rewards"))
    lines = [
        f"\nHeld-out prompts, same noises: iteration {first} → {last}",
        f"{'reward':{width}} {'before':>9} {'after':>9} {'spread':>9} {'change / spread':>16}",
    ]
    changes = []
    for name in names:
        old, new, spread = before[f"val/{name}"], after[f"val/{name}"], before[f"val/{name}/spread"]
        changes.append((new - old) / spread if spread > 0 else float("nan"))
        lines.append(f"{name:{width}} {old:9.4f} {new:9.4f} {spread:9.4f} {changes[-1]:+16.2f}")
    mean = sum(changes) / len(changes)
    lines.append(f"{'mean of rewards':{width}} {'':>9} {'':>9} {'':>9} {mean:+16.2f}")
    return "\n".join(lines)
