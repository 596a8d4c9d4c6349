"""A reward behind a real server, which is killed, slow, wrong, or talks rubbish."""

import ast
import asyncio
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch
from conftest import prompt_batch
from jsonargparse import ArgumentParser
from served import Bits

import recast_pl.rewards
from recast_pl.rewards import (
    Composition,
    RemoteReward,
    Reward,
    RewardFailure,
    RewardSuite,
    RewardUnavailable,
    RewardUnusable,
)
from recast_pl.rewards.remote.server import Refusal, limited_body
from recast_pl.rewards.remote.wire import decode_request, encode_request
from recast_pl.rewards.serve import main as serve
from recast_pl.scenes import draw, sample_scene

CPU = torch.device("cpu")
HERE = Path(__file__).resolve().parents[1]
IMAGES = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
INFO = {
    "format": 1,
    "reward": "elsewhere.Reward",
    "range": [0, 1],
    "higher_is_better": True,
    "required_metadata": [],
    "max_batch": 8,
}


def prompts(*texts, offset=0.25):
    return prompt_batch(texts, metadata=[{"offset": offset, "inner": {"a": [1, "ü"]}} for _ in texts]).prompts


@contextmanager
def server(reward, *extra):
    """A server process on a port of its own choice; its address and process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "recast_pl.rewards.serve", "--reward", reward, "--port", "0", *extra],
        stderr=subprocess.PIPE,
        text=True,
        cwd=HERE.parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])},
    )
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(said))
        threading.Thread(target=process.stderr.read, daemon=True).start()  # or the pipe fills up
        yield found.group(1), process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url():
    with server("served.Bits", "--max_batch", "3") as (address, _):
        yield address


@pytest.fixture
def remote(url):
    reward = RemoteReward(url=url, timeout=10, required_metadata=("offset",))
    reward.load(CPU)
    yield reward
    reward.unload()


# ------------------------------------------------------------------ the same as here


def test_scores_are_those_of_this_process_bit_for_bit(remote):
    texts = prompts(*"abcde")
    assert torch.equal(remote.score(IMAGES, texts), Bits().score(IMAGES, texts))
    assert remote.score(IMAGES[:0], []).shape == (0,)


def test_one_bit_of_one_pixel_arrives(remote):
    changed = IMAGES[:1].clone()
    changed.view(torch.int32)[0, 1, 2, 3] += 1
    difference = remote.score(changed, prompts("a")) - remote.score(IMAGES[:1], prompts("a"))
    assert difference.item() == pytest.approx(1 / 3, abs=0.05)


def test_the_servers_reward_is_taken_over(remote):
    assert remote.range == (0.0, float("inf"))
    assert remote.higher_is_better is False


def test_a_request_of_too_many_bytes_is_refused_before_it_has_all_arrived():
    arrived = 0

    async def endless():
        nonlocal arrived
        while True:
            arrived += 2**16
            yield bytes(2**16)

    with pytest.raises(Refusal, match="at most 2 MiB in a request"):
        asyncio.run(limited_body(endless(), max_megabytes=2))
    assert arrived == 2 * 2**20 + 2**16


def test_a_server_goes_on_after_a_request_of_too_many_bytes():
    with server("served.Bits", "--max_megabytes", "1") as (address, _):
        answer = httpx2.post(f"{address}/score", content=bytes(2**20 + 1))
        assert answer.status_code == 413
        assert "max_megabytes" in answer.json()["error"]
        assert httpx2.get(f"{address}/health").json() == {"status": "ok"}


def test_a_picture_that_could_not_be_scored_stays_nan(remote):
    scores = remote.score(IMAGES[:3], prompts("a", "nan", "b"))
    assert scores.isnan().tolist() == [False, True, False]


def test_a_suite_masks_what_the_server_could_not_score(url):
    suite = RewardSuite(
        rewards={"far": RemoteReward(url=url, required_metadata=("offset",))}, on_failure="mask"
    )
    suite.setup(CPU)
    scores = suite.score(IMAGES, prompts("a", "nan", "negative", "b", "c"))
    assert scores.valid_RB[0].tolist() == [True, False, False, True, True]
    assert (scores.values_RB[0][[0, 3, 4]] < 0).all()  # less is better there, so the suite negates
    suite.teardown()


def test_a_request_survives_the_journey_whole():
    extremes = torch.tensor([0.0, 1.0, 2.0**-149, 1 - 2.0**-24]).reshape(1, 1, 1, 4).expand(2, 3, 1, 4)
    sent = prompts("", 'quotes " and 漢字 🎉\n')
    images, received = decode_request(encode_request(extremes, sent))
    assert torch.equal(images, extremes)
    assert received == list(sent)


def test_metadata_that_is_no_json_is_refused_here(remote):
    with pytest.raises(ValueError, match="metadata of prompt 0"):
        remote.score(IMAGES[:1], prompts("a", offset=object()))


# ------------------------------------------------------------------ a wrong server fails at set-up


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"reward": "recast_pl.rewards.Sharpness"}, r"RemoteReward\.reward: .*serves served\.Bits"),
        ({"range": (0.0, 1.0)}, r"RemoteReward\.range"),
        ({"higher_is_better": True}, r"RemoteReward\.higher_is_better"),
        ({"required_metadata": ()}, r"RemoteReward\.required_metadata: .*\['offset'\], got \[\]"),
        ({"batch_size": 4}, r"RemoteReward\.batch_size: .*at most 3"),
    ],
)
def test_a_server_with_another_reward_is_refused(url, wrong, match):
    with pytest.raises(ValueError, match=match):
        RemoteReward(**{"url": url, "required_metadata": ("offset",), **wrong}).load(CPU)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"url": "gpu-2:8000"}, r"RemoteReward\.url"),
        ({"timeout": 0.0}, r"RemoteReward\.timeout"),
        ({"timeout": float("nan")}, r"RemoteReward\.timeout"),
        ({"batch_size": 0}, r"RemoteReward\.batch_size"),
    ],
)
def test_wrong_values_are_refused_at_once(wrong, match):
    with pytest.raises(ValueError, match=match):
        RemoteReward(**{"url": "http://x", **wrong})


def test_nobody_there():
    with pytest.raises(RewardUnavailable, match=r"http://127\.0\.0\.1:9/info: "):
        RemoteReward(url="http://127.0.0.1:9").load(CPU)


# ------------------------------------------------------------------ what the server refuses


def body(images=IMAGES[:1], texts=("a",), **kwargs):
    return encode_request(images, prompts(*texts, **kwargs))


def altered(header, payload=b"\0" * 48):
    """A safetensors file with a header of one's own."""
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + payload


