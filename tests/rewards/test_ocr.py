import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from conftest import prompt_batch
from PIL import Image, ImageDraw, ImageFont

from recast_pl.prompts import TextFile
from recast_pl.rewards import OCR
from recast_pl.rewards.ocr import edit_distance, target_text, text_score
from recast_pl.types import Prompt

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
WORDS = [
    "Harbour",
    "Library",
    "Coffee",
    "Danger",
    "Winter",
    "Market",
    "Open late",
    "Welcome",
    "Garden",
    "EXIT 24",
]
# PIL's own scalable font, then matplotlib's; letter height in pixels
TYPES = [
    (None, 22), ("DejaVuSans.ttf", 24), ("DejaVuSerif-Bold.ttf", 20), ("DejaVuSansMono.ttf", 18),
]  # fmt: skip


def prompts(*texts, metadata=None):
    return prompt_batch(list(texts), metadata=metadata).prompts


def rendered(word, font, height, *, size=128):
    image = Image.new("RGB", (size, size), "ivory")
    face = ImageFont.load_default(height) if font is None else ImageFont.truetype(FONTS / font, height)
    ImageDraw.Draw(image).text((size / 2, size / 2), word, fill="navy", font=face, anchor="mm")
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255


@pytest.fixture(scope="module")
def reward():
    pytest.importorskip("rapidocr")
    pytest.importorskip("onnxruntime")
    reward = OCR(detection_side=128)
    reward.load(torch.device("cpu"))
    return reward


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("", "abc", 3), ("abc", "abc", 0), ("flaw", "lawn", 2), ("sunday", "saturday", 3),
     ("ab", "ba", 2), ("intention", "execution", 5)],
)  # fmt: skip
def test_edit_distance_of_known_pairs(a, b, distance):
    assert edit_distance(a, b) == edit_distance(b, a) == distance


@pytest.mark.parametrize(
    ("target", "recognised", "score"),
    [
        ("Hello World", "helloworld", 1.0),  # case and white space do not count
        ("hello", "xx HEL LO yy", 1.0),  # a substring
        ("hello", "hallo", 0.8),
        ("hello", "", 0.0),
        ("hello", "a text that is longer than the target", 0.0),  # never below 0
        ("abcd", "abxy", 0.5),
        ("café", "CAFE\u0301", 1.0),  # the accent composed and apart
        ("漢字", "漢子", 0.5),
    ],
)
def test_text_score_by_hand(target, recognised, score):
    assert text_score(target, recognised) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ('a sign that says "Open"', "Open"),
        ("a sign that says “Open late”", "Open late"),
        ("ein Schild mit „Offen“", "Offen"),
        ('"One" above "Two"', "One"),  # the first pair
        ("it's a sign with “Don't”", "Don't"),  # apostrophes are no quotes
        ('mixed “Hello"', "Hello"),
    ],
)
def test_target_is_the_first_pair_of_quotes(text, target):
    assert target_text(Prompt(text=text, metadata={})) == target
    assert OCR().check(Prompt(text=text, metadata={})) is None


def test_metadata_text_goes_before_quotes():
    assert target_text(Prompt(text='a 5" screen saying "Hi"', metadata={"text": "Hi"})) == "Hi"


@pytest.mark.parametrize(
    ("text", "metadata", "match"),
    [
        ("a sign", {}, "no text in double quotes.*a sign"),
        ('a sign saying "Open', {}, "no text in double quotes"),
        ('a sign saying "" and "Open"', {}, "first pair of quotes holds no text"),
        ("a sign saying “ ”", {}, "first pair of quotes holds no text"),
        ('a sign saying "Open"', {"text": ""}, "metadata `text` holds no text"),
        ('a sign saying "Open"', {"text": None}, "metadata `text` holds no text"),
    ],
)
def test_a_prompt_without_target_is_refused_by_name(text, metadata, match):
    prompt = Prompt(text=text, metadata=metadata)
    with pytest.raises(ValueError, match=match):
        OCR().score(torch.zeros(1, 3, 8, 8), [prompt])
    assert text in OCR().check(prompt)


@pytest.mark.parametrize(("font", "height"), TYPES)
def test_rendered_words_are_read(reward, font, height):
    images = torch.stack([rendered(word, font, height) for word in WORDS])
    right = reward.score(images, prompts(*(f'a sign "{word}"' for word in WORDS)))
    wrong = reward.score(images.roll(1, dims=0), prompts(*(f'a sign "{word}"' for word in WORDS)))
    assert right.shape == (len(WORDS),)
    assert (right >= 0.95).all(), dict(zip(WORDS, right.tolist(), strict=True))
    assert (wrong <= 0.5).all(), dict(zip(WORDS, wrong.tolist(), strict=True))


def test_a_picture_without_text_is_a_true_zero(reward):
    generator = torch.Generator().manual_seed(0)
    images = torch.stack([torch.ones(3, 64, 64), torch.zeros(3, 64, 64),
                          torch.rand(3, 64, 64, generator=generator)])  # fmt: skip
    assert reward.score(images, prompts(*['a sign "Harbour"'] * 3)).tolist() == [0.0, 0.0, 0.0]


def test_lines_are_read_from_the_top(reward):
    image = Image.new("RGB", (160, 160), "white")
    pen, face = ImageDraw.Draw(image), ImageFont.load_default(28)
    for line, height in (("GOOD", 40), ("MORNING", 110)):
        pen.text((80, height), line, fill="black", font=face, anchor="mm")
    picture = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].float() / 255
    assert reward.score(picture, prompts('a poster "Good morning"')).item() == 1.0


def test_flags_of_an_earlier_call_do_not_stick(reward):
    picture = rendered("Library", None, 22)
    before = reward.score(picture[None], prompts('"Library"'))
    reward._engine(np.zeros((64, 64, 3), np.uint8), use_det=False, use_rec=True, text_score=1.0)
    assert torch.equal(reward.score(picture[None], prompts('"Library"')), before)
    assert before.item() == 1.0


def test_engine_errors_are_raised_and_never_a_score():
    class Broken:
        def __call__(self, *_, **__):
            raise RuntimeError("engine is down")

    class Halfway:
        """Boxes without texts, as RapidOCR answers where its recogniser failed."""

        def __call__(self, *_, **__):
            return type("TextDetOutput", (), {"boxes": np.zeros((1, 4, 2))})()

    reward = OCR()
    for engine, match in ((Broken(), "engine is down"), (Halfway(), "failed to recognise")):
        reward._engine = engine
        with pytest.raises(RuntimeError, match=match):
            reward.score(torch.ones(1, 3, 8, 8), prompts('"Open"'))


@pytest.mark.parametrize("package", ["rapidocr", "onnxruntime"])
def test_an_absent_package_names_the_extra(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"extra `ocr`.*'\.\[ocr\]'"):
        OCR().load(torch.device("cpu"))


@pytest.mark.parametrize(
    "wrong", [{"detection_side": 0}, {"min_confidence": 1.5}, {"min_confidence": float("nan")}]
)
def test_wrong_settings_name_their_key(wrong):
    with pytest.raises(ValueError, match=rf"OCR\.{next(iter(wrong))}"):
        OCR(**wrong)


def test_prompt_lists_of_text_files_can_be_scored(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('A neon sign reading "Open"\nA cake with “Happy Day” on it\n', encoding="utf-8")
    assert [target_text(prompt) for prompt in TextFile(path=str(path)).prompts()] == ["Open", "Happy Day"]
