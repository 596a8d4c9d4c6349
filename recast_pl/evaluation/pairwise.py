"""Which of two runs' pictures a vision-language model prefers.

    python -m recast_pl.evaluation.pairwise A B --server http://gpu-2:8000/v1 --model NAME --output FOLDER

A and B are folders that `predict` wrote, of the same prompts. Each pair is shown in both orders. Answers are
appended to `answers.jsonl` as they come; started again, the command asks only for what is missing. It writes
`results.json` and `results.md`, the outcome for A.

Reference: Zheng et al., "Judging LLM-as-a-judge with MT-bench and Chatbot Arena", 2023 (both orders, ties).
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from recast_pl.evaluation.pairs import Picture, digest, match, read_run
from recast_pl.evaluation.preferences import ORDERS, Judgement, Order, Preferences, Verdict, summarise
from recast_pl.rewards.remote.chat import ChatServer
from recast_pl.rewards.remote.http import RewardUnavailable, RewardUnusable

QUESTION = """\
The two images above were generated for the same caption:

{prompt}

Which one is better, all in all? Look at how well each shows what the caption says, and at how good it looks: \
clear, free of flaws, pleasing. The order in which they are shown means nothing.

Give your reasons in a few sentences. Then end with a line of its own: "Verdict: 1" if the first image is \
better, "Verdict: 2" if the second one is, "Verdict: tie" if neither is."""

VERDICT = re.compile(r"(?im)^\W*verdict:\W*(?:image\s*)?(1|2|tie)\W*$")
VERDICTS: dict[str, Verdict] = {"1": "first", "2": "second", "tie": "tie"}


def verdict_of(answer: str) -> Verdict | None:
    r"""The last verdict in an answer; None where there is none.

    >>> verdict_of("The first has no cat.\nVerdict: 2"), verdict_of("Both are fine.")
    ('second', None)
    """
    found = VERDICT.findall(answer)
    return VERDICTS[found[-1].lower()] if found else None


class AnswerLog:
    """`answers.jsonl`: the settings, then an answer a line, flushed at once.

    Args:
        path: of the file; made where there is none.
        settings: what the answers depend on.

    Raises:
        ValueError: where the file's answers were given under other settings, or a line cannot be read.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.judgements: list[Judgement] = []
        kept = 0
        if path.exists():
            content = path.read_bytes()
            kept = content.rfind(b"\n") + 1  # a line that a kill cut short is asked again
            self._read(content[:kept], path, settings)
        self._file = path.open("ab")
        self._file.truncate(kept)
        if not kept:
            self._append({"settings": dict(settings)})

    def _read(self, content: bytes, path: Path, settings: Mapping[str, Any]) -> None:
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                entry = json.loads(line)
                if number > 1:
                    self.judgements.append(
                        Judgement(
                            sample=entry["sample"], order=entry["order"], verdict=verdict_of(entry["answer"])
                        )
                    )
                    continue
                before = entry["settings"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a line of this command: {error!r}") from error
            if changed := sorted(key for key in settings if settings[key] != before.get(key)):
                raise ValueError(
                    f"{path}: its answers were given with another {' and '.join(changed)}; choose another "
                    "--output"
                )

    def add(self, sample: int, order: Order, answer: str) -> None:
        """One more answer."""
        self._append({"sample": sample, "order": order, "answer": answer})
        self.judgements.append(Judgement(sample=sample, order=order, verdict=verdict_of(answer)))

    def _append(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")  # ASCII: an answer cut in an emoji is no UTF-8
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def ask(
    server: ChatServer,
    pair: tuple[Picture, Picture],
    order: Order,
    *,
    question: str,
    retries: int,
    retry_wait: float,
) -> str:
    """The judge's answer, after further attempts where those may help.

    Raises:
        RewardUnavailable: after the last attempt.
        RewardUnusable: at once.
    """
    images = []
    for picture in pair if order == "AB" else pair[::-1]:
        with Image.open(picture.path) as image:
            images.append(image.convert("RGB"))
    text = question.replace("{prompt}", pair[0].prompt)
    for further in range(retries, 0, -1):
        try:
            return server.ask(text, images)
        except RewardUnavailable:
            time.sleep(retry_wait * 2 ** (retries - further))
    return server.ask(text, images)


def judge(
    server: ChatServer,
    pairs: Mapping[int, tuple[Picture, Picture]],
    log: AnswerLog,
    *,
    question: str = QUESTION,
    parallel_requests: int = 8,
    retries: int = 3,
    retry_wait: float = 1.0,
) -> list[str]:
    """Asks for every answer that `log` lacks; returns what went wrong, one message for each failed one."""
    done = {(judgement.sample, judgement.order) for judgement in log.judgements}
    waiting = [(sample, order) for sample in pairs for order in ORDERS if (sample, order) not in done]
    failures = []
    threads = ThreadPoolExecutor(parallel_requests, thread_name_prefix="judge")
    try:
        futures = {
            threads.submit(
                ask, server, pairs[sample], order, question=question, retries=retries, retry_wait=retry_wait
            ): (sample, order)
            for sample, order in waiting
        }
        bar: Iterable[Any] = tqdm(
            as_completed(futures), total=len(done) + len(waiting), initial=len(done), desc="answers"
        )
        for future in bar:
            sample, order = futures[future]
            try:
                log.add(sample, order, future.result())
            except (RewardUnavailable, RewardUnusable) as error:
                failures.append(f"sample {sample}, order {order}: {error}")
    finally:
        threads.shutdown(wait=True, cancel_futures=True)
    return failures


def table(result: Preferences) -> str:
    """The outcome as aligned lines."""

    def percent(value: float | None) -> str:
        return "none" if value is None else f"{100 * value:.1f} %"

    rows = [
        ("pairs judged in both orders", f"{result.judged} of {result.pairs}, {result.prompts} prompts"),
        ("A wins / ties / loses", f"{result.wins} / {result.ties} / {result.losses}"),
        ("win rate of A", percent(result.win_rate)),
        ("95 % interval", f"{percent(result.low)} to {percent(result.high)}"),
        ("first place wins", f"{percent(result.first_place)} of decided answers"),
        ("same in both orders", percent(result.consistent)),
        ("answers unparsable / missing", f"{result.unparsable} / {result.missing}"),
    ]
    return "\n".join(f"{name:<30}{value}" for name, value in rows)


def markdown(result: Preferences, *, a: str, b: str, model: str) -> str:
    """The outcome as a Markdown table of one line."""
    rate = (
        "none"
        if result.win_rate is None or result.low is None or result.high is None
        else f"{100 * result.win_rate:.1f} % [{100 * result.low:.1f}, {100 * result.high:.1f}]"
    )
    bias = "none" if result.first_place is None else f"{100 * result.first_place:.1f} %"
    return (
        "| A | B | judge | win rate of A [95 %] | wins / ties / losses | left out | first place |\n"
        "|---|---|---|---|---|---|---|\n"
        f"| {a} | {b} | {model} | {rate} | {result.wins} / {result.ties} / {result.losses} | "
        f"{result.pairs - result.judged} | {bias} |\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Judges two folders; see the module."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        result = _run(options)
    except (ValueError, RewardUnavailable, RewardUnusable) as error:
        parser.error(str(error))
    if result.win_rate is None:
        sys.exit("no pair has an answer in both orders")


def _run(options: argparse.Namespace) -> Preferences:
    question = QUESTION if options.question is None else options.question.read_text(encoding="utf-8")
    if "{prompt}" not in question:
        raise ValueError(f"--question: expected {{prompt}} somewhere in {options.question}")
    for name, low in (("parallel_requests", 1), ("retries", 0)):
        if getattr(options, name) < low:
            raise ValueError(f"--{name}: expected {low} or more, got {getattr(options, name)}")
    a, b = read_run(options.a), read_run(options.b)
    pairs = match(a, b)
    settings = {
        "model": options.model,
        "question": question,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        "pictures of A": digest(a),
        "pictures of B": digest(b),
    }
    server = ChatServer(
        url=options.server,
        model=options.model,
        timeout=options.timeout,
        max_tokens=options.max_tokens,
        seed=options.seed,
        key_variable=options.key_variable,
        key="pairwise",
    )
    server.open()
    options.output.mkdir(parents=True, exist_ok=True)
    log = AnswerLog(options.output / "answers.jsonl", settings)
    try:
        failures = judge(
            server,
            pairs,
            log,
            question=question,
            parallel_requests=options.parallel_requests,
            retries=options.retries,
            retry_wait=options.retry_wait,
        )
    finally:
        log.close()
        server.close()
    result = summarise(log.judgements, {sample: pair[0].prompt for sample, pair in pairs.items()})
    content = {"a": str(options.a), "b": str(options.b), "model": options.model} | asdict(result)
    (options.output / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    line = markdown(result, a=options.a.name, b=options.b.name, model=options.model)
    (options.output / "results.md").write_text(line, encoding="utf-8")
    print(table(result))
    if failures:
        print(f"{len(failures)} answers never came; start again to ask for them. The first: {failures[0]}")
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recast_pl.evaluation.pairwise",
        description="Which of two runs' pictures a vision-language model prefers; resumable.",
    )
    parser.add_argument("a", type=Path, help="folder that `predict` wrote")
    parser.add_argument("b", type=Path, help="folder that it is compared with")
    parser.add_argument("--server", required=True, help="OpenAI-compatible, e.g. http://gpu-2:8000/v1")
    parser.add_argument("--model", required=True, help="as the server calls it")
    parser.add_argument("--output", type=Path, required=True, help="folder for answers and results")
    parser.add_argument("--question", type=Path, help="file with a question of your own, {prompt} in it")
    parser.add_argument("--parallel_requests", type=int, default=8, help="answers waited for at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one answer")
    parser.add_argument("--max_tokens", type=int, default=1024, help="longest answer")
    parser.add_argument("--seed", type=int, default=0, help="sent along; the temperature is 0")
    parser.add_argument("--retries", type=int, default=3, help="further attempts after a failure")
    parser.add_argument("--retry_wait", type=float, default=1.0, help="seconds before the first, then doubled")
    parser.add_argument("--key_variable", help="environment variable with the API key")
    return parser


if __name__ == "__main__":
    main()
