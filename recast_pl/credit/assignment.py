"""W as the training step reads it: made by a strategy where it is due, and kept until then."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recast_pl.credit.base import CreditStrategy, Uniform
from recast_pl.credit.evidence import check_same
from recast_pl.credit.probe import Probe
from recast_pl.credit.weights_record import weights_from_record, weights_record
from recast_pl.types import Experience, UpdateObserver, Weights


class Credit:
    """Stands between rewards and advantages: `weights = credit(experience)`.

    Args:
        strategy: turns budgets and noise levels (and evidence) into W; None: Uniform.
    """

    def __init__(self, strategy: CreditStrategy | None = None) -> None:
        self.strategy = strategy or Uniform()
        self.due = True  # whether W is made anew before it is used next
        self.history: list[tuple[int, Tensor]] = []  # iteration and K·W of each time that it was
        self.observer: UpdateObserver | None = self.strategy if self.strategy.needs_updates else None
        self._weights: Weights | None = None
        self._probe: Callable[[Experience], Probe] | None = None

    def prepare(
        self,
        *,
        names: tuple[str, ...],
        budgets_R: Tensor,
        levels: Tensor,
        trained_K: Tensor,
        probe: Callable[[Experience], Probe],
    ) -> None:
        """Says what W is of.

        Args:
            names: of the rewards.
            budgets_R: λ, at least 0.
            levels: K + 1 noise levels: of the rollout's usual schedule, and so of W's columns.
            trained_K: bool, which of the K steps are trained.
            probe: what an estimator may do with an iteration's samples.
        """
        self.names, self.budgets_R, self.levels, self.trained_K = names, budgets_R, levels, trained_K
        self._probe = probe

    def __call__(self, experience: Experience) -> Weights:
        """W for the advantages of these samples; looks at them first where it is due and the strategy asks."""
        if self.due or self._weights is None:
            assert self._probe is not None, "Credit.prepare comes before the first iteration"
            if self.strategy.needs_evidence:
                self.strategy.observe(self._probe(experience))
            self._weights = self._made()
            self.history.append((experience.rollout.batch.iteration, self._weights.values_RK))
            self.due = False
        return self._weights

    @property
    def known(self) -> bool:
        """Whether W has been made."""
        return self._weights is not None

    @property
    def weights(self) -> Weights:
        """The latest W.

        Raises:
            RuntimeError: before the first iteration.
        """
        if self._weights is None:
            raise RuntimeError("W is asked for before the first iteration has made it")
        return self._weights

    def _made(self) -> Weights:
        return self.strategy.weights(self.names, self.budgets_R, self.levels, self.trained_K)

    def state_dict(self) -> dict[str, Any]:
        """W with the rewards, budgets and levels that it belongs to, its history, and the strategy's state."""
        if self._weights is None:
            return {}
        return {
            **weights_record(self._weights),
            "budgets": self.budgets_R,
            "history": [[iteration, values_RK] for iteration, values_RK in self.history],
            "strategy": type(self.strategy).__name__,
            "state": dict(self.strategy.state_dict()),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """The saved state, if it is of these rewards and these noise levels; W follows from it.

        W is made again from the restored evidence, so budgets or temperatures that have changed count at once.
        A run that goes on with another strategy takes nothing and makes its own. Comes after `prepare`.

        Raises:
            ValueError: for a state of other rewards or noise levels; names both.
        """
        weights = weights_from_record(saved)
        check_same(weights, self.names, self.levels, what="the checkpoint's W")
        if saved["strategy"] != type(self.strategy).__name__:
            return
        self.strategy.load_state_dict(saved["state"])
        self.history = [(int(iteration), values_RK) for iteration, values_RK in saved["history"]]
        if self.strategy.ready:
            self._weights, self.due = self._made(), False
        elif torch.equal(saved["budgets"], self.budgets_R):
            self._weights, self.due = weights, False
