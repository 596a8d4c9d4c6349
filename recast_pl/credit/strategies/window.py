"""Window: a few neighbouring denoising steps at a time."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from recast_pl.credit.base import CreditStrategy
from recast_pl.credit.probe import Probe


class Window(CreditStrategy):
    """W = λ/Σλ ⊗ 1[a ≤ j < a + w] / w: all credit to the w steps of a window, none outside.

    The total is that of Uniform, so a learning rate keeps its meaning: inside, K·W is K/w times the budget
    shares. (An objective that clips advantages clips them after that factor: its clip is reached K/w times
    sooner.) Steps outside have advantage 0; where the objective trains on them all the same, what is left of it
    there is its pull to the old and the reference policy. Steps below `model.min_noise_level` are not trained;
    the window counts them.

    A sliding window starts at pure noise and moves towards clean by `stride` steps every `every` iterations:
    a = stride · ⌊iteration / every⌋. It moves when W is computed, so `every` is a multiple of
    `credit.every_n_steps` where moves are to be on time.

    Args:
        place: `first` (from pure noise on), `last` (up to clean), or `sliding`.
        steps: w, at least 1; null where `fraction` says it.
        fraction: w as a share of the K steps, in (0, 1], rounded, at least one step.
        every: iterations between moves.
        stride: steps of a move.
        at_end: `restart` from noise after the last place, or `stay` there.

    Reference: Li et al., "MixGRPO: Unlocking flow-based GRPO efficiency with mixed ODE-SDE", 2025 (arXiv
    2507.21802), for the sliding window and its 4 steps, 25 iterations and stride of 1. There it also says where
    the sampler is stochastic; here it weighs steps alone, for any objective. Its schedulers know both ends
    (`restart`, `stay`); which of them its runs use, short of the end, does not show: `restart` is our reading.
    """

    def __init__(
        self,
        *,
        place: Literal["first", "last", "sliding"] = "sliding",
        steps: int | None = 4,
        fraction: float | None = None,
        every: int = 25,
        stride: int = 1,
        at_end: Literal["restart", "stay"] = "restart",
    ) -> None:
        key = "credit.strategy.init_args"
        for name, choice, known in (
            ("place", place, ("first", "last", "sliding")),
            ("at_end", at_end, ("restart", "stay")),
        ):
            if choice not in known:
                raise ValueError(f"{key}.{name}: expected one of {', '.join(known)}, got {choice}")
        for name, value in (("steps", steps), ("every", every), ("stride", stride)):
            if value is not None and value < 1:
                raise ValueError(f"{key}.{name}: expected 1 or more, got {value}")
        if (steps is None) == (fraction is None):
            raise ValueError(
                f"{key}.fraction: the window is as long as steps or fraction says, one of them; got steps "
                f"{steps} and fraction {fraction}; set the other to null"
            )
        if fraction is not None and not 0 < fraction <= 1:
            raise ValueError(f"{key}.fraction: expected above 0 and at most 1, got {fraction}")
        self.place, self.steps, self.fraction = place, steps, fraction
        self.every, self.stride, self.at_end = every, stride, at_end
        self.needs_evidence = place == "sliding"  # of which only the iteration is looked at
        self.iteration: int | None = None

    @property
    def ready(self) -> bool:
        """Whether the window's place is known."""
        return self.place != "sliding" or self.iteration is not None

    def check(self, names: Sequence[str], budgets_R: Tensor, steps: int) -> None:
        """Refuses a window of more steps than there are."""
        if self.steps is not None and self.steps > steps:
            raise ValueError(
                f"credit.strategy.init_args.steps: a window of {self.steps} steps, but the rollout has {steps} "
                "(model.rollout.init_args.num_steps)"
            )

    def observe(self, probe: Probe) -> None:
        """Takes the iteration; the samples are those that the iteration trains on anyway."""
        self.iteration = probe.iteration

    def start(self, size: int, total: int) -> int:
        """The window's first step a, for w = `size` of K = `total` steps."""
        last = total - size
        if self.place != "sliding":
            return 0 if self.place == "first" else last
        if self.iteration is None:
            raise RuntimeError("a sliding Window's W is asked for before any iteration: call observe() first")
        return window_start(
            self.iteration // self.every, stride=self.stride, last=last, restart=self.at_end == "restart"
        )

    def table(self, names: Sequence[str], budgets_R: Tensor, levels: Tensor) -> Tensor:
        """See the class.

        Raises:
            ValueError: for a window of more steps than there are.
            RuntimeError: for a sliding window before any iteration.

        >>> import torch
        >>> levels = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
        >>> Window(place="first", steps=2).table(("a", "b"), torch.tensor([3.0, 1.0]), levels).tolist()
        [[0.375, 0.375, 0.0, 0.0], [0.125, 0.125, 0.0, 0.0]]
        """
        total = len(levels) - 1
        self.check(names, budgets_R, total)
        size = self.steps if self.fraction is None else max(1, round(self.fraction * total))
        assert size is not None
        start = self.start(size, total)
        share_K = torch.zeros(total, dtype=torch.float64)
        share_K[start : start + size] = 1 / size
        rows = budgets_R.double() / budgets_R.double().sum()
        return rows[:, None] * share_K

    def state_dict(self) -> Mapping[str, Any]:
        """The iteration of the latest move."""
        return {} if self.iteration is None else {"iteration": self.iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts `state_dict` back."""
        self.iteration = state.get("iteration")


def window_start(moves: int, *, stride: int, last: int, restart: bool) -> int:
    """The first step of a window after so many moves; `last` is where it reaches clean, which no move skips.

    >>> [window_start(moves, stride=2, last=3, restart=True) for moves in range(5)]
    [0, 2, 3, 0, 2]
    >>> [window_start(moves, stride=2, last=3, restart=False) for moves in range(5)]
    [0, 2, 3, 3, 3]
    """
    places = -(-last // stride) + 1
    return min((moves % places if restart else moves) * stride, last)
