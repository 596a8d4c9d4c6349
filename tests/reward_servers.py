"""Servers in threads of this process, for rewards that ask one; started once, and gone with the process."""

import threading
import time
import zlib
from contextlib import ExitStack
from functools import cache

from chat_server import chat_server

KEPT = ExitStack()


@cache
def chat_url() -> str:
    """An OpenAI-compatible server that grades by brightness and by the text of the question."""

    def answer(arrays, text):
        (array,) = arrays
        return f"Final Score: {1 + 3 * array.mean() / 255 + zlib.crc32(text.encode()) % 997 / 1000:.6f}"

    return KEPT.enter_context(chat_server(answer)).url


@cache
def jpeg_url() -> str:
    """A server of `JPEGIncompressibility`."""
    import torch
    import uvicorn

    from recast_pl.rewards import JPEGIncompressibility
    from recast_pl.rewards.remote.server import build_app

    app = build_app(JPEGIncompressibility(), device=torch.device("cpu"), max_batch=64)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
