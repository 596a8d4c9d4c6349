"""Questions about pictures to a server with OpenAI's chat completions: vLLM, SGLang, or a paid one."""

import base64
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image

from recast_pl.rewards.remote.http import RewardUnusable, checked_url, exchange, open_client, parsed

if TYPE_CHECKING:
    import httpx2


class ChatServer:
    """One model behind one address. Answers are greedy (temperature 0), so that they repeat as far as it can.

    Args:
        url: up to and with the version, e.g. `http://gpu-2:8000/v1`.
        model: as the server calls it.
        timeout: seconds for one answer.
        max_tokens: longest answer.
        seed: sent along; not every server heeds it.
        key_variable: name of the environment variable that holds the API key; None: no key.
        key: what the arguments are called in messages, e.g. `VLMScore`.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        timeout: float,
        max_tokens: int,
        seed: int,
        key_variable: str | None,
        key: str,
    ) -> None:
        self.url = checked_url(url, key=f"{key}.url")
        if not model:
            raise ValueError(f"{key}.model: expected the name under which the server knows it, got {model!r}")
        if not timeout > 0:
            raise ValueError(f"{key}.timeout: expected above 0 seconds, got {timeout}")
        if max_tokens < 1:
            raise ValueError(f"{key}.max_tokens: expected 1 or more, got {max_tokens}")
        self.model, self.timeout, self.max_tokens, self.seed = model, timeout, max_tokens, seed
        self.key_variable, self.key = key_variable, key
        self._client: httpx2.Client | None = None

    def open(self) -> None:
        """Connects, and makes sure that the server has the model.

        Raises:
            ValueError: where it has not.
            RewardUnavailable: where the server cannot be reached.
            RewardUnusable: where it is no such server, or refuses the key.
        """
        client = open_client(key_variable=self.key_variable)
        url = f"{self.url}/models"
        try:
            answer = parsed(exchange(client, "GET", url, timeout=self.timeout), url)
            try:
                models = [entry["id"] for entry in answer["data"]]
            except (KeyError, TypeError) as error:
                raise RewardUnusable(f"{url}: not a list of models: {answer!r:.200}") from error
            if self.model not in models:
                raise ValueError(f"{self.key}.model: {self.url} has {models}, got {self.model!r}")
        except BaseException:
            client.close()
            raise
        self._client = client

    def close(self) -> None:
        """Closes the connections."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def ask(self, text: str, images: Sequence[Image.Image]) -> str:
        """The answer to pictures followed by a text; may be called from several threads.

        An answer without text (a refusal, a cut) is the empty string.

        Raises:
            RewardUnavailable: worth another attempt.
            RewardUnusable: not worth one.
        """
        if self._client is None:
            raise RuntimeError(f"{self.key}: asked before load")
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": data_uri(image)}} for image in images
        ]
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }
        url = f"{self.url}/chat/completions"
        body = exchange(self._client, "POST", url, timeout=self.timeout, content=json.dumps(request).encode())
        answer = parsed(body, url)
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise RewardUnusable(f"{url}: not a chat completion: {answer!r:.200}") from error
        if content is not None and not isinstance(content, str):
            raise RewardUnusable(f"{url}: expected text as the answer, got {content!r:.200}")
        return content or ""


def data_uri(image: Image.Image) -> str:
    """The picture as a PNG, which loses nothing, inside a URL."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
