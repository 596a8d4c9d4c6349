"""A reward that another process computes, on this machine or another one.

Shape suffixes: B pictures, H W their sides.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recast_pl.rewards.base import Reward
from recast_pl.rewards.images import score_finite
from recast_pl.rewards.remote.http import RewardUnusable, checked_url, exchange, open_client, parsed
from recast_pl.rewards.remote.wire import (
    CONTENT_TYPE,
    Description,
    decode_scores,
    encode_request,
)
from recast_pl.types import Prompt

if TYPE_CHECKING:
    import httpx2


class RemoteReward(Reward):
    """Scores by a server of `python -m recast_pl.rewards.serve`, or any that speaks `rewards.remote.wire`.

    Pictures travel as float32, so that the scores are those of the same reward in this process. The server
    declares its reward; what is named here must agree with it, or `load` raises.

    Args:
        url: of the server, e.g. `http://gpu-2:8000`.
        timeout: seconds for one request.
        batch_size: pictures in one request; None: the server's limit.
        reward: class path that the server must declare; None: any.
        range: that the server must declare; None: its own is taken over.
        higher_is_better: that the server must declare; None: its own is taken over.
        required_metadata: that the server must declare. Prompts are checked before any server is asked, so
            what a server needs has to be named here.
        headers: sent with every request.
        key_variable: name of an environment variable whose value is sent as a bearer token.

    Raises:
        RewardUnavailable: from `load` and `score`, where another attempt may help.
        RewardUnusable: where it will not.
    """

    def __init__(
        self,
        *,
        url: str,
        timeout: float = 60.0,
        batch_size: int | None = None,
        reward: str | None = None,
        range: tuple[float, float] | None = None,
        higher_is_better: bool | None = None,
        required_metadata: tuple[str, ...] = (),
        headers: dict[str, str] | None = None,
        key_variable: str | None = None,
    ) -> None:
        self.url = checked_url(url, key="RemoteReward.url")
        if not timeout > 0:
            raise ValueError(f"RemoteReward.timeout: expected above 0 seconds, got {timeout}")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"RemoteReward.batch_size: expected 1 or more, got {batch_size}")
        self.timeout, self.batch_size = timeout, batch_size
        self.headers, self.key_variable = headers, key_variable
        self.required_metadata = tuple(required_metadata)
        if range is not None:
            range = self.range = (float(range[0]), float(range[1]))
        self.expected = {"reward": reward, "range": range, "higher_is_better": higher_is_better}
        if higher_is_better is not None:
            self.higher_is_better = higher_is_better
        self._client: httpx2.Client | None = None
        self._per_request = 0

    def load(self, device: torch.device) -> None:
        """Asks the server what it is.

        Raises:
            ValueError: where its reward is not the one that this configuration expects.
        """
        client = open_client(headers=self.headers, key_variable=self.key_variable)
        try:
            url = f"{self.url}/info"
            answer = parsed(exchange(client, "GET", url, timeout=self.timeout), url)
            try:
                description = Description.from_json(answer)
            except ValueError as error:
                raise RewardUnusable(f"{url}: {error}") from error
            self._check(description)
        except BaseException:
            client.close()
            raise
        self.range, self.higher_is_better = description.range, description.higher_is_better
        self._per_request = self.batch_size or description.max_batch
        self._client = client

    def _check(self, description: Description) -> None:
        """Refuses a server with another reward."""
        for key, expected in self.expected.items():
            declared = getattr(description, key)
            same = declared == expected or (key == "reward" and same_class(str(expected), declared))
            if expected is not None and not same:
                raise ValueError(
                    f"RemoteReward.{key}: expected {expected}, but {self.url} serves {description.reward} with "
                    f"{declared}"
                )
        if set(description.required_metadata) != set(self.required_metadata):
            raise ValueError(
                f"RemoteReward.required_metadata: {description.reward} at {self.url} needs "
                f"{list(description.required_metadata)}, got {list(self.required_metadata)}"
            )
        if self.batch_size is not None and self.batch_size > description.max_batch:
            raise ValueError(
                f"RemoteReward.batch_size: {self.url} takes at most {description.max_batch} pictures at a "
                f"time, got {self.batch_size}"
            )

    def unload(self) -> None:
        """Closes the connections."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [B] as the server gives them; NaN where it could not score a picture."""
        return score_finite(images_B3HW, prompts, self._ask)

    def _ask(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        if self._client is None:
            raise RuntimeError("RemoteReward.score before load")
        url, parts = f"{self.url}/score", [images_B3HW.new_empty(0, dtype=torch.float32)]
        for start in range(0, len(images_B3HW), self._per_request):
            end = start + self._per_request
            images = images_B3HW[start:end]
            body = encode_request(images, prompts[start:end])
            answer = parsed(
                exchange(
                    self._client, "POST", url, timeout=self.timeout, content=body, content_type=CONTENT_TYPE
                ),
                url,
            )
            try:
                scores = decode_scores(answer, count=len(images))
            except ValueError as error:
                raise RewardUnusable(f"{url}: {error}") from error
            parts.append(scores.to(images.device))
        return torch.cat(parts)


def same_class(expected: str, declared: str) -> bool:
    """Whether a class path, as YAML files have it or shorter, is that of a class by its own module.

    >>> same_class("recast_pl.rewards.CLIPScore", "recast_pl.rewards.clipscore.CLIPScore")
    True
    >>> same_class("CLIPScore", "mine.CLIPScore"), same_class("recast_pl.rewards.CLIPScore", "mine.CLIPScore")
    (True, False)
    """
    package, _, name = expected.rpartition(".")
    module, _, declared_name = declared.rpartition(".")
    return name == declared_name and (not package or f"{module}.".startswith(f"{package}."))
