"""Where a rollout's stochastic steps lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from recast_pl.noise import Purpose, keyed_generator


@dataclass(frozen=True, kw_only=True)
class StochasticWindow:
    """`length` consecutive steps are stochastic, all others follow the ODE.

    Args:
        length: stochastic steps of each sample, at least 1.
        first: the first step that a window may hold; step 0 starts from pure noise.
        last: the step that no window reaches any more; None: the rollout's last one, which is always
            deterministic.
        placement: `fixed`: the window begins at `first`. `keyed`: each group of an iteration has its own, drawn
            evenly from all that fit. `sliding`: all samples share one, which moves on with the iterations from
            `first`, and begins anew after the last that fits.
        every: iterations that a sliding window stays at its place.
        stride: steps that it then moves by.

    Reference: sliding: Li et al., "MixGRPO: Unlocking flow-based GRPO efficiency with mixed ODE-SDE", 2025
    (arXiv 2507.21802). Keyed: Flow-GRPO-Fast, in the code of Liu et al., "Flow-GRPO", 2025 (arXiv 2505.05470),
    where each call of the pipeline draws one place; here each group does.
    """

    length: int
    first: int = 0
    last: int | None = None
    placement: Literal["fixed", "keyed", "sliding"] = "fixed"
    every: int = 1
    stride: int = 1

    def __post_init__(self) -> None:
        key = "model.rollout.init_args.window"
        for name, value, low in (
            ("length", self.length, 1),
            ("first", self.first, 0),
            ("every", self.every, 1),
            ("stride", self.stride, 1),
        ):
            if value < low:
                raise ValueError(f"{key}.{name}: expected {low} or more, got {value}")
        if self.placement not in ("fixed", "keyed", "sliding"):
            raise ValueError(f"{key}.placement: expected 'fixed', 'keyed' or 'sliding', got {self.placement!r}")

    def within(self, num_steps: int) -> range:
        """The steps that a window of a rollout of `num_steps` may hold.

        Raises:
            ValueError: naming the key, where no window fits.

        >>> StochasticWindow(length=3, placement="keyed").within(10)
        range(0, 9)
        """
        key, end = "model.rollout.init_args.window", num_steps - 1
        last = end if self.last is None else self.last
        if last > end:
            raise ValueError(
                f"{key}.last: expected at most {end}, got {last}: the last of num_steps {num_steps} steps is "
                "always deterministic"
            )
        if self.first + self.length > last:
            raise ValueError(
                f"{key}: length {self.length} from step {self.first} does not fit before step {last}; take "
                f"length {max(last - self.first, 1)} or less, or more steps (model.rollout.init_args.num_steps)"
            )
        return range(self.first, last)

    def starts(self, groups: Sequence[int], *, num_steps: int, seed: int, iteration: int) -> list[int]:
        """The first stochastic step of samples of these groups.

        >>> window = StochasticWindow(length=2, placement="sliding", every=3)
        >>> [window.starts([7], num_steps=5, seed=0, iteration=i) for i in (0, 2, 3, 6, 9)]
        [[0], [0], [1], [2], [0]]
        """
        places = len(self.within(num_steps)) - self.length + 1
        if self.placement == "fixed":
            return [self.first] * len(groups)
        if self.placement == "sliding":
            return [self.first + iteration // self.every * self.stride % places] * len(groups)
        drawn = {
            group: int(
                torch.randint(places, (), generator=keyed_generator(seed, iteration, group, -1, Purpose.WINDOW))
            )
            for group in set(groups)
        }
        return [self.first + drawn[group] for group in groups]
