"""The RewardSuite: batches reward evaluations, and keeps failures apart from scores.

Shape suffixes: R rewards, B samples.
"""

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from recast_pl.rewards.base import Reward
from recast_pl.rewards.suite.failure_policy import GuardedReward, OnFailure, RewardOptions
from recast_pl.rewards.suite.worker_thread import Call
from recast_pl.types import Prompt, Scores


class RewardSuite:
    """Several rewards over the same pictures, with the life cycle of a LightningDataModule.

    Args:
        rewards: by name; the names appear in logs, budgets and W.
        budgets: how much of the policy's improvement each reward may claim, relative to the others; at least
            0, and 0 means: scored and logged, without effect. None: all equal. A mapping names every reward.
        micro_batch_size: pictures that a reward sees at a time.
        on_failure: `raise` ends the run at the first failed score; `mask` leaves it out, counts and logs it.
        options: what differs for single rewards, by name; see `RewardOptions`.
        progress_bar: show a bar for scoring that takes longer than a few seconds.
    """

    def __init__(
        self,
        *,
        rewards: dict[str, Reward],
        budgets: dict[str, float] | None = None,
        micro_batch_size: int = 64,
        on_failure: OnFailure = "raise",
        options: dict[str, RewardOptions] | None = None,
        progress_bar: bool = True,
    ) -> None:
        self._refuse(rewards, micro_batch_size, options or {})
        self.rewards = dict(rewards)
        self.budgets = self._checked(budgets)
        self.progress_bar = progress_bar
        self.guarded = [
            GuardedReward(
                name,
                reward,
                (options or {}).get(name, RewardOptions()).checked(f"{self.block}.options.{name}"),
                micro_batch_size=micro_batch_size,
                on_failure=on_failure,
                block=self.block,
            )
            for name, reward in self.rewards.items()
        ]
        self._device: torch.device | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards' names, in the order of the YAML."""
        return tuple(self.rewards)

    @property
    def budgets_R(self) -> Tensor:
        """The budgets λ as given, float64."""
        return torch.tensor([self.budgets[name] for name in self.names], dtype=torch.float64)

    @property
    def seconds(self) -> dict[str, float]:
        """That each reward has taken so far."""
        return {guarded.name: guarded.seconds for guarded in self.guarded}

    def _refuse(
        self, rewards: Mapping[str, Reward], micro_batch_size: int, options: Mapping[str, RewardOptions]
    ) -> None:
        """Raises for what no suite can have."""
        if not rewards and self.needs_rewards:
            raise ValueError(f"{self.block}.rewards: expected at least one reward")
        if micro_batch_size < 1:
            raise ValueError(f"{self.block}.micro_batch_size: expected 1 or more, got {micro_batch_size}")
        if unknown := options.keys() - rewards.keys():
            raise ValueError(
                f"{self.block}.options: names {sorted(unknown)} that do not exist; the rewards are "
                f"{', '.join(rewards) or 'none'}"
            )

    block = "rewards"  # of the YAML, for messages
    needs_rewards = True

    def _checked(self, budgets: Mapping[str, float] | None) -> dict[str, float]:
        if budgets is None:
            return dict.fromkeys(self.rewards, 1.0)
        unknown, missing = budgets.keys() - self.rewards.keys(), self.rewards.keys() - budgets.keys()
        if unknown or missing:
            parts = [f"there is no reward {', '.join(sorted(unknown))}"] if unknown else []
            parts += [f"lacks {', '.join(sorted(missing))}"] if missing else []
            raise ValueError(
                f"rewards.budgets: {' and it '.join(parts)}; the rewards are {', '.join(self.rewards)}, each "
                "with a budget of 0 or more"
            )
        for name, budget in budgets.items():
            if not (budget >= 0 and math.isfinite(budget)):
                raise ValueError(f"rewards.budgets.{name}: expected a finite number of 0 or more, got {budget}")
        if not any(budgets.values()):
            raise ValueError("rewards.budgets: all are 0; at least one reward must have a budget")
        return {name: float(budgets[name]) for name in self.rewards}

    # ------------------------------------------------------------------ life cycle

    def prepare_data(self) -> None:
        """Nothing to fetch; here so that a suite can stand where a LightningDataModule does."""

    def check_prompts(self, prompts: Sequence[Prompt], *, origin: str) -> None:
        """Checks that prompts carry what rewards need.

        Raises:
            ValueError: naming the reward, the first prompt that it cannot score, and the key that is missing
                or what else is wrong.
        """
        for name, reward in self.rewards.items():
            for key in reward.required_metadata:
                for number, prompt in enumerate(prompts):
                    if key not in prompt.metadata:
                        raise ValueError(
                            f"the reward {name!r} needs the metadata {key!r}, which prompt {number} of "
                            f"{origin} lacks: {prompt.text!r}"
                        )
            for number, prompt in enumerate(prompts):
                if fault := reward.check(prompt):
                    raise ValueError(
                        f"the reward {name!r} cannot score prompt {number} of {origin}, {prompt.text!r}: "
                        f"{fault}"
                    )

    def setup(self, device: torch.device) -> None:
        """Loads every reward onto `device`; a second call for the same device does nothing."""
        if self._device != device:
            for guarded in self.guarded:
                with self.on_device(guarded, device):
                    guarded.reward.load(device)
            self._device = device

    def teardown(self) -> None:
        """Frees every reward."""
        for guarded in self.guarded:
            guarded.close()
            guarded.reward.unload()
        self._device = None

    # ------------------------------------------------------------------ scoring

    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Scores:
        """Scores all pictures by all rewards.

        Args:
            images_B3HW: pictures in [0, 1].
            prompts: B prompts; picture b was made for prompt b.

        Raises:
            RewardFailure: with `on_failure="raise"`, naming the reward and what was wrong.
        """
        scoring = self.begin(prompts)
        scoring.add(images_B3HW)
        return scoring.result()

    def begin(self, prompts: Sequence[Prompt]) -> "Scoring":
        """Scoring of pictures that are still being made, for `prompts` in their order."""
        if self._device is None:
            raise RuntimeError("RewardSuite.score before setup")
        return Scoring(self, prompts, self._device)

    @contextmanager
    def on_device(self, guarded: GuardedReward, device: torch.device) -> Generator[None, None, None]:
        """Brings a reward's networks to `device`, and back to the CPU where all who use them are offloaded."""
        _move(guarded.reward.networks(), device)
        try:
            yield
        finally:
            if guarded.options.offload:
                staying = {
                    id(network)
                    for other in self.guarded
                    if not other.options.offload
                    for network in other.reward.networks()
                }
                leaving = [network for network in guarded.reward.networks() if id(network) not in staying]
                _move(leaving, torch.device("cpu"))


