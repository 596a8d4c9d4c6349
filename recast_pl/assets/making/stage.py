"""A resumable training stage: state saved atomically every few minutes, a line of progress, then done."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm


class Stage:
    """Runs `update(step)` for `steps` steps, resumable from the state in `folder`.

    Args:
        name: names the state's file and the progress bar.
        folder: where the state is kept.
        steps: updates in all.
        modules: everything with a `state_dict` that the updates change (models, averages, optimiser).
        save_every: seconds between saved states.
    """

    def __init__(
        self,
        *,
        name: str,
        folder: Path,
        steps: int,
        modules: Mapping[str, Any],
        save_every: float = 120.0,
    ) -> None:
        self.name, self.steps, self.modules, self.save_every = name, steps, dict(modules), save_every
        self.path = folder / f"{name}.pt"
        self.seconds = 0.0

    @property
    def step(self) -> int:
        """Updates done so far, as saved."""
        return int(torch.load(self.path, weights_only=True)["step"]) if self.path.exists() else 0

    @property
    def done(self) -> bool:
        """Whether nothing is left to run."""
        return self.step >= self.steps

    def run(self, update: Callable[[int], Mapping[str, float]]) -> None:
        """Runs what is left of the stage."""
        start = self._load()
        began = saved = time.monotonic()
        spent = self.seconds
        smooth: dict[str, float] = {}
        bar = tqdm(range(start, self.steps), initial=start, total=self.steps, desc=self.name, mininterval=10)
        for step in bar:
            for key, value in update(step).items():
                smooth[key] = 0.98 * smooth.get(key, value) + 0.02 * value
            if step % 50 == 0:
                bar.set_postfix({key: f"{value:.4f}" for key, value in smooth.items()})
            self.seconds = spent + time.monotonic() - began
            if time.monotonic() - saved > self.save_every or step + 1 == self.steps:
                self._save(step + 1)
                saved = time.monotonic()

    def _save(self, step: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state = {key: module.state_dict() for key, module in self.modules.items()}
        part = self.path.with_suffix(".part")
        torch.save({"step": step, "seconds": self.seconds, "modules": state}, part)
        os.replace(part, self.path)

    def _load(self) -> int:
        if not self.path.exists():
            return 0
        saved = torch.load(self.path, weights_only=True)
        for key, module in self.modules.items():
            module.load_state_dict(saved["modules"][key])
        self.seconds = float(saved["seconds"])
        return int(saved["step"])


class Average(nn.Module):
    """An exponential moving average of `model`'s parameters, kept as tensors of its own."""

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.values = nn.ParameterList(
            nn.Parameter(p.detach().clone(), requires_grad=False) for p in model.parameters()
        )

    @torch.no_grad()
    def update(self, model: nn.Module, *, step: int) -> None:
        """Moves the average towards `model`; early on with the shorter memory (1 + step) / (10 + step)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_([p.data for p in self.values], [p.data for p in model.parameters()], 1 - decay)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Writes the average into `model`."""
        for parameter, value in zip(model.parameters(), self.values, strict=True):
            parameter.copy_(value)


def warm_up_then_decay(step: int, *, steps: int, warm_up: int, peak: float) -> float:
    """The learning rate at `step`: linear up over `warm_up`, then linear down to a hundredth of the peak."""
    rising = min(1.0, (step + 1) / warm_up)
    falling = max(0.01, 1 - max(0, step - warm_up) / max(1, steps - warm_up))
    return peak * rising * falling


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of every parameter group."""
    for group in optimiser.param_groups:
        group["lr"] = rate


def batches(count: int, *, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless shuffled index batches; epoch e's order depends on (seed, e)."""
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
        order = torch.randperm(count, generator=generator)
        yield from order[: count - count % batch_size].split(batch_size)
        epoch += 1
