"""The models that ship inside the package, and the stages that make them."""

import os
import subprocess
import sys

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from transformers import CLIPTokenizer

from recast_pl.assets import EMBEDDED, resolve
from recast_pl.assets.make import Recipe, build
from recast_pl.assets.making.stage import Average, Stage
from recast_pl.assets.making.text import build_tokenizer, tokenize
from recast_pl.assets.making.vae import DETAIL, PatchCode, fit_code
from recast_pl.scenes import all_scenes


def test_everything_shipped_stays_under_16_megabytes():
    folder = EMBEDDED["tiny"].parent
    size = sum(os.path.getsize(path) for path in folder.rglob("*") if path.is_file())
    assert 1e6 < size < 16e6


def test_the_shipped_pipeline_is_a_plain_diffusers_one():
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        EMBEDDED["tiny"], text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    parameters = sum(p.numel() for p in pipeline.transformer.parameters())
    assert 1e6 < parameters < 4e6
    pictures = pipeline(
        "a red circle on a white background",
        num_inference_steps=4,
        max_sequence_length=1,
        guidance_scale=1.0,
        num_images_per_prompt=8,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images
    assert pictures.shape == (8, 3, 64, 64)
    assert pictures[:, :, :2].mean() > 0.75  # white


def test_every_caption_word_is_one_token():
    tokenizer = build_tokenizer()
    for scene in list(all_scenes())[::97]:
        assert len(tokenizer(scene.caption).input_ids) == len(scene.caption.split()) + 2
    assert tokenize(tokenizer, ["x" * 400]).shape == (1, 16)
    unknown = tokenizer("Zebra 🎉 ß").input_ids[1:-1]
    assert tokenizer.eos_token_id not in unknown  # the end would cut the pooled embedding short


def test_two_processes_agree_about_token_ids():
    """A tokenizer that depends on the hash seed scrambles the words of a model trained in another process."""
    program = (
        "from recast_pl.assets.making.text import build_tokenizer;"
        "print(sorted(build_tokenizer().get_vocab().items()))"
    )
    vocabularies = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(vocabularies) == 1
    shipped = CLIPTokenizer.from_pretrained(EMBEDDED["tiny"] / "tokenizer")
    assert sorted(shipped.get_vocab().items()) == sorted(build_tokenizer().get_vocab().items())


def test_the_patch_code_holds_whitened_mean_colours_and_weaker_details():
    code = fit_code(seed=1, count=40)
    from recast_pl.assets.making.data import as_float, drawn_scenes

    pictures = as_float(drawn_scenes(40, seed=1)[0])
    latents = code.encode(pictures)
    assert latents.shape == (40, 8, 16, 16)
    flat = latents.movedim(1, 0).flatten(1)
    covariance = torch.cov(flat)
    spread = covariance.diag().sqrt()
    assert spread[:3].tolist() == pytest.approx([1, 1, 1], rel=1e-3)
    assert spread[3].item() == pytest.approx(DETAIL, rel=1e-3)
    assert (spread[3:].diff() < 0).all()
    for block in (covariance[:3, :3], covariance[3:, 3:]):
        assert (block - torch.diag(block.diag())).abs().max() < 1e-3
    means = torch.nn.functional.avg_pool2d(pictures, 4).movedim(1, -1).reshape(-1, 3).double()
    centred = means - means.mean(0)
    fitted = centred @ torch.linalg.lstsq(centred, flat[:3].T.double()).solution
    torch.testing.assert_close(fitted.float(), flat[:3].T, atol=1e-3, rtol=0)
    assert isinstance(code, PatchCode)


def test_a_stage_goes_on_where_it_was(tmp_path):
    def stage(steps):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
        average = Average(model, decay=0.9)
        modules = {"model": model, "optimiser": optimiser, "average": average}
        made = Stage(name="toy", folder=tmp_path, steps=steps, modules=modules)

        def update(step):
            x = torch.randn(8, 2, generator=torch.Generator().manual_seed(step))
            loss = (model(x) - 1).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            average.update(model, step=step)
            return {"loss": loss.item()}

        made.run(update)
        assert made.done
        return model, average

    stage(5)
    resumed, resumed_average = stage(9)
    (tmp_path / "toy.pt").unlink()
    whole, whole_average = stage(9)
    assert torch.equal(resumed.weight, whole.weight)
    assert torch.equal(resumed_average.values[0], whole_average.values[0])
    assert not torch.equal(whole.weight, whole_average.values[0])


@pytest.mark.parametrize("source", ["recast_pl://tiny", "recast_pl://clip", "owner/name"])
def test_sources_that_may_exist_pass(source):
    assert resolve(source, key="k")


@pytest.mark.slow
def test_the_maker_runs_end_to_end_in_miniature(tmp_path):
    recipe = Recipe(vae_steps=2, denoiser_steps=2, clip_steps=2, scenes=96)
    stages = ["vae", "denoiser", "clip", "judge", "assemble"]
    build(recipe, output=tmp_path / "out", work=tmp_path / "work", device="cpu", stages=stages, pictures=64)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "held-out captions" in card
    StableDiffusion3Pipeline.from_pretrained(
        tmp_path / "out" / "pipeline", text_encoder_3=None, tokenizer_3=None
    )
