"""One HTTP exchange, with failures sorted into those worth another attempt and those that are not."""

import json
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2

WORTH_RETRYING = frozenset({408, 425, 429, 500, 502, 503, 504})
LONGEST_REASON = 500  # characters of a server's error text that are passed on


class RewardUnavailable(RuntimeError):
    """No answer, or one that may differ next time: connection, time-out, overload, a server's own error."""


class RewardUnusable(RuntimeError):
    """An answer that another attempt will not change: refused, not understood, or not what was asked for."""


def open_client(*, headers: dict[str, str] | None = None, key_variable: str | None = None) -> "httpx2.Client":
    """A client that keeps its connections.

    Args:
        headers: sent with every request.
        key_variable: environment variable whose value is sent as a bearer token.

    Raises:
        ValueError: where the variable is not set.
    """
    import httpx2

    headers = dict(headers or {})
    if key_variable is not None:
        if not os.environ.get(key_variable):
            raise ValueError(f"key_variable: the environment variable {key_variable!r} is not set or empty")
        headers["Authorization"] = f"Bearer {os.environ[key_variable].strip()}"
    return httpx2.Client(headers=headers, limits=httpx2.Limits(max_connections=None))


def exchange(
    client: "httpx2.Client",
    method: str,
    url: str,
    *,
    timeout: float,
    content: bytes | None = None,
    content_type: str = "application/json",
) -> bytes:
    """Sends a request and returns the body of the answer.

    Args:
        client: of `open_client`.
        method: GET or POST.
        url: whole.
        timeout: seconds until the whole answer must be there. The client's own limits are for single reads: a
            server that sends a byte now and then would hold it for ever.
        content: body of the request.
        content_type: of `content`.

    Raises:
        RewardUnavailable: worth another attempt.
        RewardUnusable: not worth one.
    """
    import httpx2

    deadline = time.monotonic() + timeout
    late = f"{url}: no answer within {timeout:g} s"
    headers = {} if content is None else {"Content-Type": content_type}
    try:
        with client.stream(method, url, content=content, headers=headers, timeout=timeout) as response:
            parts = []
            for part in response.iter_bytes():
                parts.append(part)
                if time.monotonic() > deadline:
                    raise RewardUnavailable(late)
    except httpx2.TimeoutException as error:
        raise RewardUnavailable(late) from error
    except httpx2.UnsupportedProtocol as error:
        raise RewardUnusable(f"{url}: {error}") from error
    except httpx2.TransportError as error:
        raise RewardUnavailable(f"{url}: {error or type(error).__name__}") from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise RewardUnusable(f"{url}: {error or type(error).__name__}") from error
    body = b"".join(parts)
    if response.is_success:
        return body
    kind = RewardUnavailable if response.status_code in WORTH_RETRYING else RewardUnusable
    raise kind(f"{url}: HTTP {response.status_code}: {_reason(body)}")


def parsed(body: bytes, url: str) -> Any:
    """The JSON value of an answer.

    Raises:
        RewardUnusable: where it is none.
    """
    try:
        return json.loads(body)
    except ValueError as error:
        start = body[:LONGEST_REASON].decode(errors="replace")
        raise RewardUnusable(f"{url}: the answer is not JSON: {start!r}") from error


def checked_url(url: str, *, key: str) -> str:
    """The URL without a slash at its end.

    Raises:
        ValueError: naming the YAML key, where it is no web address.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{key}: expected http://… or https://…, got {url!r}")
    return url.rstrip("/")


def _reason(body: bytes) -> str:
    """What the server says of its error: the text under `error`, or the start of the body."""
    try:
        error = json.loads(body)["error"]
        reason = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        reason = body.decode(errors="replace")
    return str(reason)[:LONGEST_REASON] or "no reason given"
