"""Serves one reward: `python -m recast_pl.rewards.serve --reward recast_pl.rewards.Sharpness --port 8000`.

The reward is named as in a run's YAML, on the command line or in a file (`--config`):

    reward: {class_path: recast_pl.rewards.CLIPScore, init_args: {pretrained: recast_pl://clip}}
    max_batch: 128
    max_megabytes: 1024

What goes over the line is described in `rewards.remote.wire`. FastAPI on uvicorn, and one process: a server
that spreads work over processes would hand pictures from one to the next by pickle. There is no access control:
keep it inside a trusted network, or behind a proxy that checks `RemoteReward.key_variable`.

Shape suffixes: B pictures, H W their sides.
"""

import asyncio
import importlib.util
import logging
from collections.abc import AsyncIterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from recast_pl.error_messages import explained, print_error, refusal, shows_traceback
from recast_pl.rewards.base import Reward
from recast_pl.rewards.remote.wire import decode_request, describe, encode_scores
from recast_pl.types import Prompt

if TYPE_CHECKING:
    from fastapi import FastAPI

PROGRAM = "python -m recast_pl.rewards.serve"
MAX_MEGABYTES = 1024  # 64 pictures of 1024² are 768 MiB
log = logging.getLogger("uvicorn.error")  # the one that uvicorn shows


class Refusal(Exception):
    """A request that is not scored, and the HTTP status that says why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def checked_request(body: bytes, reward: Reward, *, max_batch: int) -> tuple[Tensor, list[Prompt]]:
    """Pictures and prompts that the reward can be given.

    Raises:
        Refusal: naming what is wrong.
    """
    try:
        images, prompts = decode_request(body)
    except ValueError as error:
        raise Refusal(400, str(error)) from error
    if images.dtype != torch.float32:
        raise Refusal(422, f"images: expected float32, got {images.dtype}")
    if images.dim() != 4 or images.shape[1] != 3 or not images.numel():
        raise Refusal(422, f"images: expected the shape [B, 3, H, W], got {list(images.shape)}")
    if len(images) > max_batch:
        raise Refusal(413, f"images: at most {max_batch} at a time, got {len(images)}")
    if len(prompts) != len(images):
        raise Refusal(422, f"prompts: {len(images)} pictures but {len(prompts)} prompts")
    fine = ((images >= 0) & (images <= 1)).flatten(1).all(1)  # false for NaN
    if not fine.all():
        raise Refusal(422, f"images: picture {int((~fine).nonzero()[0])} has pixels outside [0, 1] or NaN")
    for key in reward.required_metadata:
        for number, prompt in enumerate(prompts):
            if key not in prompt.metadata:
                raise Refusal(422, f"prompts: prompt {number} lacks the metadata {key!r}: {prompt.text!r}")
    return images, prompts


def scored(reward: Reward, device: torch.device, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    """Scores [B], computed as a suite does: no gradient, no autocast.

    Raises:
        Refusal: with the reward's own reason, where it raises or returns another shape.
    """
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            scores = torch.as_tensor(reward.score(images.to(device), prompts))
    except Exception as error:
        log.exception("the reward raised")
        raise Refusal(500, f"{type(reward).__name__}: {type(error).__name__}: {error}") from error
    if scores.shape != (len(images),):
        raise Refusal(
            500,
            f"{type(reward).__name__}: expected {len(images)} scores, got the shape {tuple(scores.shape)}",
        )
    return scores


async def limited_body(chunks: AsyncIterable[bytes], *, max_megabytes: int) -> bytes:
    """A request's body, which is refused before it fills the memory.

    Raises:
        Refusal: as soon as more than `max_megabytes` have arrived.
    """
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > max_megabytes * 2**20:
            raise Refusal(413, f"at most {max_megabytes} MiB in a request (max_megabytes): send fewer pictures")
    return bytes(body)


def build_app(
    reward: Reward, *, device: torch.device, max_batch: int, max_megabytes: int = MAX_MEGABYTES
) -> "FastAPI":
    """The routes of a loaded reward."""
    from fastapi import FastAPI, Request
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import JSONResponse

    app = FastAPI(title="recast_pl reward")
    lock = asyncio.Lock()  # scorers are not thread-safe, and pictures in turn are no slower on one device
    description = describe(reward, max_batch=max_batch).to_json()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/info")
    async def info() -> dict[str, Any]:
        return description

    @app.post("/score")
    async def score(request: Request) -> JSONResponse:
        try:
            body = await limited_body(request.stream(), max_megabytes=max_megabytes)
            images, prompts = checked_request(body, reward, max_batch=max_batch)
            async with lock:
                if await request.is_disconnected():
                    raise Refusal(499, "the client is gone")  # timed out while others were served
                scores = await run_in_threadpool(scored, reward, device, images, prompts)
        except Refusal as refusal:
            return JSONResponse({"error": str(refusal)}, status_code=refusal.status)
        return JSONResponse(encode_scores(scores))

    return app


def checked_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: where there is none.
    """
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device: expected cpu, or a device that torch sees here, got {name}: {error}"
        ) from error
    return torch.device(name)


def main(arguments: list[str] | None = None) -> None:
    """Loads the reward, then serves it until interrupted."""
    from jsonargparse import ArgumentParser

    class Parser(ArgumentParser):
        """One whose errors are a message."""

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            if not self.exit_on_error:  # a parser inside another's
                super().error(message, ex)
            keys = [action.dest for action in parser._actions]
            print_error(explained(message, keys), help_command=f"{PROGRAM} --help", error=ex)
            self.exit(2)

    parser = Parser(prog=PROGRAM, description="Serves one reward.")
    parser.add_argument("--config", action="config", help="YAML file of the arguments below")
    parser.add_subclass_arguments(Reward, "reward", required=True, help="as in a run's YAML")
    parser.add_argument("--host", type=str, default="127.0.0.1", help="0.0.0.0: reachable from elsewhere")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one, which the log names")
    parser.add_argument("--device", type=str, default="cpu", help="cpu, cuda, cuda:1, …")
    parser.add_argument("--max_batch", type=int, default=64, help="most pictures in one request")
    parser.add_argument("--max_megabytes", type=int, default=MAX_MEGABYTES, help="most MiB in one request")
    options = parser.parse_args(arguments)
    for key in ("max_batch", "max_megabytes"):
        if options[key] < 1:
            parser.error(f"{key}: expected 1 or more, got {options[key]}")
    if not 0 <= options.port < 2**16:
        parser.error(f"port: expected 0 to 65535, got {options.port}")
    if missing := [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]:
        parser.error(
            f"serving needs {' and '.join(missing)}: install the extra `serve`, "
            "from a checkout: python -m pip install -c constraints.txt '.[serve]'"
        )
    import uvicorn

    try:
        reward: Reward = parser.instantiate(options).reward
    except ValueError as error:  # jsonargparse's, around the constructor's own
        parser.error(str(error), error)
    try:
        device = checked_device(options.device)
        reward.load(device)  # before the port opens: a server that answers is one that can score
    except Exception as error:
        message = None if shows_traceback() else refusal(error)
        if message is None:
            raise
        parser.error(message, error)
    try:
        limits = {key: options[key] for key in ("max_batch", "max_megabytes")}
        app = build_app(reward, device=device, **limits)
        uvicorn.run(app, host=options.host, port=options.port)
    finally:
        reward.unload()
