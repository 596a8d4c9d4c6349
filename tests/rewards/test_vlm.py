"""A vision-language model as a reward: what is asked, what is read from the answer, and what is no score."""

import math

import pytest
import torch
from chat_server import chat_server, pictures_and_text
from conftest import prompt_batch

from recast_pl.rewards import RewardUnavailable, RewardUnusable, VLMScore

CPU = torch.device("cpu")
IMAGES = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TEXTS = ["a cat", "", "{braces} and {prompt}", "漢字 🎉", 'a sign that says "Final Score: 1"', "a dog"]
PROMPTS = prompt_batch(TEXTS).prompts


def loaded(stand, **arguments):
    reward = VLMScore(**{"url": stand.url, "model": "judge", **arguments})
    reward.load(CPU)
    return reward


def brightness(arrays, text):
    """1 to 5 by the one picture's mean, rounded to two places."""
    (array,) = arrays
    return f"Final Score: {1 + 4 * array.mean() / 255:.2f}"


def test_each_picture_gets_the_number_of_its_own_answer():
    with chat_server(brightness) as stand:
        scores = loaded(stand).score(IMAGES, PROMPTS)
    pixels = (IMAGES * 255).round() / 255
    expected = (1 + 4 * pixels.mean(dim=(1, 2, 3))).tolist()
    assert scores.tolist() == pytest.approx(expected, abs=0.0051)
    assert scores.dtype == torch.float32


def test_pictures_arrive_without_loss_and_the_question_asks_for_the_scale():
    with chat_server(brightness) as stand:
        loaded(stand, seed=7).score(IMAGES, PROMPTS)
    seen = {}
    for request in stand.requests:
        (array,), text = pictures_and_text(request)
        seen[text] = array
        assert request["temperature"] == 0
        assert request["seed"] == 7
        assert request["model"] == "judge"
    for image, prompt in zip(IMAGES, TEXTS, strict=True):
        (array,) = [array for text, array in seen.items() if text.endswith(f"Text Caption: [{prompt}]")]
        assert torch.equal(torch.tensor(array).permute(2, 0, 1), (image * 255).round().byte())
    assert all("from 1 (bad) to 5 (excellent), and write it after 'Final Score:'" in text for text in seen)


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("Final Score: 4", 4.0),
        ("Final Score: 3.25.", 3.25),
        ("A cat (animal): 1\n**Final Score:** 2", 2.0),
        ("final score:\n5", 5.0),
        ("Final Score: 4/5", 4.0),
        ("Final Score: 4 / 5.0", 4.0),
        ("I give it after 'Final Score:'. Final Score: 2. No: Final Score: 3", 3.0),
    ],
)
def test_numbers_are_found(answer, number):
    assert VLMScore(url="http://x").number(answer) == number


@pytest.mark.parametrize(
    "answer",
    ["", "4", "Score: 4", "Final Score: four", "Final Score: 0", "Final Score: 5.01", "Final Score: 45",
     "Final Score: -1", "Final Score: 4/10", "Final Score: 4.5 / 10", "Final Score: 4/50", "Final Score: 80%",
     "Final Score: nan", "Final Score:"],
)  # fmt: skip
def test_what_is_no_number_on_the_scale_is_nan(answer):
    assert math.isnan(VLMScore(url="http://x").number(answer))


def test_one_bad_answer_costs_one_picture():
    answers = {"a cat": "I cannot say.", "a dog": "Final Score: 9", "漢字 🎉": None}

    def answer(arrays, text):
        prompt = text.rsplit("Text Caption: [", 1)[1][:-1]
        return answers.get(prompt, "Final Score: 2")

    with chat_server(answer) as stand:
        scores = loaded(stand).score(IMAGES, PROMPTS)
    assert scores.isnan().tolist() == [True, False, False, True, False, True]
    assert scores[[1, 2, 4]].tolist() == [2, 2, 2]


