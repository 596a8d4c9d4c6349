"""Each network reward against its recipe, written down by hand on the same weights."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import prompt_batch
from miniature_rewards import clip_h_tokenizer, head_state, imagereward_state, openclip_state, save_clip
from PIL import Image
from torch.nn import functional as F

from recast_pl.rewards import Aesthetic, CLIPScore, HPSv2, ImageReward, PickScore
from recast_pl.rewards.hps import fit_into_square

CPU = torch.device("cpu")
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
TEXTS = ("red circle", "", "two blue squares above a green triangle " * 9, "漢字 🎉")


@pytest.fixture(scope="module")
def images():
    noise = torch.rand(len(TEXTS), 3, 6, 6, generator=torch.Generator().manual_seed(0))
    return F.interpolate(noise, size=(48, 48), mode="bilinear")


def prepared(image, size):
    """A square picture through uint8 and PIL to a CLIP's pixels."""
    array = (image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
    small = Image.fromarray(array).resize((size, size), Image.Resampling.BICUBIC)
    return (torch.from_numpy(np.asarray(small) / 255).permute(2, 0, 1).float() - MEAN) / STD


def loaded(reward):
    reward.load(CPU)
    return reward


def attention(query, key, value, heads, mask=None):
    """[L, D], [M, D], [M, D] → [L, D], one head after the other."""
    width = query.shape[1] // heads
    outputs = []
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        scores = query[:, part] @ key[:, part].T / math.sqrt(width)
        if mask is not None:
            scores = scores + mask
        outputs.append(scores.softmax(dim=1) @ value[:, part])
    return torch.cat(outputs, dim=1)


def norm(state, name, x, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)


def dense(state, name, x):
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def head(state, x, prefix=""):
    for number in (0, 2, 4, 6, 7):
        x = dense(state, f"{prefix}layers.{number}", x)
    return x.squeeze(-1)


def openclip_tower(state, prefix, x, heads, mask=None):
    for number in range(2):
        block = f"{prefix}transformer.resblocks.{number}."
        y = norm(state, f"{block}ln_1", x)
        y = y @ state[f"{block}attn.in_proj_weight"].T + state[f"{block}attn.in_proj_bias"]
        x = x + dense(state, f"{block}attn.out_proj", attention(*y.chunk(3, dim=1), heads, mask))
        y = F.gelu(dense(state, f"{block}mlp.c_fc", norm(state, f"{block}ln_2", x)))
        x = x + dense(state, f"{block}mlp.c_proj", y)
    return x


def openclip_image(state, pixels):
    patches = F.conv2d(pixels[None], state["visual.conv1.weight"], stride=8)[0].flatten(1).T
    x = torch.cat([state["visual.class_embedding"][None], patches]) + state["visual.positional_embedding"]
    x = openclip_tower(state, "visual.", norm(state, "visual.ln_pre", x), heads=16)
    return norm(state, "visual.ln_post", x[0]) @ state["visual.proj"]


def openclip_text(state, text, tokenizer, context=16):
    """OpenCLIP's way: cut, end of text in the last place, zeros after it, pooled at the highest id."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    ids = [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id][:context]
    ids[-1] = tokenizer.eos_token_id
    tokens = torch.tensor(ids + [0] * (context - len(ids)))
    mask = torch.full((context, context), -torch.inf).triu(1)
    x = openclip_tower(
        state, "", state["token_embedding.weight"][tokens] + state["positional_embedding"], 16, mask
    )
    return norm(state, "ln_final", x)[tokens.argmax()] @ state["text_projection"]


def test_hps_equals_openclip(reward_checkpoints, images):
    reward = loaded(HPSv2(weights=reward_checkpoints.hps, tokenizer=reward_checkpoints.clip_h))
    tokenizer = clip_h_tokenizer()
    state = openclip_state(vocabulary=len(tokenizer))
    expected = [
        F.cosine_similarity(
            openclip_image(state, prepared(image, 16)), openclip_text(state, text, tokenizer), dim=0
        )
        for image, text in zip(images, TEXTS, strict=True)
    ]
    scores = reward.score(images, prompt_batch(TEXTS).prompts)
    torch.testing.assert_close(scores, torch.stack(expected), atol=1e-5, rtol=0)


def test_hps_reads_a_bare_state_dict_of_any_name(tmp_path, reward_checkpoints, images):
    file = tmp_path / "mine.pt"
    torch.save(openclip_state(vocabulary=len(clip_h_tokenizer())), file)
    prompts = prompt_batch(TEXTS).prompts
    bare = loaded(HPSv2(weights=str(file), tokenizer=reward_checkpoints.clip_h)).score(images, prompts)
    nested = loaded(HPSv2(weights=reward_checkpoints.hps, tokenizer=reward_checkpoints.clip_h))
    assert torch.equal(bare, nested.score(images.clone(), prompts))


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [
        (64, 32, (0, 16), (4, 12)),
        (32, 64, (4, 12), (0, 16)),
        (16, 8, (0, 16), (4, 12)),
        (48, 48, (0, 16), (0, 16)),
    ],
)
def test_hps_fits_the_longest_side_and_pads_with_black(height, width, rows, columns):
    pixels = fit_into_square(torch.ones(1, 3, height, width), size=16)[0]
    values = pixels * STD + MEAN
    inside = torch.zeros(16, 16, dtype=torch.bool)
    inside[slice(*rows), slice(*columns)] = True
    torch.testing.assert_close(values, inside.float().expand(3, -1, -1), atol=1e-6, rtol=0)


def test_pickscore_is_the_models_own_logit_over_26(reward_checkpoints, images):
    from transformers import CLIPModel

    files = reward_checkpoints
    reward = loaded(PickScore(pretrained=files.clip_h, processor=files.clip_h))
    model, tokenizer = CLIPModel.from_pretrained(files.clip_h).eval(), clip_h_tokenizer()
    scores = reward.score(images, prompt_batch(TEXTS).prompts)
    for image, text, score in zip(images, TEXTS, scores, strict=True):
        tokens = tokenizer(text, truncation=True, max_length=16, return_tensors="pt")
        with torch.no_grad():
            logit = model(**tokens, pixel_values=prepared(image, 16)[None]).logits_per_image
        assert score.item() == pytest.approx(logit.item() / 26, abs=1e-5)


def test_aesthetic_is_the_head_of_the_normalised_embedding(reward_checkpoints, images):
    from transformers import CLIPModel

    files = reward_checkpoints
    reward = loaded(Aesthetic(pretrained=files.clip, weights=files.aesthetic))
    model = CLIPModel.from_pretrained(files.clip).eval()
    pixels = torch.stack([prepared(image, 16) for image in images])
    with torch.no_grad():
        embedding = model.get_image_features(pixel_values=pixels).pooler_output
    unit = embedding / embedding.square().sum(dim=1, keepdim=True).sqrt()
    scores = reward.score(images, prompt_batch(TEXTS).prompts)
    torch.testing.assert_close(scores, head(head_state(16, seed=4), unit), atol=1e-5, rtol=0)


def blip_image(state, pixels):
    patches = F.conv2d(
        pixels[None], state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=16
    )
    x = torch.cat([state["cls_token"][0], patches[0].flatten(1).T]) + state["pos_embed"][0]
    for number in range(2):
        block = f"blocks.{number}."
        qkv = dense(state, f"{block}attn.qkv", norm(state, f"{block}norm1", x, 1e-6)).chunk(3, dim=1)
        x = x + dense(state, f"{block}attn.proj", attention(*qkv, heads=2))
        y = F.gelu(dense(state, f"{block}mlp.fc1", norm(state, f"{block}norm2", x, 1e-6)))
        x = x + dense(state, f"{block}mlp.fc2", y)
    return norm(state, "norm", x, 1e-6)


def blip_text(state, tokens, image):
    """BERT without padding: in each layer the text attends to itself, then to the picture."""
    x = state["embeddings.word_embeddings.weight"][tokens]
    x = x + state["embeddings.position_embeddings.weight"][: len(tokens)]
    x = norm(state, "embeddings.LayerNorm", x, 1e-12)
    for number in range(2):
        layer = f"encoder.layer.{number}."
        for name, seen in ((f"{layer}attention", None), (f"{layer}crossattention", image)):
            seen = x if seen is None else seen
            query = dense(state, f"{name}.self.query", x)
            key, value = (dense(state, f"{name}.self.{kind}", seen) for kind in ("key", "value"))
            y = dense(state, f"{name}.output.dense", attention(query, key, value, heads=1))
            x = norm(state, f"{name}.output.LayerNorm", x + y, 1e-12)
        y = dense(state, f"{layer}output.dense", F.gelu(dense(state, f"{layer}intermediate.dense", x)))
        x = norm(state, f"{layer}output.LayerNorm", x + y, 1e-12)
    return x[0]


def test_imagereward_equals_its_recipe(reward_checkpoints, images):
    from transformers import BertTokenizer

    reward = loaded(ImageReward(weights=reward_checkpoints.imagereward, tokenizer=reward_checkpoints.bert))
    tokenizer = BertTokenizer.from_pretrained(reward_checkpoints.bert)
    state = imagereward_state()
    vision, text = (
        {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        for prefix in ("blip.visual_encoder.", "blip.text_encoder.")
    )
    scores = reward.score(images, prompt_batch(TEXTS).prompts)
    lengths = []
    for image, prompt, score in zip(images, TEXTS, scores, strict=True):
        ids = tokenizer(prompt).input_ids
        ids = [*ids[:34], tokenizer.sep_token_id] if len(ids) > 35 else ids
        lengths.append(len(ids))
        first = blip_text(text, torch.tensor(ids), blip_image(vision, prepared(image, 32)))
        expected = (head(state, first, prefix="mlp.").item() - 0.16717362830052426) / 1.0333394966054072
        assert score.item() == pytest.approx(expected, abs=1e-5)
    assert max(lengths) == 35  # one prompt was cut


def save_changed(folder, state, change):
    state = dict(state)
    change(state)
    torch.save(state, folder / "changed.pt")
    return str(folder / "changed.pt")


HPS = "visual.transformer.resblocks.1.ln_2.bias"
BLIP = "blip.visual_encoder.blocks.1.attn.qkv.bias"
BERT = "blip.text_encoder.encoder.layer.1.crossattention.self.value.weight"


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        (
            "HPSv2",
            lambda s: s.pop(HPS),
            r"HPSv2\.weights: .*vision_model\.encoder\.layers\.1\.layer_norm2\.bias",
        ),
        ("HPSv2", lambda s: s.update(extra=torch.ones(1)), r"HPSv2\.weights: .*\"extra\""),
        (
            "HPSv2",
            lambda s: s.pop("visual.conv1.weight"),
            r"HPSv2\.weights: 'visual\.conv1\.weight' is missing",
        ),
        (
            "HPSv2",
            lambda s: s.update({HPS: torch.ones(5)}),
            r"HPSv2\.weights: .*size mismatch.*layer_norm2\.bias",
        ),
        ("Aesthetic", lambda s: s.pop("layers.4.bias"), r"Aesthetic\.weights: .*layers\.4\.bias"),
        ("Aesthetic", lambda s: s.update(more=torch.ones(1)), r"Aesthetic\.weights: .*\"more\""),
        (
            "Aesthetic",
            lambda s: s.update({"layers.0.weight": torch.ones(24, 9)}),
            r"Aesthetic\.weights: .* 9, .* 16",
        ),
        (
            "Aesthetic",
            lambda s: [s.pop(f"layers.7.{k}") for k in ("weight", "bias")],
            r"Aesthetic\.weights: .*one number",
        ),
        ("ImageReward", lambda s: s.pop(BLIP), r"ImageReward\.weights: .*layers\.1\.self_attn\.qkv\.bias"),
        (
            "ImageReward",
            lambda s: s.pop(BERT),
            r"ImageReward\.weights: .*layer\.1\.crossattention\.self\.value\.weight",
        ),
        (
            "ImageReward",
            lambda s: s.update({"blip.itm_head.weight": torch.ones(1)}),
            r"ImageReward\.weights: .*blip\.itm_head",
        ),
        (
            "ImageReward",
            lambda s: s.update({"blip.visual_encoder.x": torch.ones(1)}),
            r"ImageReward\.weights: .*\"x\"",
        ),
        ("ImageReward", lambda s: s.pop("mlp.layers.7.bias"), r"ImageReward\.weights: .*layers\.7\.bias"),
    ],
)
def test_a_file_with_keys_too_few_or_too_many_is_refused(tmp_path, reward_checkpoints, name, change, match):
    files = reward_checkpoints
    state = {
        "HPSv2": lambda: openclip_state(vocabulary=len(clip_h_tokenizer())),
        "Aesthetic": lambda: head_state(16, seed=4),
        "ImageReward": imagereward_state,
    }[name]()
    weights = save_changed(tmp_path, state, change)
    reward = {
        "HPSv2": lambda: HPSv2(weights=weights, tokenizer=files.clip_h),
        "Aesthetic": lambda: Aesthetic(pretrained=files.clip, weights=weights),
        "ImageReward": lambda: ImageReward(weights=weights, tokenizer=files.bert),
    }[name]()
    with pytest.raises(ValueError, match=r"(?s)" + match):
        reward.load(CPU)


@pytest.mark.parametrize(
    "content", ["<!DOCTYPE html>", "text", b"\x80\x04N.", {"state_dict": {"a": 1}}, [1, 2]]
)
def test_a_file_that_is_no_state_dict_is_refused(tmp_path, reward_checkpoints, content):
    file = tmp_path / "weights.pt"
    if isinstance(content, str):
        file.write_text(content)
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(ValueError, match=r"ImageReward\.weights: "):
        ImageReward(weights=str(file), tokenizer=reward_checkpoints.bert).load(CPU)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: CLIPScore(pretrained="./nowhere"), r"CLIPScore\.pretrained: './nowhere'"),
        (lambda: PickScore(pretrained="nowhere"), r"PickScore\.pretrained: 'nowhere'"),
        (lambda: PickScore(processor="./nowhere"), r"PickScore\.processor: './nowhere' is no folder"),
        (lambda: PickScore(processor="tests"), r"PickScore\.processor: .*'tests' holds no preprocessor_config"),
        (lambda: HPSv2(weights="~/nowhere.pt"), r"HPSv2\.weights: '~/nowhere.pt' is no file"),
        (lambda: HPSv2(weights="tests"), r"HPSv2\.weights: .*'tests' holds no HPS_v2\.1_compressed\.pt"),
        (lambda: HPSv2(tokenizer="nowhere"), r"HPSv2\.tokenizer: 'nowhere'"),
        (lambda: Aesthetic(weights="/nowhere"), r"Aesthetic\.weights: '/nowhere'"),
        (lambda: ImageReward(weights="a/b/c"), r"ImageReward\.weights: 'a/b/c'"),
        (lambda: ImageReward(tokenizer="bert"), r"ImageReward\.tokenizer: 'bert'"),
    ],
)
def test_a_wrong_source_names_its_key(build, match, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(ValueError, match=match):
        build()


def test_a_tokenizer_of_another_model_is_refused(reward_checkpoints):
    files = reward_checkpoints
    with pytest.raises(ValueError, match=r"HPSv2\.tokenizer: .*ends texts with 1;"):
        loaded(HPSv2(weights=files.hps, tokenizer=files.clip))
    with pytest.raises(ValueError, match=r"PickScore\.processor: "):
        loaded(PickScore(pretrained=files.clip_h, processor=files.clip))
    with pytest.raises(ValueError, match=r"ImageReward\.tokenizer: "):
        loaded(ImageReward(weights=files.imagereward, tokenizer=files.clip_h))


def test_a_clip_whose_weights_are_incomplete_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    save_clip(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["visual_projection.weight"]  # transformers would draw it at random
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"CLIPScore\.pretrained: .*visual_projection\.weight"):
        loaded(CLIPScore(pretrained=str(tmp_path)))


def test_scoring_before_loading_is_refused(images, reward_checkpoints):
    with pytest.raises(RuntimeError, match=r"CLIPScore\.score before load"):
        CLIPScore(pretrained=reward_checkpoints.clip).score(images, prompt_batch(TEXTS).prompts)