def tensor(dtype, size):
    entry = {"dtype": dtype, "shape": [1, 3, 2, 2], "data_offsets": [0, size]}
    listed = json.dumps([{"text": "a", "metadata": {"offset": 0}}])
    return altered({"__metadata__": {"prompts": listed}, "images": entry}, b"\0" * size)


def without_metadata():
    return encode_request(IMAGES[:1], prompt_batch(["a"]).prompts)


@pytest.mark.parametrize(
    ("content", "status", "match"),
    [
        (lambda: b"", 400, "not of format 1"),
        (lambda: b"rubbish" * 9, 400, "not of format 1"),
        (lambda: altered({}, b""), 400, "not of format 1"),
        (lambda: altered({"__metadata__": {"prompts": "[3]"}}, b""), 400, "not of format 1"),
        (lambda: tensor("F16", 24), 422, "float32, got torch.float16"),
        (lambda: tensor("I32", 48), 422, "float32, got torch.int32"),
        (lambda: body(IMAGES[0]), 422, r"\[B, 3, H, W\], got \[3, 8, 8\]"),
        (lambda: body(IMAGES[:, :1]), 422, r"got \[5, 1, 8, 8\]"),
        (lambda: body(IMAGES[:0], ()), 422, r"got \[0, 3, 8, 8\]"),
        (lambda: body(IMAGES[:2]), 422, "2 pictures but 1 prompts"),
        (lambda: body(IMAGES[:4], "abcd"), 413, "at most 3 at a time, got 4"),
        (lambda: body(torch.full((1, 3, 2, 2), torch.nan)), 422, "picture 0 has pixels outside"),
        (lambda: body(IMAGES[:2] + torch.tensor([0, 1]).reshape(2, 1, 1, 1), "ab"), 422, "picture 1"),
        (without_metadata, 422, "prompt 0 lacks the metadata 'offset'"),
        (lambda: body(texts=["raise"]), 500, "Bits: RuntimeError: no mercy"),
        (lambda: body(texts=["short"]), 500, "expected 1 scores, got the shape"),
    ],
)
def test_bad_input_gets_a_clear_error_and_the_server_lives_on(url, content, status, match):
    answer = httpx2.post(f"{url}/score", content=content())
    assert answer.status_code == status
    assert re.search(match, answer.json()["error"])
    assert httpx2.get(f"{url}/health").json() == {"status": "ok"}


