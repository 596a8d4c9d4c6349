"""The real command line, in this process, on a miniature pipeline."""

import json

import pytest
import torch
import yaml
from command_line import CONFIGS, QUICKSTART, run
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recast_pl.cli import main
from recast_pl.objectives import DiffusionNFT


@pytest.fixture(scope="session")
def fitted(overlay, tmp_path_factory):
    """One finished `fit` and its folder."""
    folder = tmp_path_factory.mktemp("fit")
    return run("fit", overlay, folder), folder


def events(folder):
    (file,) = folder.rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(file), size_guidance={"images": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


def test_fit_trains_the_default_adapter_and_the_old_one_follows(fitted):
    cli, _ = fitted
    assert cli.model.iteration == 4
    assert (
        max(
            p.abs().max().item()
            for n, p in cli.model.policy.named_parameters()
            if ".default." in n and "lora_B" in n
        )
        > 0
    )
    assert cli.model.policy.distance_to_old() > 0


def test_fit_shows_what_it_promises(fitted):
    shown = events(fitted[1])
    names = ("clipscore", "composition", "sharpness", "jpeg")
    tags = set(shown.Tags()["scalars"])
    for name in names:
        assert {f"train/{name}", f"val/{name}", f"train_spread/{name}", f"train_masked/{name}"} <= tags
    assert {
        "advantages/spread", "loss/policy", "loss/distance_to_reference", "loss/grad_norm",
        "old_policy/distance", "time/rollout", "time/update", "time/images_per_second",
    } <= tags  # fmt: skip
    assert [event.step for event in shown.Scalars("val/jpeg")] == [0, 2, 4]  # before training, too
    assert len(shown.Scalars("train/jpeg")) == 4
    assert {"credit/W", "credit/discriminability", "samples", "before_after"} <= set(shown.Tags()["images"])
    assert {
        f"{kind}/{name}" for kind in ("credit_total", "credit_entropy", "credit_signal") for name in names
    } <= tags
    assert {"time/credit", "time/credit_share"} <= tags
    assert len(shown.Images("samples")) == 3


def test_fit_leaves_a_before_after_picture_a_configuration_and_a_checkpoint(fitted):
    _, folder = fitted
    (picture,) = folder.rglob("before_after.png")
    assert min(Image.open(picture).size) > 200
    (config,) = folder.rglob("config.yaml")
    assert yaml.safe_load(config.read_text())["model"]["objective"]["class_path"].endswith("DiffusionNFT")
    (checkpoint,) = folder.rglob("*.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert all("lora_" in name for name in state)
    assert any(".old." in name for name in state)


def test_two_equal_runs_are_equal_bit_for_bit(fitted, overlay, tmp_path):
    again = run("fit", overlay, tmp_path)
    first, second = fitted[0].model.policy.saved_state(), again.model.policy.saved_state()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_epochs_and_two_more_by_resuming_are_equal_bit_for_bit(fitted, overlay, tmp_path):
    run("fit", overlay, tmp_path, "--trainer.max_epochs", "1")
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    resumed = run("fit", overlay, tmp_path / "more", "--ckpt_path", str(checkpoint))
    assert resumed.model.iteration == 4
    first, second = fitted[0].model.policy.saved_state(), resumed.model.policy.saved_state()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_validate_before_and_after_use_the_same_prompts_and_noises(fitted, overlay, tmp_path, capsys):
    base = run("validate", overlay, tmp_path / "base").trainer.callback_metrics
    assert "val/composition/spread" in capsys.readouterr().out
    before = fitted[0].model.evaluations[0][1]
    for name in ("clipscore", "composition", "sharpness", "jpeg"):
        assert base[f"val/{name}"].item() == pytest.approx(before[f"val/{name}"], abs=1e-6)
    (checkpoint,) = fitted[1].rglob("*.ckpt")
    trained = run("validate", overlay, tmp_path / "trained", "--ckpt_path", str(checkpoint))
    after = fitted[0].model.evaluations[-1][1]
    assert trained.trainer.callback_metrics["val/jpeg"].item() == pytest.approx(after["val/jpeg"], abs=1e-6)


def test_test_uses_the_judges_alone(overlay, tmp_path):
    metrics = run("test", overlay, tmp_path).trainer.callback_metrics
    assert {key for key in metrics if "/" in key} == {
        "test/judge_clip", "test/judge_clip/spread", "test/judge_clip/masked",
    }  # fmt: skip


def test_test_without_judges_says_so(overlay, tmp_path):
    with pytest.raises(ValueError, match=r"judges\.rewards"):
        run("test", overlay, tmp_path, "--judges.rewards", "null")


def test_predict_writes_pictures_with_their_own_scores(overlay, tmp_path):
    cli = run("predict", overlay, tmp_path, "--pictures.folder", str(tmp_path / "out"))
    lines = [json.loads(line) for line in (tmp_path / "out" / "pictures.jsonl").read_text().splitlines()]
    assert [line["file"] for line in lines] == [f"{i:05d}.png" for i in range(6)]
    assert len(list((tmp_path / "out").glob("*.png"))) == 6
    prompts = cli.datamodule.prompts("evaluation")
    suite = cli.model.rewards
    suite.setup(torch.device("cpu"))
    for line, prompt in zip(lines, prompts, strict=True):
        assert line["prompt"] == prompt.text
        pixels = torch.tensor(list(Image.open(tmp_path / "out" / line["file"]).getdata())).float() / 255
        again = suite.score(pixels.view(1, 16, 16, 3).permute(0, 3, 1, 2), [prompt])
        expected = dict(zip(again.names, again.values_RB[:, 0].tolist(), strict=True))
        assert line["scores"]["jpeg"] == pytest.approx(expected["jpeg"])
        assert line["scores"]["clipscore"] == pytest.approx(expected["clipscore"], abs=1e-3)


def shipped():
    """Whole experiments with every verb, overlays with `fit`; studies are of another kind."""
    for path in sorted(set(CONFIGS.rglob("*.yaml")) - set((CONFIGS / "studies").iterdir())):
        name = str(path.relative_to(CONFIGS))
        for verb in ("fit", "validate", "test", "predict", "profile") if path.parent == CONFIGS else ("fit",):
            yield pytest.param(path, verb, id=f"{name}-{verb}")


def base_of(path):
    """The experiment that an overlay is of."""
    if path.parent in (CONFIGS, CONFIGS / "tiny"):
        return []
    setting = path.parent.name if path.parent.name.startswith("setting") else "quickstart"
    return ["--config", str(CONFIGS / f"{'setting_a' if path.parent.name == 'stages' else setting}.yaml")]


@pytest.mark.parametrize(("path", "verb"), shipped())
def test_every_shipped_yaml_parses(path, verb, capsys):
    """`--print_config` parses and loads nothing."""
    with pytest.raises(SystemExit) as exit_:
        main([verb, *base_of(path), "--config", str(path), "--print_config"])
    assert exit_.value.code == 0
    assert "class_path: recast_pl.objectives." in capsys.readouterr().out
    assert path.read_text().startswith("# ")  # says what it is


def test_the_printed_configuration_runs_the_same(overlay, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["fit", "--config", QUICKSTART, "--config", overlay, "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["rollout"]["init_args"]["num_steps"] == 4
    (tmp_path / "printed.yaml").write_text(yaml.safe_dump(printed))
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(tmp_path / "printed.yaml"), "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out) == printed


def test_short_class_names(overlay, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", QUICKSTART, "--config", overlay, "--print_config",
              "--credit.strategy", "Uniform", "--model.objective", "DiffusionNFT",
              "--model.advantages", "WeightedSum"])  # fmt: skip
    assert exit_.value.code == 0
    assert "recast_pl.advantages.WeightedSum" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--model.objektive", "DiffusionNFT"], "objektive"),
        (["--model.objective.init_args.betta", "0.1"], "betta"),
        (["--model.objective.init_args.beta", "-1"], "model.objective.init_args.beta"),
        (["--model.policy.init_args.pretrained", "recast_pl://huge"], "recast_pl://tiny"),
        (["--data.group_size", "1"], "data.group_size"),
        (["--model.timesteps_per_sample", "99"], "model.timesteps_per_sample"),
        (["--rewards.budgets", '{"jpeg": 1.0}'], "rewards.budgets"),
        (["--credit.every_n_steps", "0"], "credit.every_n_steps"),
        (["--credit.strategy", "Unifrom"], "Unifrom"),
        (["--model.optimizer.init_args.lr", "fast"], "lr"),
    ],
)
def test_wrong_keys_names_and_geometry_fail_before_any_weight_is_loaded(
    overlay, wrong, said, capsys, monkeypatch
):
    from recast_pl.policy import SD3Policy

    monkeypatch.setattr(SD3Policy, "load", lambda self, seed: pytest.fail("weights were loaded"))
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", QUICKSTART, "--config", overlay, *wrong])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_missing_metadata_fails_before_any_weight_is_loaded(overlay, tmp_path, monkeypatch):
    from recast_pl.policy import SD3Policy

    monkeypatch.setattr(SD3Policy, "load", lambda self, seed: pytest.fail("weights were loaded"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\n")
    source = json.dumps({"class_path": "recast_pl.prompts.TextFile", "init_args": {"path": str(prompts)}})
    with pytest.raises(ValueError, match=r"'composition' needs the metadata 'include'.*data\.train"):
        run("fit", overlay, tmp_path, "--data.train", source)


def test_a_second_update_in_bf16_sees_the_weights_of_the_first(overlay, tmp_path, monkeypatch):
    """Autocast keeps half-precision copies of weights; they must not outlive an optimiser step."""
    plain, differences = DiffusionNFT.predict, []

    def both(*arguments):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), torch.no_grad():
            fresh = plain(*arguments).current_NCHW
        velocities = plain(*arguments)
        differences.append((velocities.current_NCHW - fresh).abs().max().item())
        return velocities

    monkeypatch.setattr(DiffusionNFT, "predict", both)
    run("fit", overlay, tmp_path, "--trainer.precision", "bf16-mixed", "--trainer.max_epochs", "1",
        "--model.updates_per_iteration", "2", "--model.optimizer.lr", "0.1")  # fmt: skip
    assert len(differences) == 4
    assert differences == [0] * 4
