"""The verb `export` on the embedded pipeline: what plain diffusers makes of it, and what the card says."""

import json
import re

import pytest
import torch
import yaml
from command_line import CONFIGS, run
from conftest import prompt_batch
from diffusers import StableDiffusion3Pipeline
from safetensors import safe_open

from recast_pl.assets import EMBEDDED
from recast_pl.noise import Purpose, keyed_normal
from recast_pl.rewards import CLIPScore, Composition
from recast_pl.verbs.export import export

BASE = EMBEDDED["tiny"]
TEXTS = ["a red circle on a white background", "two blue squares on a black background"]
PLAIN = {"dtype": torch.float32, "text_encoder_3": None, "tokenizer_3": None}  # as the base asks for
FULL = ["--config", str(CONFIGS / "policy" / "full.yaml"), "--model.optimizer.init_args.lr", "1.0e-3"]
LORA = ["--model.policy.init_args.lora_alpha", "6.0", "--model.optimizer.init_args.lr", "3.0e-2"]  # rank 2
BUDGETS = ["--rewards.budgets", '{"clipscore": 3.0, "composition": 1.0, "sharpness": 0.0, "jpeg": 4.0}']


def command(verb, overlay, folder, *extra):
    return run(
        verb, overlay, folder, "--model.policy.init_args.pretrained", "recast_pl://tiny", *BUDGETS, *extra
    )


@pytest.fixture(scope="module")
def trained(overlay, tmp_path_factory):
    """Two iterations of each kind, and their checkpoints."""
    found = {}
    for kind, arguments in (("lora", LORA), ("full", FULL)):
        folder = tmp_path_factory.mktemp(kind)
        quick = ["--trainer.max_epochs", "1", "--grid.count", "1", "--credit.strategy", "Uniform"]
        if kind == "full":  # whose scores nobody reads
            quick += ["--trainer.num_sanity_val_steps", "0", "--trainer.limit_val_batches", "0"]
        cli = command("fit", overlay, folder, *arguments, *quick)
        (checkpoint,) = folder.rglob("*.ckpt")
        found[kind] = (cli.model, checkpoint, arguments)
    return found


@pytest.fixture(scope="module")
def exported(trained, overlay, tmp_path_factory):
    """A function that exports once for each kind and set of options."""
    done = {}

    def folder_of(kind, *options):
        if (kind, options) not in done:
            place = tmp_path_factory.mktemp("export") / "of_mine"
            _, checkpoint, arguments = trained[kind]
            command("export", overlay, place.parent, *arguments, "--ckpt_path", str(checkpoint),
                    "--folder", str(place), *options)  # fmt: skip
            done[kind, options] = place
        return done[kind, options]

    return folder_of


def drawn_by_module(module, role):
    """Pictures as the training module draws them."""
    return module.collect(prompt_batch(TEXTS, iteration=7), role=role).images_B3HW


def drawn_by(pipeline, module):
    """Pictures by diffusers' own pipeline from the same noise."""
    noise = keyed_normal(
        module.policy.latent_shape, seed=module.seed, iteration=7, samples=[0, 1], purpose=Purpose.START
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        TEXTS,
        latents=noise,
        num_inference_steps=4,
        guidance_scale=1.0,
        max_sequence_length=1,
        output_type="pt",
    ).images


@pytest.fixture(scope="module")
def base_pictures(trained):
    return drawn_by(StableDiffusion3Pipeline.from_pretrained(BASE, **PLAIN), trained["lora"][0])


def same_pictures(ours, theirs, base):
    """Equal, and far from the base model's."""
    assert (ours - theirs).abs().max() < 1e-4
    assert (ours - base).abs().max() > 0.05