def test_the_client_passes_on_what_the_server_says(remote):
    with pytest.raises(RewardUnusable, match="HTTP 422: images: picture 0 has pixels outside"):
        remote.score(IMAGES[:1] + 1, prompts("a"))
    with pytest.raises(RewardUnavailable, match="HTTP 500: Bits: RuntimeError: no mercy"):
        remote.score(IMAGES[:1], prompts("raise"))


def test_requests_at_one_time_are_scored_in_turn(url):
    """`Bits` raises where two threads are in it; and no client gets another one's scores."""
    results = {}

    def ask(number):
        reward = RemoteReward(url=url, required_metadata=("offset",))
        reward.load(CPU)
        results[number] = reward.score(IMAGES, prompts(*"abcde", offset=number))
        reward.unload()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert torch.equal(results[number], Bits().score(IMAGES, prompts(*"abcde", offset=number)))


def test_a_request_that_nobody_waits_for_any_more_is_not_scored(url, tmp_path):
    inside, abandoned = tmp_path / "inside", tmp_path / "abandoned"
    rewards = [RemoteReward(url=url, timeout=t, required_metadata=("offset",)) for t in (10, 0.3)]
    for reward in rewards:
        reward.load(CPU)
    patient, hasty = rewards
    first = threading.Thread(target=patient.score, args=(IMAGES[:2], prompts(f"touch {inside}", "sleep 1")))
    first.start()
    while not inside.exists():
        time.sleep(0.01)
    with pytest.raises(RewardUnavailable, match=r"within 0\.3 s"):
        hasty.score(IMAGES[:1], prompts(f"touch {abandoned}"))
    first.join()
    patient.score(IMAGES[:1], prompts("a"))  # requests are served in turn: the abandoned one's is over
    assert not abandoned.exists()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--reward", "NoSuchReward"], "NoSuchReward"),
        (["--reward", "recast_pl.rewards.JPEGIncompressibility", "--max_batch", "0"], "max_batch: expected 1"),
        (
            ["--reward", "recast_pl.rewards.JPEGIncompressibility", "--max_megabytes", "0"],
            "max_megabytes: expected 1",
        ),
        ([], "reward"),
    ],
)
def test_a_wrong_command_line_says_so(arguments, match, capsys):
    with pytest.raises(SystemExit):
        serve(arguments)
    assert match in capsys.readouterr().err


def test_importing_the_rewards_imports_no_package_of_a_single_one():
    common = {"torch", "numpy", "PIL", "tqdm", "lightning", "recast_pl"}
    for path in (Path(recast_pl.rewards.__file__).parent).glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            foreign = {name.split(".")[0] for name in names} - common - set(sys.stdlib_module_names)
            assert not foreign, f"{path.name} imports {foreign} at its top"


# ------------------------------------------------------------------ a server that dies


