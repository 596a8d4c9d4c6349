import io

import numpy as np
import pytest
import torch
from conftest import prompt_batch
from PIL import Image

from recast_pl.rewards import (
    CLIPScore,
    Composition,
    JPEGCompressibility,
    JPEGIncompressibility,
    JudgeSuite,
    Reward,
    RewardFailure,
    RewardSuite,
    Sharpness,
)
from recast_pl.scenes import draw, sample_scene


@pytest.fixture(scope="module")
def pictures():
    """Six drawn scenes and their prompts."""
    generator = np.random.default_rng(0)
    scenes = [sample_scene(generator, held_out=False) for _ in range(6)]
    images = torch.from_numpy(np.stack([draw(scene, generator) for scene in scenes]))
    batch = prompt_batch([s.caption for s in scenes], metadata=[s.metadata for s in scenes])
    return images, batch.prompts


def test_clipscore_equals_an_independent_path(clip_folder, pictures):
    from transformers import CLIPModel, CLIPTokenizer

    images, prompts = pictures
    reward = CLIPScore(pretrained=str(clip_folder))
    reward.load(torch.device("cpu"))
    model = CLIPModel.from_pretrained(clip_folder, dtype=torch.float32).eval()
    tokenizer = CLIPTokenizer.from_pretrained(clip_folder)
    mean = np.array([0.48145466, 0.4578275, 0.40821073])
    std = np.array([0.26862954, 0.26130258, 0.27577711])
    for image, prompt, score in zip(images, prompts, reward.score(images, prompts), strict=True):
        pil = Image.fromarray((image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))
        small = np.asarray(pil.resize((16, 16), Image.Resampling.BICUBIC)) / 255
        pixels = torch.from_numpy(((small - mean) / std).transpose(2, 0, 1)[None]).float()
        with torch.no_grad():
            output = model(**tokenizer(prompt.text, return_tensors="pt"), pixel_values=pixels)
        expected = (output.image_embeds * output.text_embeds).sum()
        torch.testing.assert_close(score, expected, atol=1e-5, rtol=0)


def test_jpeg_is_the_size_of_the_file(pictures):
    images, prompts = pictures
    array = (images[0].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format="JPEG", quality=95)
    size = len(buffer.getvalue()) / 1000
    assert JPEGIncompressibility().score(images[:1], prompts[:1]).item() == pytest.approx(size)
    assert JPEGCompressibility().score(images[:1], prompts[:1]).item() == pytest.approx(-size)


def test_blur_and_low_contrast_cost_sharpness_and_grain_is_no_detail():
    from scipy import ndimage

    generator = np.random.default_rng(1)
    scenes = [sample_scene(generator, held_out=False) for _ in range(20)]
    clean = np.stack([draw(scene, generator, perfect=True) for scene in scenes])
    blurred = ndimage.gaussian_filter(clean, (0, 0, 1.5, 1.5))
    flat = 0.5 + 0.5 * (clean - 0.5)
    grain = clean + 0.1 * generator.normal(size=clean.shape).astype(np.float32)
    score = {
        name: Sharpness().score(torch.from_numpy(images).float().clamp(0, 1), []).mean().item()
        for name, images in (("clean", clean), ("blurred", blurred), ("flat", flat), ("grain", grain))
    }
    assert score["blurred"] < 0.6 * score["clean"]
    assert score["flat"] == pytest.approx(0.5 * score["clean"], rel=0.02)
    assert score["grain"] < 1.05 * score["clean"]


def test_composition_knows_a_right_picture_from_a_wrong_one(pictures):
    images, prompts = pictures
    right = Composition().score(images, prompts)
    wrong = Composition().score(images.roll(1, dims=0), prompts)
    assert right.mean() > 0.95
    assert wrong.mean() < 0.7


def test_composition_of_single_clauses(pictures):
    images, prompts = pictures
    parts = [
        Composition(clauses=[clause]).score(images, prompts) for clause in ("count", "shape", "background")
    ]
    three = Composition(clauses=["count", "shape", "background"]).score(images, prompts)
    torch.testing.assert_close(three, sum(parts) / 3)
    bare = prompt_batch(["a circle"], metadata=[{"include": [{"class": "circle"}]}]).prompts[0]
    assert Composition().check(bare) is None
    assert "none of the clauses position" in Composition(clauses=["position"]).check(bare)
    with pytest.raises(ValueError, match=r"Composition\.clauses: expected some of count, .* got \['size'\]"):
        Composition(clauses=["size"])


