"""One reward under its failure policy: what comes back is a score or NaN, or the run ends.

Shape suffixes: B samples.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, distributed

from recast_pl.rewards.base import Reward
from recast_pl.rewards.remote.http import RewardUnusable
from recast_pl.rewards.suite.worker_thread import Call, OneThread
from recast_pl.types import Prompt

OnFailure = Literal["raise", "mask"]
Attempt = Callable[[], Tensor]


class RewardFailure(RuntimeError):
    """A reward raised, took too long, or returned something that is no score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOptions:
    """How one reward is run; what is None is the suite's."""

    micro_batch_size: int | None = None  # pictures that it sees at a time
    on_failure: OnFailure | None = None  # `raise` ends the run, `mask` leaves the score out and counts it
    retries: int = 0  # further attempts after an exception or a time-out
    retry_wait: float = 1.0  # seconds before the first further attempt, doubled at each one
    timeout: float | None = None  # seconds for one micro-batch, from when the reward begins with it
    background: bool = False  # scored in a thread while the rollout goes on; for remote and CPU rewards
    offload: bool = False  # its networks wait on the CPU between uses

    def checked(self, key: str) -> "RewardOptions":
        """Refuses values out of range; `key` is where they stand in the YAML."""
        for option, low in (("micro_batch_size", 1), ("retries", 0), ("retry_wait", 0)):
            value = getattr(self, option)
            if value is not None and value < low:
                raise ValueError(f"{key}.{option}: expected {low} or more, got {value}")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"{key}.timeout: expected above 0 seconds, got {self.timeout}")
        if self.background and self.offload:
            raise ValueError(
                f"{key}: `background` scores while the rollout goes on, so its networks "
                "cannot wait on the CPU (`offload`); choose one"
            )
        return self


class GuardedReward:
    """A named reward, its options, and the one thread that may be in it.

    Args:
        name: as in the YAML.
        reward: the reward.
        options: how it is run.
        micro_batch_size: where `options` says nothing.
        on_failure: where `options` says nothing.
        block: of the YAML that it stands in, for messages.
    """

    def __init__(
        self,
        name: str,
        reward: Reward,
        options: RewardOptions,
        *,
        micro_batch_size: int,
        on_failure: OnFailure,
        block: str = "rewards",
    ) -> None:
        self.name, self.reward, self.options, self.block = name, reward, options, block
        self.micro_batch_size = options.micro_batch_size or micro_batch_size
        self.on_failure: OnFailure = options.on_failure or on_failure
        self.seconds = 0.0  # that it has taken so far
        self._thread: OneThread | None = None

    def start(self, images: Tensor, prompts: Sequence[Prompt], *, next_in_line: bool = False) -> Call:
        """Scores a micro-batch in the reward's own thread."""
        if self._thread is None:
            self._thread = OneThread(f"reward-{self.name}")
        return self._thread.submit(lambda: self._scores(images, prompts), next_in_line=next_in_line)

    def scores(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [B] of a micro-batch, NaN where masked.

        Raises:
            RewardFailure: under `raise`, naming the reward and what was wrong.
        """
        if self.options.timeout is None:
            return self.finished(lambda: self._scores(images, prompts), images, prompts)
        return self.finished(lambda: self.waited(self.start(images, prompts)), images, prompts)

    def waited(self, call: Call) -> Tensor:
        """The result of a `start`, in time.

        One earlier call at most is still in work: it has as long again before this one begins.
        """
        limit = self.options.timeout
        try:
            if not call.begun.wait(limit):
                raise TimeoutError
            return call.future.result(None if limit is None else limit + call.began - time.monotonic())
        except TimeoutError as error:
            if not call.future.done():
                call.future.cancel()
                raise RewardFailure(f"no answer within {limit:g} s") from error
            raise

    def finished(self, attempt: Attempt, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """The attempt's scores, or those of further ones, as far as the options go."""
        wait = self.options.retry_wait
        for further in range(self.options.retries, -1, -1):
            try:
                return attempt()
            except Exception as error:
                if not further or isinstance(error, RewardUnusable):
                    if self.on_failure == "raise":
                        raise RewardFailure(f"{self.block}.rewards.{self.name}: {error}") from error
                    _warn_once_for_all(f"the reward {self.name!r} failed and is masked: {error}")
                    return torch.full((len(images),), torch.nan, device=images.device)
                _warn_once_for_all(f"the reward {self.name!r} failed and is asked again: {error}")
            time.sleep(wait)
            wait, attempt = 2 * wait, lambda: self.waited(self.start(images, prompts, next_in_line=True))
        raise AssertionError("unreachable")

    @torch.no_grad()
    def _scores(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        began = time.perf_counter()
        try:
            with torch.autocast(images.device.type, enabled=False):
                return self._checked(self.reward.score(images, prompts), images)
        finally:
            self.seconds += time.perf_counter() - began

    def _checked(self, scores: Tensor, images: Tensor) -> Tensor:
        """Scores as they are worth to everything after: more is better, NaN where they are none."""
        low, high = self.reward.range
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
        return (scores if self.reward.higher_is_better else -scores).masked_fill(bad, torch.nan)

    def close(self) -> None:
        """Ends the thread once its call returns; a call that hangs is left behind."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None


def _warn_once_for_all(message: str) -> None:
    """By the first process alone; Lightning's own, which a reward's server would wait seconds for."""
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank()):
        warnings.warn(message, UserWarning, stacklevel=3)