@pytest.mark.parametrize("role", ["default", "old"])
def test_plain_diffusers_draws_the_training_modules_pictures(trained, exported, base_pictures, role):
    module, _, _ = trained["lora"]
    with torch.no_grad():  # the old policy is two iterations behind: make sure that the two can be told apart
        assert (drawn_by_module(module, "default") - drawn_by_module(module, "old")).abs().max() > 1e-3
    pipeline = StableDiffusion3Pipeline.from_pretrained(BASE, **PLAIN)
    pipeline.load_lora_weights(exported("lora", "--role", role))
    same_pictures(drawn_by_module(module, role), drawn_by(pipeline, module), base_pictures)


def test_a_lost_alpha_would_show(trained, exported):
    """The same factors without their metadata are read with alpha = rank, a third of what was trained."""
    module, _, _ = trained["lora"]
    path = exported("lora", "--role", "default") / "pytorch_lora_weights.safetensors"
    with safe_open(path, "pt") as file:
        said = json.loads(file.metadata()["lora_adapter_metadata"])
        factors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert (said["transformer.r"], said["transformer.lora_alpha"]) == (2, 6.0)
    pipeline = StableDiffusion3Pipeline.from_pretrained(BASE, **PLAIN)
    pipeline.load_lora_weights(factors)
    assert (drawn_by(pipeline, module) - drawn_by_module(module, "default")).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_merged_pipeline_needs_no_lora(trained, exported, base_pictures, kind):
    module, _, _ = trained[kind]
    folder = exported(kind, "--merged", "true")
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, **PLAIN)
    same_pictures(drawn_by_module(module, "default"), drawn_by(pipeline, module), base_pictures)
    assert not any("lora" in name for name, _ in pipeline.transformer.named_parameters())
    assert not list(folder.rglob("*lora*"))
    for path in folder.rglob("*.json"):  # folders of this machine are nobody's business
        assert str(BASE.parent) not in path.read_text(encoding="utf-8"), path


def test_the_merged_pipeline_of_the_old_weights(trained, exported):
    module, _, _ = trained["full"]
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        exported("full", "--merged", "true", "--role", "old"), **PLAIN
    )
    assert (drawn_by_module(module, "old") - drawn_by(pipeline, module)).abs().max() < 1e-4


# ---------------------------------------------------------------- the card


def parts(card):
    _, front, body = card.split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_card_says_what_was_trained_for_what(trained, exported):
    module, _, _ = trained["lora"]
    folder = exported("lora", "--role", "default")
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "W.png", "pytorch_lora_weights.safetensors",
    ]  # fmt: skip
    card = (folder / "README.md").read_text(encoding="utf-8")
    front, body = parts(card)
    assert front["library_name"] == "diffusers"
    assert {"lora", "text-to-image", "recast_pl"} <= set(front["tags"])
    assert "license" not in front  # the user's to name
    assert "| clipscore | `CLIPScore` | 3 | 37.5% |" in body
    assert "| sharpness | `Sharpness` | 0 | 0.0% |" in body
    assert "LoRA of rank 2 and alpha 6 for `recast_pl://tiny`" in body
    assert "after 2 iterations" in body
    (before_at, before), (after_at, after) = module.evaluations
    assert (before_at, after_at) == (0, 2)
    for name in module.rewards.names:
        spread = before[f"val/{name}/spread"]
        row = [before[f"val/{name}"], after[f"val/{name}"], spread]
        expected = " | ".join(f"{value:.4f}" for value in row)
        assert f"| {name} | {expected} | {(row[1] - row[0]) / spread:+.2f} |" in body
    settings = yaml.safe_load(re.search(r"```yaml\n(.*?)```", body, re.S).group(1))
    assert settings["model"]["policy"]["init_args"]["lora_alpha"] == 6.0
    assert settings["rewards"]["budgets"]["jpeg"] == 4.0
    assert "trainer" not in settings


