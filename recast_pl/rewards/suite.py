"""The RewardSuite: batches reward evaluations, checks what comes back, and keeps failures apart from scores.

Shape suffixes: R rewards, B samples.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from recast_pl.rewards.base import Reward
from recast_pl.types import Prompt, Scores


class RewardFailure(RuntimeError):
    """A reward raised, or returned something that is no score."""


class RewardSuite:
    """Several rewards over the same pictures, with the life cycle of a LightningDataModule.

    Args:
        rewards: by name; the names appear in logs, budgets and W.
        budgets: how much of the policy's improvement each reward may claim, relative to the others; at least
            0, and 0 means: scored and logged, without effect. None: all equal. A mapping names every reward.
        micro_batch_size: pictures that a reward sees at a time.
        on_failure: `raise` ends the run at the first failed score; `mask` leaves it out, counts and logs it.
    """

    def __init__(
        self,
        *,
        rewards: dict[str, Reward],
        budgets: dict[str, float] | None = None,
        micro_batch_size: int = 64,
        on_failure: Literal["raise", "mask"] = "raise",
    ) -> None:
        if not rewards:
            raise ValueError("rewards.rewards: expected at least one reward")
        if micro_batch_size < 1:
            raise ValueError(f"rewards.micro_batch_size: expected 1 or more, got {micro_batch_size}")
        self.rewards = dict(rewards)
        self.budgets = self._checked(budgets)
        self.micro_batch_size, self.on_failure = micro_batch_size, on_failure
        self.seconds = dict.fromkeys(self.rewards, 0.0)  # that each reward has taken so far
        self._device: torch.device | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards' names, in the order of the YAML."""
        return tuple(self.rewards)

    @property
    def budgets_R(self) -> Tensor:
        """The budgets λ as given, float64."""
        return torch.tensor([self.budgets[name] for name in self.names], dtype=torch.float64)

    def _checked(self, budgets: Mapping[str, float] | None) -> dict[str, float]:
        if budgets is None:
            return dict.fromkeys(self.rewards, 1.0)
        unknown, missing = budgets.keys() - self.rewards.keys(), self.rewards.keys() - budgets.keys()
        if unknown or missing:
            raise ValueError(
                f"rewards.budgets: names {sorted(unknown) or 'no reward'} that do not exist and lacks "
                f"{sorted(missing) or 'none'}; the rewards are {', '.join(self.rewards)}"
            )
        for name, budget in budgets.items():
            if not (budget >= 0 and math.isfinite(budget)):
                raise ValueError(f"rewards.budgets.{name}: expected a finite number of 0 or more, got {budget}")
        if not any(budgets.values()):
            raise ValueError("rewards.budgets: all are 0; at least one reward must have a budget")
        return {name: float(budgets[name]) for name in self.rewards}

    def prepare_data(self) -> None:
        """Nothing to fetch; here so that a suite can stand where a LightningDataModule does."""

    def check_prompts(self, prompts: Sequence[Prompt], *, origin: str) -> None:
        """Checks that prompts carry the metadata that rewards need.

        Raises:
            ValueError: naming the reward, the key and the first prompt that lacks it.
        """
        for name, reward in self.rewards.items():
            for key in reward.required_metadata:
                for number, prompt in enumerate(prompts):
                    if key not in prompt.metadata:
                        raise ValueError(
                            f"the reward {name!r} needs the metadata {key!r}, which prompt {number} of "
                            f"{origin} lacks: {prompt.text!r}"
                        )

    def setup(self, device: torch.device) -> None:
        """Loads every reward onto `device`; a second call for the same device does nothing."""
        if self._device != device:
            for reward in self.rewards.values():
                reward.load(device)
            self._device = device

    def teardown(self) -> None:
        """Frees every reward."""
        for reward in self.rewards.values():
            reward.unload()
        self._device = None

    @torch.no_grad()
    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Scores:
        """Scores all pictures by all rewards.

        Args:
            images_B3HW: pictures in [0, 1].
            prompts: B prompts; picture b was made for prompt b.

        Raises:
            RewardFailure: with `on_failure="raise"`, naming the reward and what was wrong.
        """
        if self._device is None:
            raise RuntimeError("RewardSuite.score before setup")
        if len(prompts) != len(images_B3HW):
            raise ValueError(f"{len(images_B3HW)} pictures but {len(prompts)} prompts")
        images = images_B3HW.detach().to(self._device, torch.float32)
        rows = [self._scores_of(name, images, prompts) for name in self.names]
        values_RB = torch.stack(rows).to(images_B3HW.device)
        return Scores(names=self.names, values_RB=values_RB, valid_RB=values_RB.isfinite())

    def _scores_of(self, name: str, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """One reward's scores [B], NaN where they failed."""
        done, began = [], time.perf_counter()
        with torch.autocast(images.device.type, enabled=False):
            for start in range(0, len(images), self.micro_batch_size):
                rows = slice(start, start + self.micro_batch_size)
                part = images[rows]
                try:
                    scores = self._checked_scores(name, self.rewards[name].score(part, prompts[rows]), part)
                except Exception as error:
                    if self.on_failure == "raise":
                        raise RewardFailure(f"rewards.rewards.{name}: {error}") from error
                    rank_zero_warn(f"the reward {name!r} failed and is masked: {error}")
                    scores = torch.full((len(part),), torch.nan, device=images.device)
                done.append(scores)
        self.seconds[name] += time.perf_counter() - began
        return torch.cat(done) if done else images.new_empty(0)

    def _checked_scores(self, name: str, scores: Tensor, images: Tensor) -> Tensor:
        low, high = self.rewards[name].range
        scores = torch.as_tensor(scores).to(images.device, torch.float32)
        if scores.shape != (len(images),):
            raise RewardFailure(f"expected {len(images)} scores, got the shape {tuple(scores.shape)}")
        bad = ~scores.isfinite() | (scores < low) | (scores > high)
        if bad.any() and self.on_failure == "raise":
            worst = scores[bad][0].item()
            raise RewardFailure(
                f"{int(bad.sum())} of {len(scores)} scores are not finite or outside [{low}, {high}], "
                f"the first one {worst}"
            )
        return scores.masked_fill(bad, torch.nan)
