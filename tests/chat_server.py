"""A stand-in for an OpenAI-compatible server: answers by what it is told to see in the pictures."""

import base64
import io
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image


class Stand:
    """What the server has seen, and how many at a time."""

    def __init__(self, answer, *, models=("judge",), key=None, pause=0.0):
        self.answer, self.models, self.key, self.pause = answer, models, key, pause
        self.requests, self.inside, self.most_inside = [], 0, 0
        self.lock = threading.Lock()


def pictures_and_text(request):
    """Arrays of the pictures of a request, and its text."""
    content = request["messages"][0]["content"]
    arrays = []
    for part in content:
        if part["type"] == "image_url":
            kind, data = part["image_url"]["url"].split(",", 1)
            assert kind == "data:image/png;base64"
            arrays.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))))
    (text,) = [part["text"] for part in content if part["type"] == "text"]
    return arrays, text


@contextmanager
def chat_server(answer, **options):
    """A server whose `answer(arrays, text)` is text, or (status, body), or an exception to hang up with."""
    stand = Stand(answer, **options)

    class Handler(BaseHTTPRequestHandler):
        def send(self, status, value):
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self):
            if stand.key is not None and self.headers["Authorization"] != f"Bearer {stand.key}":
                return self.send(401, {"error": {"message": "Incorrect API key provided"}})
            assert self.path == "/v1/models"
            return self.send(200, {"data": [{"id": model} for model in stand.models]})

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            with stand.lock:
                stand.requests.append(request)
                stand.inside += 1
                stand.most_inside = max(stand.most_inside, stand.inside)
            time.sleep(stand.pause)
            said = stand.answer(*pictures_and_text(request))
            with stand.lock:
                stand.inside -= 1
            if isinstance(said, Exception):
                raise said
            if isinstance(said, tuple):
                return self.send(*said)
            return self.send(200, {"choices": [{"message": {"role": "assistant", "content": said}}]})

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.handle_error = lambda *_: None  # hung up by a test
        threading.Thread(target=running.serve_forever, daemon=True).start()
        stand.url = f"http://127.0.0.1:{running.server_port}/v1"
        yield stand
        running.shutdown()