class Faulty(Reward):
    """Returns what it is told to, or raises it."""

    range = (0.0, 1.0)

    def __init__(self, answer):
        self.answer = answer

    def score(self, images_B3HW, prompts):
        if isinstance(self.answer, Exception):
            raise self.answer
        return torch.tensor(self.answer)


FAULTS = {
    "exception": RuntimeError("server is down"),
    "short list": [0.5] * 5,
    "wrong shape": [[0.5] * 6],
    "not finite": [0.5, float("nan"), 0.5, 0.5, float("inf"), 0.5],
    "out of range": [0.5, 0.5, -1.0, 0.5, 0.5, 0.5],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_ends_the_run_and_names_the_reward(pictures, fault):
    suite = RewardSuite(rewards={"good": Faulty([0.1] * 6), "bad": Faulty(FAULTS[fault])})
    suite.setup(torch.device("cpu"))
    with pytest.raises(RewardFailure, match=r"rewards.rewards.bad"):
        suite.score(*pictures)


@pytest.mark.parametrize(
    ("fault", "failed"),
    [("exception", range(6)), ("short list", range(6)), ("wrong shape", range(6)),
     ("not finite", (1, 4)), ("out of range", (2,))],
)  # fmt: skip
def test_a_masked_failure_is_never_a_number(pictures, fault, failed):
    suite = RewardSuite(rewards={"good": Faulty([0.0] * 6), "bad": Faulty(FAULTS[fault])}, on_failure="mask")
    suite.setup(torch.device("cpu"))
    scores = suite.score(*pictures)
    assert scores.valid_RB[0].all()
    assert (scores.values_RB[0] == 0).all()  # a true 0 is a score
    assert (~scores.valid_RB[1]).nonzero().flatten().tolist() == list(failed)
    assert scores.values_RB[1][~scores.valid_RB[1]].isnan().all()


def test_micro_batches_keep_their_order(pictures):
    class Mean(Reward):
        def score(self, images_B3HW, prompts):
            assert len(images_B3HW) <= 4
            return images_B3HW.mean(dim=(1, 2, 3))

    suite = RewardSuite(rewards={"mean": Mean()}, micro_batch_size=4)
    suite.setup(torch.device("cpu"))
    images, prompts = pictures
    torch.testing.assert_close(suite.score(images, prompts).values_RB[0], images.mean(dim=(1, 2, 3)))


@pytest.mark.parametrize(
    ("budgets", "match"),
    [
        ({"a": 1.0}, r"rewards\.budgets.*lacks b"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, r"rewards\.budgets: there is no reward c; the rewards are a, b"),
        ({"a": -1.0, "b": 1.0}, r"rewards\.budgets\.a"),
        ({"a": float("nan"), "b": 1.0}, r"rewards\.budgets\.a"),
        ({"a": 0.0, "b": 0.0}, r"rewards\.budgets: all are 0"),
    ],
)
def test_wrong_budgets_name_their_key(budgets, match):
    with pytest.raises(ValueError, match=match):
        RewardSuite(rewards={"a": Faulty([1.0]), "b": Faulty([1.0])}, budgets=budgets)


def test_a_suite_without_rewards_is_refused_but_judges_may_be_none():
    with pytest.raises(ValueError, match=r"rewards.rewards"):
        RewardSuite(rewards={})
    assert JudgeSuite().names == ()


def test_missing_metadata_names_reward_key_and_prompt():
    suite = RewardSuite(rewards={"composition": Composition()})
    prompts = prompt_batch(["fine", "bare"], metadata=[{"include": []}, {}]).prompts
    with pytest.raises(
        ValueError, match=r"'composition' needs the metadata 'include'.*prompt 1 of data\.train.*bare"
    ):
        suite.check_prompts(prompts, origin="data.train")


def test_pictures_and_prompts_must_be_as_many(pictures):
    suite = RewardSuite(rewards={"jpeg": JPEGIncompressibility()})
    suite.setup(torch.device("cpu"))
    with pytest.raises(ValueError, match="6 pictures but 5 prompts"):
        suite.score(pictures[0], pictures[1][:5])