def test_killed_in_the_middle_of_a_request(tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text("max_batch: 5\n")
    with server("served.Bits", "--config", str(config)) as (url, process):
        reward = RemoteReward(url=url, timeout=20, required_metadata=("offset",))
        reward.load(CPU)
        inside = tmp_path / "inside"

        def kill():
            while not inside.exists():
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        began = time.monotonic()
        with pytest.raises(RewardUnavailable, match=re.escape(f"{url}/score: ")):
            reward.score(IMAGES, prompts("a", f"touch {inside}", "sleep 30", *"bc"))
        assert time.monotonic() - began < 15  # not the time-out, and not the 30 s of sleep
        killer.join()
        with pytest.raises(RewardUnavailable, match=re.escape(f"{url}/score: ")):
            reward.score(IMAGES, prompts(*"abcde"))
        reward.unload()


# ------------------------------------------------------------------ a server that is none of ours


@contextmanager
def canned(score=b"", *, status=200, info=INFO, drip=0.0):
    """A server with one answer, sent byte by byte where `drip` is above 0; its address."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, content):
            self.send_response(status if self.path == "/score" else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if drip and self.path == "/score":
                for byte in content:
                    self.wfile.write(bytes([byte]))
                    time.sleep(drip)
            else:
                self.wfile.write(content)

        def do_GET(self):
            self.answer(info if isinstance(info, bytes) else json.dumps(info).encode())

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(score)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.handle_error = lambda *_: None  # the client hung up: that is the test
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (b"<html>", "is not JSON: '<html>'"),
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[0.5, 0.5]", "a list `scores`"),
        (b'{"scores": 0.5}', "a list `scores`"),
        (b'{"scores": [0.5]}', "expected 2 scores, got 1"),
        (b'{"scores": [0.5, 0.5, 0.5]}', "expected 2 scores, got 3"),
        (b'{"scores": [0.5, "0.5"]}', "expected numbers or null"),
        (b'{"scores": [0.5, true]}', "expected numbers or null"),
        (b'{"scores": [[0.5], [0.5]]}', "expected numbers or null"),
    ],
)
def test_rubbish_is_no_score(answer, match):
    with canned(answer) as url:
        reward = RemoteReward(url=url)
        reward.load(CPU)
        with pytest.raises(RewardUnusable, match=re.escape(f"{url}/score: ")) as raised:
            reward.score(IMAGES[:2], prompts("a", "b"))
        assert match in str(raised.value)


@pytest.mark.parametrize("info", [b"<html>", [1], {}, INFO | {"format": 2}, INFO | {"range": [0]}])
def test_no_description_no_reward(info):
    with canned(info=info) as url, pytest.raises(RewardUnusable, match=re.escape(f"{url}/info: ")):
        RemoteReward(url=url).load(CPU)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(301, RewardUnusable), (401, RewardUnusable), (404, RewardUnusable),
     (429, RewardUnavailable), (500, RewardUnavailable), (503, RewardUnavailable)],
)  # fmt: skip
def test_status_codes_are_sorted_by_what_a_retry_is_worth(status, kind):
    with canned(b'{"scores": [0.5]}', status=status) as url:
        reward = RemoteReward(url=url)
        reward.load(CPU)
        with pytest.raises(kind, match=f"HTTP {status}"):
            reward.score(IMAGES[:1], prompts("a"))


@pytest.mark.parametrize("drip", [3.0, 0.02])  # too long for one read; each read quick, all of them too long
def test_a_slow_server_is_given_up_in_time(drip):
    with canned(b'{"scores": [0.5]' + b" " * 200 + b"}", drip=drip) as url:
        reward = RemoteReward(url=url, timeout=0.5)
        reward.load(CPU)
        began = time.monotonic()
        with pytest.raises(RewardUnavailable, match=r"/score: no answer within 0\.5 s"):
            reward.score(IMAGES[:1], prompts("a"))
        assert time.monotonic() - began < 2


def test_scores_out_of_range_end_the_run():
    with canned(b'{"scores": [0.5, 1.5]}') as url:
        suite = RewardSuite(rewards={"far": RemoteReward(url=url)})
        suite.setup(CPU)
        with pytest.raises(RewardFailure, match=r"rewards\.rewards\.far: .*outside \[0\.0, 1\.0\]"):
            suite.score(IMAGES[:2], prompts("a", "b"))
        suite.teardown()


def test_a_key_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("REWARD_KEY", raising=False)
    with pytest.raises(ValueError, match="key_variable: the environment variable 'REWARD_KEY' is not set"):
        RemoteReward(url="http://x", key_variable="REWARD_KEY").load(CPU)


def test_composition_understands_metadata_that_travelled():
    generator = np.random.default_rng(0)
    scenes = [sample_scene(generator, held_out=False) for _ in range(4)]
    images = torch.from_numpy(np.stack([draw(scene, generator) for scene in scenes])).roll(1, dims=0)
    batch = prompt_batch([s.caption for s in scenes], metadata=[s.metadata for s in scenes])
    here = Composition().score(images, batch.prompts)
    assert 0 < here.mean() < 1
    assert torch.equal(Composition().score(*decode_request(encode_request(images, batch.prompts))), here)


def test_yaml_reaches_the_constructors():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Reward, "reward")
    text = "reward: {class_path: recast_pl.rewards.%s, init_args: {url: 'http://x/v1', %s}}"
    far = parser.instantiate(
        parser.parse_string(text % ("RemoteReward", "range: [0, 2.5], required_metadata: [include]"))
    ).reward
    assert far.range == (0.0, 2.5)
    assert far.required_metadata == ("include",)
    vlm = parser.instantiate(parser.parse_string(text % ("VLMScore", "scale: [0, 10]"))).reward
    assert vlm.range == (0.0, 10.0)
