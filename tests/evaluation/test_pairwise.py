"""Two runs before a judge whose taste is known, so that the outcome is known in advance."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from chat_server import chat_server
from conftest import prompt_batch

from recast_pl.evaluation import PictureWriter
from recast_pl.evaluation.pairs import match, read_run
from recast_pl.evaluation.pairwise import QUESTION, main, verdict_of
from recast_pl.evaluation.preferences import Judgement, points, summarise, wilson
from recast_pl.types import Scores

TEXTS = ["a cat", "a dog", "{prompt} \u2028 漢字", "rain", "snow", "sun"]
A = [200, 90, 90, 10, 60, 250]
B = [100, 100, 90, 20, 50, 240]  # A wins, loses, ties, loses, wins, wins: 3.5 of 6


def write_run(folder, greys, texts=TEXTS):
    """Grey pictures, by the writer that `predict` uses."""
    batch = prompt_batch(texts)
    images = torch.tensor(greys).float().div(255).reshape(-1, 1, 1, 1).expand(-1, 3, 4, 4)
    values = torch.zeros(1, len(greys))
    scores = Scores(names=("s",), values_RB=values, valid_RB=values.isfinite())
    prediction = SimpleNamespace(
        rollout=SimpleNamespace(images_B3HW=images), scores=scores, release=lambda: None
    )
    PictureWriter(folder=str(folder)).write_on_batch_end(
        SimpleNamespace(world_size=1, global_rank=0, log_dir=None),
        SimpleNamespace(seed=0),
        prediction,
        None,
        batch,
        0,
        0,
    )
    return folder


@pytest.fixture
def runs(tmp_path):
    return write_run(tmp_path / "a", A), write_run(tmp_path / "b", B)


def brighter(arrays, text):
    """Prefers the brighter picture; a tie where they are equal."""
    first, second = (int(array[0, 0, 0]) for array in arrays)
    verdict = "tie" if first == second else "1" if first > second else "2"
    return f"The verdict: first the reasons.\n\n**Verdict: {verdict}**"


def caption(text):
    before, after = QUESTION.split("{prompt}")
    assert text.startswith(before)
    assert text.endswith(after)
    return text[len(before) : -len(after)]


def run(stand, runs, *extra):
    output = runs[0].parent / "out"
    main(
        [*map(str, runs), "--server", stand.url, "--model", "judge", "--output", str(output),
         "--retry_wait", "0.01", *extra]
    )  # fmt: skip
    return json.loads((output / "results.json").read_text())


# ------------------------------------------------------------------ statistics, by hand


def test_points_are_those_of_a():
    assert [points(v, "AB") for v in ("first", "second", "tie")] == [1, 0, 0.5]
    assert [points(v, "BA") for v in ("first", "second", "tie")] == [0, 1, 0.5]


def judgements(table):
    """Verdicts by pair, as `12` for first, then second place; `.` unread, `-` missing, `t` tie."""
    words = {"1": "first", "2": "second", "t": "tie", ".": None}
    return [
        Judgement(sample=sample, order=order, verdict=words[letter])
        for sample, letters in enumerate(table)
        for order, letter in zip(("AB", "BA"), letters, strict=True)
        if letter != "-"
    ]


def test_a_small_table_by_hand():
    #          1     0    ½: first place twice  ¾     ½     left out     left out
    table = ["12", "21", "11", "1t", "tt", "1.", "-2"]
    result = summarise(judgements(table), {i: f"prompt {i}" for i in range(len(table))})
    assert (result.pairs, result.judged, result.prompts) == (7, 5, 5)
    assert result.win_rate == pytest.approx((1 + 0 + 0.5 + 0.75 + 0.5) / 5)
    assert (result.wins, result.ties, result.losses) == (2, 2, 1)
    # decided: 12 21 11 1 1 2 → first five and one of the left out: 1 2 2 1 1 1 1 1 2
    assert result.first_place == pytest.approx(6 / 9)
    assert result.consistent == pytest.approx(3 / 5)
    assert (result.unparsable, result.missing) == (1, 1)


def test_no_pair_no_rate():
    result = summarise(judgements(["1.", "--"]), {0: "a", 1: "b"})
    assert (result.win_rate, result.low, result.high, result.consistent) == (None, None, None, None)
    assert (result.judged, result.unparsable, result.missing) == (0, 1, 2)


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [
        (0.5, 10, 0.2366, 0.7634),  # by hand: (0.5 + 0.1921 ± 1.96 √(0.025 + 0.0096)) / 1.3841
        (81 / 263, 263, 0.2553, 0.3662),  # Newcombe 1998, table I: 0.2553 to 0.3662
        (15 / 148, 148, 0.0624, 0.1605),  # the same table
        (0 / 20, 20, 0.0, 0.1611),
        (1 / 29, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_published_values(share, count, low, high):
    assert wilson(share, count) == pytest.approx((low, high), abs=6e-5)


def test_wilson_solves_its_own_definition():
    """The ends are where the share lies z standard errors of the end away."""
    share, count = 0.37, 53
    for end in wilson(share, count):
        assert abs(share - end) == pytest.approx(1.959963984540054 * math.sqrt(end * (1 - end) / count))


def test_pictures_of_one_prompt_count_as_one():
    table = ["12", "12", "21", "12"]
    apart = summarise(judgements(table), {i: str(i) for i in range(4)})
    together = summarise(judgements(table), {i: str(i // 2) for i in range(4)})
    assert apart.win_rate == together.win_rate == 0.75
    assert (apart.low, apart.high) == wilson(0.75, 4)
    assert (together.low, together.high) == wilson(0.75, 2)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("Verdict: 1", "first"),
        ("Fine.\nverdict: 2.", "second"),
        ("**Verdict: Tie**\n", "tie"),
        ("Verdict: image 2", "second"),
        ('"Verdict: 1"\nOn second thought:\nVerdict: 2', "second"),
        ("", None),
        ("1", None),
        ("Verdict: 3", None),
        ("Verdict: 12", None),
        ("Verdict: 1 or 2", None),
        ("I would say Verdict: 1 or so", None),
        ("Verdict: neither", None),
    ],
)
def test_verdicts_are_read_strictly(answer, verdict):
    assert verdict_of(answer) == verdict


# ------------------------------------------------------------------ the command


def test_the_win_rate_is_the_known_one(runs, capsys):
    with chat_server(brighter) as stand:
        result = run(stand, runs)
    assert result["win_rate"] == pytest.approx(3.5 / 6)
    assert (result["wins"], result["ties"], result["losses"]) == (3, 1, 2)
    assert (result["low"], result["high"]) == pytest.approx(wilson(3.5 / 6, 6))
    assert result["first_place"] == 0.5
    assert result["consistent"] == 1
    assert (result["unparsable"], result["missing"]) == (0, 0)
    assert len(stand.requests) == 12
    asked = sorted(caption(request["messages"][0]["content"][-1]["text"]) for request in stand.requests)
    assert asked == sorted(TEXTS * 2)
    assert re.search(r"win rate of A +58\.3 %", capsys.readouterr().out)
    line = (runs[0].parent / "out" / "results.md").read_text().splitlines()[-1]
    assert line.startswith("| a | b | judge | 58.3 % [")
    assert line.endswith("| 3 / 1 / 2 | 0 | 50.0 % |")


def test_the_other_way_round_is_the_complement(runs):
    with chat_server(brighter) as stand:
        assert run(stand, runs[::-1])["win_rate"] == pytest.approx(2.5 / 6)


def test_a_judge_who_sees_only_places_decides_nothing(runs):
    with chat_server(lambda arrays, text: "Verdict: 1") as stand:
        result = run(stand, runs)
    assert (result["win_rate"], result["first_place"], result["consistent"]) == (0.5, 1.0, 0.0)
    assert result["ties"] == 6


def test_what_cannot_be_read_is_counted_and_never_scored(runs):
    def answer(arrays, text):
        if caption(text) == "a cat":
            return "Both are lovely."
        if caption(text) == "rain" and arrays[0][0, 0, 0] == 10:  # A first
            return None
        return brighter(arrays, text)

    with chat_server(answer) as stand:
        result = run(stand, runs)
        assert (result["judged"], result["pairs"], result["unparsable"]) == (4, 6, 3)
        assert result["win_rate"] == pytest.approx(2.5 / 4)
        run(stand, runs)
    assert len(stand.requests) == 12  # an unreadable answer is an answer: not asked again


def test_a_hiccup_is_asked_again(runs):
    failed = set()

    def answer(arrays, text):
        key = (caption(text), int(arrays[0][0, 0, 0]))
        if key not in failed:
            failed.add(key)
            return OSError() if len(failed) % 2 else (503, {"error": "busy"})
        return brighter(arrays, text)

    with chat_server(answer) as stand:
        result = run(stand, runs)
    assert result["win_rate"] == pytest.approx(3.5 / 6)
    assert result["missing"] == 0
    assert len(stand.requests) == 12 + len(failed)


def test_errors_are_counted_and_a_second_start_asks_for_them_only(runs, capsys):
    broken = True

    def answer(arrays, text):
        if broken and caption(text) in ("a cat", "rain"):
            return (500, b"") if caption(text) == "rain" else (400, {"error": {"message": "no cats"}})
        return brighter(arrays, text)

    with chat_server(answer) as stand:
        result = run(stand, runs, "--retries", "2")
        assert (result["missing"], result["judged"]) == (4, 4)
        assert result["win_rate"] == pytest.approx(2.5 / 4)
        assert len(stand.requests) == 8 + 2 + 2 * 3  # what may pass is tried three times, what will not, once
        assert "4 answers never came" in capsys.readouterr().out
        broken = False
        stand.requests.clear()
        assert run(stand, runs)["win_rate"] == pytest.approx(3.5 / 6)
        assert len(stand.requests) == 4


def test_an_answer_cut_short_by_a_kill_is_asked_again(runs):
    log = runs[0].parent / "out" / "answers.jsonl"
    with chat_server(brighter) as stand:
        whole = run(stand, runs)
        log.write_bytes(log.read_bytes()[:-7])
        stand.requests.clear()
        assert run(stand, runs) == whole
    assert len(stand.requests) == 1
    assert len(log.read_bytes().splitlines()) == 13
    assert all(json.loads(line) for line in log.read_bytes().splitlines())


def test_an_answer_cut_in_the_middle_of_an_emoji_can_be_kept(runs):
    with chat_server(lambda arrays, text: "Verdict: 1\n\ud83d") as stand:
        assert run(stand, runs)["first_place"] == 1


def test_answers_under_other_settings_are_not_mixed_in(runs, capsys):
    with chat_server(brighter) as stand:
        run(stand, runs)
        write_run(runs[1], [100, 100, 90, 20, 50, 241])
        with pytest.raises(SystemExit):
            run(stand, runs, "--seed", "1")
    assert "another pictures of B and seed; choose another --output" in capsys.readouterr().err


def test_no_answer_at_all_is_a_failure(runs):
    with chat_server(lambda arrays, text: "?") as stand, pytest.raises(SystemExit, match="no pair"):
        run(stand, runs)


def test_a_question_of_ones_own(runs, tmp_path):
    path = tmp_path / "question.txt"
    path.write_text("Prettier for {prompt}? Say Verdict: 1, 2 or tie.")
    with chat_server(lambda arrays, text: f"Verdict: {'1' if 'Prettier for' in text else '?'}") as stand:
        assert run(stand, runs, "--question", str(path))["judged"] == 6
        path.write_text("Prettier?")
        with pytest.raises(SystemExit):
            run(stand, runs, "--question", str(path))


@pytest.mark.parametrize(
    ("greys", "texts", "match"),
    [
        (B[:5], TEXTS[:5], "1 samples are in A only, the first one 5"),
        ([*B, 1], [*TEXTS, "x"], "1 samples are in B only, the first one 6"),
        (B, [*TEXTS[:3], "hail", *TEXTS[4:]], "sample 3 has the prompt 'rain' in A and 'hail' in B"),
    ],
)
def test_runs_of_different_prompts_are_refused(runs, tmp_path, greys, texts, match):
    other = write_run(tmp_path / "other", greys, texts)
    with pytest.raises(ValueError, match=match):
        match_runs(runs[0], other)


def match_runs(a, b):
    return match(read_run(a), read_run(b))


def test_a_folder_that_is_not_whole_is_refused(runs, tmp_path):
    with pytest.raises(ValueError, match=r"no pictures\*\.jsonl"):
        read_run(tmp_path)
    lines = (runs[0] / "pictures.jsonl").read_bytes()
    (runs[0] / "pictures-1.jsonl").write_bytes(lines)  # a second process's file with the same samples
    with pytest.raises(ValueError, match=r"line 1: sample 0 is there twice"):
        read_run(runs[0])
    (runs[0] / "pictures-1.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"pictures-1\.jsonl, line 1: not a line"):
        read_run(runs[0])
    (runs[0] / "pictures-1.jsonl").unlink()
    (runs[0] / "00003.png").unlink()
    with pytest.raises(ValueError, match=r"line 4: .*00003\.png is missing"):
        read_run(runs[0])


def test_a_server_without_the_model_is_refused_before_anything_is_written(runs, capsys):
    with chat_server(brighter, models=("other",)) as stand, pytest.raises(SystemExit):
        run(stand, runs)
    assert "has ['other'], got 'judge'" in capsys.readouterr().err
    assert not (runs[0].parent / "out").exists()