def test_a_front_matter_names_a_base_model_of_the_hub(trained, monkeypatch):
    """The Hub takes no other names for it."""
    from recast_pl.verbs.export.card import Facts, model_card

    module, _, _ = trained["lora"]
    shared = {"module": module, "policy": module.policy, "role": "default", "full": False, "iteration": 2}
    shared |= {"weights": None, "scores": [], "settings": "seed_everything: 1\n", "name": "me/mine"}
    assert "base_model" not in parts(model_card(Facts(merged=False, **shared)))[0]
    monkeypatch.setattr(module.policy, "source", "stabilityai/stable-diffusion-3.5-medium")
    for merged, relation in ((False, "adapter"), (True, "finetune")):
        front, body = parts(model_card(Facts(merged=merged, **shared)))
        assert front["base_model"] == "stabilityai/stable-diffusion-3.5-medium"
        assert front["base_model_relation"] == relation
        assert "W.png" not in body
        assert "Held-out" not in body


@pytest.mark.parametrize(("kind", "options"), [("lora", ()), ("full", ("--merged", "true"))])
def test_the_five_lines_of_the_card_draw_a_picture(exported, tmp_path, monkeypatch, kind, options):
    folder = exported(kind, *options)
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.S).group(1)
    monkeypatch.chdir(folder.parent)
    code = code.replace("picture.png", str(tmp_path / "picture.png"))
    exec(code, {})
    assert (tmp_path / "picture.png").stat().st_size > 0


def exported_by_hand(trained, kind, **options):
    """What the verb calls, on the module that was trained."""
    module, checkpoint, _ = trained[kind]
    given = {"ckpt_path": checkpoint, "role": "default", "merged": False, "folder": None, "push_to": None}
    return export(module, **(given | {"settings": {}} | options))


def test_a_checkpoint_without_evaluations_has_a_card_without_scores(trained, tmp_path):
    _, checkpoint, _ = trained["lora"]
    saved = torch.load(checkpoint, weights_only=True)
    assert len(saved["evaluations"]) == 2
    torch.save(saved | {"evaluations": []}, tmp_path / "run.ckpt")
    folder = exported_by_hand(trained, "lora", ckpt_path=tmp_path / "run.ckpt")
    assert folder == tmp_path / "run-export"  # where no folder is named
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "Held-out" not in card
    assert "| jpeg |" in card


def test_a_checkpoint_of_another_alpha_is_refused(trained, tmp_path):
    _, checkpoint, _ = trained["lora"]
    saved = torch.load(checkpoint, weights_only=True)
    torch.save(saved | {"policy": {"lora_alpha": 77.0}}, tmp_path / "run.ckpt")
    with pytest.raises(ValueError, match=r"lora_alpha: the checkpoint's is 77\.0, this run's"):
        exported_by_hand(trained, "lora", ckpt_path=tmp_path / "run.ckpt")


# ---------------------------------------------------------------- refused, and what it must not need


def test_no_reward_is_loaded(trained, overlay, tmp_path, monkeypatch):
    for reward in (CLIPScore, Composition):
        monkeypatch.setattr(reward, "load", lambda self, device: pytest.fail("a reward was loaded"))
    _, checkpoint, arguments = trained["lora"]
    command("export", overlay, tmp_path, *arguments, "--ckpt_path", str(checkpoint),
            "--folder", str(tmp_path / "x"), "--trainer.accelerator", "gpu",
            "--trainer.devices", "8")  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["x"]  # and no run's folder is left behind