class Scoring:
    """Scores of one batch, whose pictures come in parts.

    Rewards in the background start with each part; the others score when all pictures are there. Rewards with
    one micro-batch size get the same tensors, so that those which share a backbone embed a picture once.
    """

    def __init__(self, suite: RewardSuite, prompts: Sequence[Prompt], device: torch.device) -> None:
        self.suite, self.prompts, self.device = suite, prompts, device
        self._images: list[Tensor] = []
        self._jobs: dict[str, list[tuple[Call, Tensor, Sequence[Prompt]]]] = {
            guarded.name: [] for guarded in suite.guarded if guarded.options.background
        }

    def add(self, images_B3HW: Tensor) -> None:
        """The next pictures."""
        start = sum(len(part) for part in self._images)
        images = images_B3HW.detach().to(self.device, torch.float32)
        self._images.append(images)
        prompts = self.prompts[start : start + len(images)]
        if len(prompts) != len(images):
            raise ValueError(f"{start + len(images)} pictures but {len(self.prompts)} prompts")
        for guarded in self.suite.guarded:
            if guarded.options.background:
                jobs = self._jobs[guarded.name]
                for part, some in _micro_batches(images, prompts, guarded.micro_batch_size):
                    jobs.append((guarded.start(part, some), part, some))

    def result(self) -> Scores:
        """All scores, once all pictures are there.

        Raises:
            RewardFailure: see `RewardSuite.score`.
            ValueError: where pictures are missing.
        """
        images = torch.cat(self._images) if self._images else torch.empty(0, 3, 1, 1, device=self.device)
        if len(images) != len(self.prompts):
            raise ValueError(f"{len(images)} pictures but {len(self.prompts)} prompts")
        suite = self.suite
        bar: tqdm[Any] = tqdm(
            total=len(images) * len(suite.guarded),
            desc="rewards",
            leave=False,
            delay=5,
            disable=not suite.progress_bar,
        )
        with bar:
            try:
                rows = {**self._foreground(images, bar), **self._background(bar)}
            finally:
                for jobs in self._jobs.values():
                    for call, *_ in jobs:
                        call.future.cancel()
        values_RB = torch.stack([rows[name] for name in suite.names])
        return Scores(names=suite.names, values_RB=values_RB, valid_RB=values_RB.isfinite())

    def _foreground(self, images: Tensor, bar: "tqdm[Any]") -> dict[str, Tensor]:
        rows: dict[str, Tensor] = {}
        waiting = [guarded for guarded in self.suite.guarded if not guarded.options.background]
        while waiting:
            first = waiting[0]
            together = [first]
            if not first.options.offload:
                together = [
                    guarded
                    for guarded in waiting
                    if not guarded.options.offload and guarded.micro_batch_size == first.micro_batch_size
                ]
            done: dict[str, list[Tensor]] = {guarded.name: [] for guarded in together}
            for part, prompts in _micro_batches(images, self.prompts, first.micro_batch_size):
                for guarded in together:
                    with self.suite.on_device(guarded, self.device):
                        done[guarded.name].append(guarded.scores(part, prompts))
                    bar.update(len(part))
            rows |= {name: torch.cat(parts) if parts else images.new_empty(0) for name, parts in done.items()}
            waiting = [guarded for guarded in waiting if guarded not in together]
        return rows

    def _background(self, bar: "tqdm[Any]") -> dict[str, Tensor]:
        rows = {}
        for guarded in self.suite.guarded:
            if guarded.options.background:
                parts = []
                for call, part, prompts in self._jobs[guarded.name]:
                    parts.append(guarded.finished(partial(guarded.waited, call), part, prompts))
                    bar.update(len(part))
                rows[guarded.name] = torch.cat(parts) if parts else torch.empty(0, device=self.device)
        return rows


def _micro_batches(
    images: Tensor, prompts: Sequence[Prompt], size: int
) -> list[tuple[Tensor, Sequence[Prompt]]]:
    return [
        (images[start : start + size], prompts[start : start + size]) for start in range(0, len(images), size)
    ]


def _move(networks: Iterable[nn.Module], device: torch.device) -> None:
    for network in networks:
        network.to(device)
