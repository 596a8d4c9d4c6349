import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import prompt_batch

from recast_pl.rewards import Aesthetic, CLIPScore, HPSv2, PickScore, RewardSuite
from recast_pl.rewards.networks import backbones

CPU = torch.device("cpu")


@pytest.fixture
def count(monkeypatch):
    """Counts passes of pictures through any CLIP."""
    from transformers import CLIPModel

    sizes = []
    original = CLIPModel.get_image_features

    def counted(self, pixel_values, **kwargs):
        sizes.append(len(pixel_values))
        return original(self, pixel_values=pixel_values, **kwargs)

    monkeypatch.setattr(CLIPModel, "get_image_features", counted)
    return sizes


@pytest.fixture
def clip(reward_checkpoints):
    """A backbone of its own, its preparation, and the plain embedding to compare with."""
    source = reward_checkpoints.clip
    backbone = backbones.load_clip(source, dtype=torch.float32, device=CPU, key="key")
    preparation = backbones.load_preparation(source, key="key")

    def plain(images):
        with torch.no_grad():
            output = backbone.model.get_image_features(pixel_values=preparation.pixels(images))
        return output.pooler_output

    return backbone, preparation, plain


def pictures(seed, count=3, size=20):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def test_rewards_of_one_source_share_model_and_embedding(reward_checkpoints, count):
    files = reward_checkpoints
    suite = RewardSuite(
        rewards={
            "clipscore": CLIPScore(pretrained=files.clip),
            "aesthetic": Aesthetic(pretrained=files.clip, weights=files.aesthetic),
            "again": CLIPScore(pretrained=files.clip),
        },
        micro_batch_size=4,
    )
    suite.setup(CPU)
    models = [next(iter(reward.networks())) for reward in suite.rewards.values()]
    assert models[0] is models[1] is models[2]
    prompts = prompt_batch(["red circle"] * 6).prompts
    images = pictures(0, count=6)
    first = suite.score(images, prompts).values_RB
    assert sum(count) == 6  # each picture once, not once for each of the three
    torch.testing.assert_close(first[0], first[2], rtol=0, atol=0)
    suite.score(pictures(1, count=6), prompts)
    assert sum(count) == 12


def test_other_weights_and_other_precisions_are_not_shared(reward_checkpoints):
    files = reward_checkpoints
    rewards = [
        PickScore(pretrained=files.clip_h, processor=files.clip_h),
        HPSv2(weights=files.hps, tokenizer=files.clip_h),
        CLIPScore(pretrained=files.clip),
        CLIPScore(pretrained=files.clip, dtype="bfloat16"),
    ]
    for reward in rewards:
        reward.load(CPU)
    assert len({id(next(iter(reward.networks()))) for reward in rewards}) == 4


def test_the_last_reward_to_unload_frees_the_model(reward_checkpoints):
    first, second = (CLIPScore(pretrained=reward_checkpoints.clip) for _ in range(2))
    first.load(CPU)
    second.load(CPU)
    model = weakref.ref(next(iter(first.networks())))
    first.unload()
    gc.collect()
    assert model() is next(iter(second.networks()))
    second.score(pictures(0), prompt_batch(["a", "b", "c"]).prompts)
    second.unload()
    assert model() is None


def test_a_batch_is_embedded_once_and_its_views_apart(clip, count):
    backbone, preparation, plain = clip
    images = pictures(0, count=6)
    for _ in range(2):
        for part in (images, images[:3], images[3:], images.detach()[:3], images.transpose(2, 3)):
            embedded = backbone.embed_images(part, preparation)
            before = len(count)
            torch.testing.assert_close(embedded, plain(part), rtol=0, atol=1e-6)
            del count[before:]  # the comparison's own
    assert count == [6, 3, 3, 6]


def test_a_change_in_place_is_a_new_batch(clip, count):
    backbone, preparation, plain = clip
    images = pictures(0)
    old = backbone.embed_images(images, preparation)
    images[1].mul_(0.2)  # through a view
    new = backbone.embed_images(images, preparation)
    torch.testing.assert_close(new, plain(images), rtol=0, atol=1e-6)
    assert not torch.allclose(new[1], old[1], atol=1e-3)


def test_new_pictures_in_a_freed_batchs_place_are_new(clip):
    backbone, preparation, plain = clip
    places, reused = set(), 0
    for seed in range(30):
        images = pictures(seed)
        reused += images.data_ptr() in places
        places.add(images.data_ptr())
        embedded = backbone.embed_images(images, preparation)
        torch.testing.assert_close(embedded, plain(images), rtol=0, atol=1e-6)
        del images
    assert reused  # else this has shown nothing


def test_another_preparation_is_another_embedding(clip, count):
    backbone, preparation, _ = clip
    images = pictures(0)
    darker = backbones.Preparation("darker", lambda images: preparation.pixels(images / 2))
    assert not torch.allclose(
        backbone.embed_images(images, preparation), backbone.embed_images(images, darker), atol=1e-3
    )
    backbone.embed_images(images, preparation)
    assert len(count) == 2


def test_pictures_are_not_kept(clip):
    backbone, preparation, _ = clip
    images = pictures(0)
    backbone.embed_images(images, preparation)
    memory = torch.multiprocessing.reductions.StorageWeakRef(images.untyped_storage())
    alive = weakref.ref(images)
    del images
    assert alive() is None
    assert memory.expired()


def test_inference_tensors_are_embedded_afresh(clip, count):
    backbone, preparation, plain = clip
    with torch.inference_mode():
        images = pictures(0)
        backbone.embed_images(images, preparation)
        images.mul_(0.2)
        torch.testing.assert_close(backbone.embed_images(images, preparation), plain(images), rtol=0, atol=1e-6)
    assert len(count) == 3


def test_a_moved_model_forgets(clip, count):
    backbone, preparation, _ = clip
    images = pictures(0)
    backbone.embed_images(images, preparation)
    backbone.model.to(torch.float64)
    backbone.embed_images(images, preparation)
    assert len(count) == 2


def test_texts_that_repeat_are_embedded_once(reward_checkpoints, monkeypatch):
    from transformers import CLIPModel

    reward = CLIPScore(pretrained=reward_checkpoints.clip)
    reward.load(CPU)
    images, texts = pictures(0, count=4), ["red circle", "blue square", "red circle", "red circle"]
    single = [
        reward.score(images[i : i + 1], prompt_batch([text]).prompts).item() for i, text in enumerate(texts)
    ]
    rows = []
    original = CLIPModel.get_text_features
    monkeypatch.setattr(
        CLIPModel,
        "get_text_features",
        lambda self, input_ids, **kw: rows.append(len(input_ids)) or original(self, input_ids=input_ids, **kw),
    )
    assert reward.score(images, prompt_batch(texts).prompts).tolist() == pytest.approx(single, abs=1e-6)
    assert rows == [2]


def test_threads_agree(reward_checkpoints):
    files = reward_checkpoints
    rewards = [CLIPScore(pretrained=files.clip), Aesthetic(pretrained=files.clip, weights=files.aesthetic)] * 4
    for reward in rewards:
        reward.load(CPU)
    batches = [pictures(seed, count=2) for seed in range(len(rewards))]
    prompts = prompt_batch(["red circle", "blue square"]).prompts
    alone = [r.score(b.clone(), prompts) for r, b in zip(rewards, batches, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda r, b: r.score(b, prompts), rewards * 5, batches * 5))
    for one, other in zip(alone * 5, together, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