@pytest.fixture
def taken(tmp_path):
    """A folder in use."""
    folder = tmp_path / "taken"
    folder.mkdir()
    torch.save({"weights": torch.zeros(1)}, folder / "file")
    return folder


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        ("lora", {"folder": "."}, r"folder: .*taken exists and is not empty"),
        ("lora", {"folder": "file"}, r"folder: .*file exists and is not empty"),
        ("lora", {"ckpt_path": "none.ckpt"}, r"ckpt_path: there is no file"),
        ("lora", {"ckpt_path": "."}, r"ckpt_path: .* is no whole checkpoint"),
        ("lora", {"ckpt_path": "file"}, r"ckpt_path: .*file is not a checkpoint of a run: it lacks state_dict"),
        ("lora", {"role": "reference"}, r"role: expected one of default, old, averaged"),
        ("lora", {"role": "averaged"}, r"expected one of reference, default, old, got the role 'averaged'"),
        ("lora", {"role": "oldest"}, r"role: expected one of default, old"),
        ("full", {}, r"full fine-tuning.*no LoRA.*--merged true"),
        ("lora", {"push_to": "nobody"}, r"push_to: expected owner/name"),
        ("lora", {"push_to": "a/b/c"}, r"push_to: expected owner/name"),
        ("lora", {"push_to": "me/mine"}, r"push_to: no token.*hf auth login"),
    ],
)
def test_refused_in_words_and_nothing_is_left(trained, taken, monkeypatch, kind, options, match):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    paths = {key: taken / options[key] for key in ("folder", "ckpt_path") if key in options}
    with pytest.raises(ValueError, match=match):
        exported_by_hand(trained, kind, **({"folder": taken.parent / "new"} | options | paths))
    assert [path.name for path in taken.parent.iterdir()] == ["taken"]
    assert [path.name for path in taken.iterdir()] == ["file"]


def test_a_checkpoint_of_another_configuration_is_refused(trained, overlay, tmp_path):
    _, checkpoint, arguments = trained["lora"]
    with pytest.raises(ValueError, match="lora_rank"):
        command("export", overlay, tmp_path, *arguments, "--ckpt_path", str(checkpoint),
                "--folder", str(tmp_path / "new"), "--model.policy.init_args.lora_rank", "3")  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_is_taken_and_a_disk_that_fails_leaves_nothing(trained, tmp_path, monkeypatch):
    (tmp_path / "new").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(
            "recast_pl.verbs.export.folder.model_card", lambda facts: (_ for _ in ()).throw(OSError("full"))
        )
        with pytest.raises(OSError, match="full"):
            exported_by_hand(trained, "lora", folder=tmp_path / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]
    exported_by_hand(trained, "lora", folder=tmp_path / "new")
    assert (tmp_path / "new" / "README.md").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_checkpoint_must_be_named(overlay, tmp_path, capsys):
    with pytest.raises(SystemExit):
        command("export", overlay, tmp_path)
    assert "ckpt_path" in capsys.readouterr().err


# ---------------------------------------------------------------- the Hub


class Hub:
    """Stands where `HfApi` does, and keeps what it is told."""

    error = None
    calls = ()

    def create_repo(self, repo_id, *, exist_ok):
        Hub.calls += (("create", repo_id, exist_ok),)
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        if Hub.error is not None:
            raise Hub.error
        Hub.calls += (("upload", repo_id, sorted(path.name for path in folder_path.iterdir())),)


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "a token")
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    Hub.calls, Hub.error = (), None
    return Hub


def test_pushing_uploads_the_whole_folder(trained, overlay, tmp_path, hub, caplog):
    _, checkpoint, arguments = trained["lora"]
    with caplog.at_level("INFO"):
        command("export", overlay, tmp_path, *arguments, "--ckpt_path", str(checkpoint),
                "--folder", str(tmp_path / "x"), "--push_to", "me/mine")  # fmt: skip
    files = ["README.md", "W.png", "pytorch_lora_weights.safetensors"]
    assert hub.calls == (("create", "me/mine", True), ("upload", "me/mine", files))
    assert "Pushed: https://huggingface.co/me/mine" in caplog.text
    assert 'load_lora_weights("me/mine")' in (tmp_path / "x" / "README.md").read_text(encoding="utf-8")


def test_a_hub_that_refuses_leaves_the_folder(trained, tmp_path, hub):
    hub.error = OSError("403 Forbidden: you may not write to me/mine")
    with pytest.raises(ValueError, match=r"push_to: me/mine did not take .*x, which stays: 403 Forbidden"):
        exported_by_hand(trained, "lora", folder=tmp_path / "x", push_to="me/mine")
    assert (tmp_path / "x" / "README.md").exists()