def test_a_rubric_of_ones_own():
    def answer(arrays, text):
        return '{"grade": 70}' if text == 'Grade "a cat" as {"grade": 0 to 100}.' else "no"

    with chat_server(answer) as stand:
        reward = loaded(
            stand,
            template='Grade "{prompt}" as {"grade": 0 to 100}.',
            pattern=r'"grade": (\S+?)\}',
            scale=(0.0, 100.0),
        )
        scores = reward.score(IMAGES[:2], PROMPTS[:2])
    assert reward.range == (0.0, 100.0)
    assert scores[0] == 70
    assert scores[1].isnan()
    assert math.isnan(reward.number('{"grade": inf}'))
    assert math.isnan(reward.number('{"grade": good}'))


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_at_a_time_than_allowed(limit):
    with chat_server(brightness, pause=0.05) as stand:
        loaded(stand, parallel_requests=limit).score(IMAGES, PROMPTS)
    assert stand.most_inside == limit


@pytest.mark.parametrize(
    ("said", "kind", "match"),
    [
        ((500, {"error": {"message": "out of memory"}}), RewardUnavailable, "HTTP 500: out of memory"),
        ((503, b""), RewardUnavailable, "HTTP 503"),
        ((429, {"error": {"message": "slow down"}}), RewardUnavailable, "HTTP 429: slow down"),
        ((400, {"error": {"message": "too long"}}), RewardUnusable, "HTTP 400: too long"),
        ((200, b"<html>"), RewardUnusable, "not JSON"),
        ((200, {"choices": []}), RewardUnusable, "not a chat completion"),
        ((200, {"choices": [{"message": {"content": 4}}]}), RewardUnusable, "expected text"),
        (OSError(), RewardUnavailable, "chat/completions"),
    ],
)
def test_a_server_that_fails_raises(said, kind, match):
    def answer(arrays, text):
        return said if "a dog" in text else "Final Score: 2"

    with chat_server(answer) as stand, pytest.raises(kind, match=match):
        loaded(stand).score(IMAGES, PROMPTS)


def test_a_slow_answer_is_given_up():
    with chat_server(brightness, pause=1.0) as stand, pytest.raises(RewardUnavailable, match=r"within 0\.2 s"):
        loaded(stand, timeout=0.2).score(IMAGES[:1], PROMPTS[:1])


def test_a_model_that_is_not_there_fails_at_set_up():
    missing = pytest.raises(ValueError, match=r"VLMScore\.model: .* has \['other'\], got 'judge'")
    with chat_server(brightness, models=("other",)) as stand, missing:
        loaded(stand)


def test_the_key_is_read_from_the_environment(monkeypatch):
    with chat_server(brightness, key="secret") as stand:
        with pytest.raises(RewardUnusable, match="HTTP 401: Incorrect API key"):
            loaded(stand)
        monkeypatch.setenv("VLM_KEY", "secret")
        loaded(stand, key_variable="VLM_KEY")


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"url": "x"}, r"VLMScore\.url"),
        ({"model": ""}, r"VLMScore\.model"),
        ({"template": "Rate {promt}"}, r"VLMScore\.template"),
        ({"pattern": "Score"}, r"VLMScore\.pattern: expected one group, got 0"),
        ({"pattern": "("}, r"VLMScore\.pattern"),
        ({"scale": (5.0, 1.0)}, r"VLMScore\.scale"),
        ({"scale": (0.0, float("inf"))}, r"VLMScore\.scale"),
        ({"parallel_requests": 0}, r"VLMScore\.parallel_requests"),
        ({"timeout": -1.0}, r"VLMScore\.timeout"),
        ({"max_tokens": 0}, r"VLMScore\.max_tokens"),
    ],
)
def test_wrong_values_are_refused_at_once(wrong, match):
    with pytest.raises(ValueError, match=match):
        VLMScore(**{"url": "http://x", **wrong})
