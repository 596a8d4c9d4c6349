"""What a `RemoteReward` and its server say to each other.

Request, `POST /score`: one safetensors file. Its tensor `images` is float32 [B, 3, H, W] in [0, 1], every bit
as it was; its header's `__metadata__` has under `prompts` a JSON list of B objects
`{"text": …, "metadata": {…}}`. Tuples in the metadata arrive as lists.

Answer: JSON `{"scores": […]}` with B numbers; `null` for a picture that could not be scored. Numbers are
float32 written in full, so that they come back bit for bit. Errors are JSON `{"error": "reason"}` with status
400 (body not understood), 413 (more pictures or bytes than the server's limits), 422 (wrong content) or 500
(the reward raised).

`GET /info`: JSON of `Description`. `GET /health`: `{"status": "ok"}` once the reward is loaded.

Shape suffixes: B pictures, H W their sides.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from recast_pl.rewards.base import Reward
from recast_pl.types import Prompt

FORMAT = 1  # of the request and the answer; a server of another one is refused
CONTENT_TYPE = "application/vnd.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a server declares of its reward."""

    format: int
    reward: str  # class path
    range: tuple[float, float]
    higher_is_better: bool
    required_metadata: tuple[str, ...]
    max_batch: int

    def to_json(self) -> dict[str, Any]:
        """JSON has no infinity: an open end of the range is null."""
        low, high = (end if math.isfinite(end) else None for end in self.range)
        return asdict(self) | {"range": [low, high], "required_metadata": list(self.required_metadata)}

    @classmethod
    def from_json(cls, value: Any) -> "Description":
        """The inverse of `to_json`.

        Raises:
            ValueError: where the value is no description of this format.
        """
        try:
            if value["format"] != FORMAT:
                raise ValueError(f"expected format {FORMAT}, got {value['format']!r}")
            low, high = value["range"]
            return cls(
                format=FORMAT,
                reward=str(value["reward"]),
                range=(-math.inf if low is None else float(low), math.inf if high is None else float(high)),
                higher_is_better=bool(value["higher_is_better"]),
                required_metadata=tuple(map(str, value["required_metadata"])),
                max_batch=int(value["max_batch"]),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"not a description of a reward: {value!r:.200}") from error


def describe(reward: Reward, *, max_batch: int) -> Description:
    """What a server says of `reward`."""
    return Description(
        format=FORMAT,
        reward=f"{type(reward).__module__}.{type(reward).__qualname__}",
        range=reward.range,
        higher_is_better=reward.higher_is_better,
        required_metadata=tuple(reward.required_metadata),
        max_batch=max_batch,
    )


def encode_request(images_B3HW: Tensor, prompts: Sequence[Prompt]) -> bytes:
    """The body of a request.

    Raises:
        ValueError: where a prompt's metadata is no JSON.
    """
    from safetensors.torch import save

    listed = []
    for number, prompt in enumerate(prompts):
        entry = {"text": prompt.text, "metadata": dict(prompt.metadata)}
        try:
            listed.append(json.dumps(entry, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the metadata of prompt {number} ({prompt.text!r}) is no JSON: {error}"
            ) from error
    images = images_B3HW.detach().to("cpu", torch.float32).contiguous()
    return save({"images": images}, metadata={"prompts": f"[{','.join(listed)}]"})


def decode_request(body: bytes) -> tuple[Tensor, list[Prompt]]:
    """Pictures and prompts of a request, not looked at any further.

    Raises:
        ValueError: where the body is not of this format.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        images = load(body)["images"]
        # the loader of bytes drops the header: 8 bytes with its length, then JSON
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        listed = json.loads(header["__metadata__"]["prompts"])
        prompts = [Prompt(text=entry["text"], metadata=entry["metadata"]) for entry in listed]
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the body is not of format {FORMAT}: {type(error).__name__}: {error}") from error
    if not all(isinstance(p.text, str) and isinstance(p.metadata, dict) for p in prompts):
        raise ValueError(f"the body is not of format {FORMAT}: a prompt needs a text and a metadata object")
    return images, prompts


def encode_scores(scores_B: Tensor) -> dict[str, list[float | None]]:
    """The JSON value of an answer."""
    values = scores_B.detach().to("cpu", torch.float32).tolist()
    return {"scores": [value if math.isfinite(value) else None for value in values]}


def decode_scores(value: Any, *, count: int) -> Tensor:
    """Scores [B], float32, NaN where the server could not score.

    Raises:
        ValueError: where the value is no answer for `count` pictures.
    """
    scores = value.get("scores") if isinstance(value, dict) else None
    if not isinstance(scores, list):
        raise ValueError(f"expected an object with a list `scores`, got {value!r:.200}")
    if len(scores) != count:
        raise ValueError(f"expected {count} scores, got {len(scores)}")
    for score in scores:
        if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
            raise ValueError(f"expected numbers or null as scores, got {score!r:.200}")
    return torch.tensor([math.nan if score is None else float(score) for score in scores], dtype=torch.float32)
