"""The real command line, in this process, on a miniature pipeline."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recast_pl.cli import main
from recast_pl.credit import CreditAssigner, released, renyi_divergence
from recast_pl.profiling import profile_table

CONFIGS = Path(__file__).parents[1] / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")


@pytest.fixture(scope="session")
def overlay(pipeline_folder, clip_folder, tmp_path_factory):
    """Only sources and sizes differ from the quickstart."""

    def reward(path, **arguments):
        return {"class_path": f"recast_pl.rewards.{path}", "init_args": arguments}

    clip = reward("CLIPScore", pretrained=str(clip_folder))
    content = {
        "model": {
            "policy": {
                "class_path": "recast_pl.policy.SD3Policy",
                "init_args": {"pretrained": str(pipeline_folder), "lora_rank": 2, "max_sequence_length": 1},
            },
            "rollout": {"class_path": "recast_pl.rollout.ODERollout", "init_args": {"num_steps": 4}},
            "timesteps_per_sample": 2,
        },
        "rewards": {
            "rewards": {
                "clipscore": clip,
                "composition": reward("Composition"),
                "sharpness": reward("Sharpness"),
                "jpeg": reward("JPEGIncompressibility"),
            }
        },
        "judges": {"rewards": {"judge_clip": clip}},
        "data": {
            "train": {"class_path": "recast_pl.prompts.SceneGrammar", "init_args": {"count": 8}},
            "evaluation": {
                "class_path": "recast_pl.prompts.SceneGrammar",
                "init_args": {"count": 6, "held_out": True},
            },
            "num_groups": 2,
            "group_size": 3,
            "iterations_per_epoch": 2,
            "evaluation_batch_size": 4,
        },
        "trainer": {"max_epochs": 2, "enable_progress_bar": False},
    }
    path = tmp_path_factory.mktemp("overlay") / "miniature.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def run(verb, overlay, folder, *extra):
    return main(
        [verb, "--config", QUICKSTART, "--config", overlay,
         "--trainer.logger.init_args.save_dir", str(folder), *extra]
    )  # fmt: skip


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


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda p: str(p.relative_to(CONFIGS)))
def test_every_shipped_yaml_parses(path, verb, capsys):
    """Overlays on the quickstart, whole experiments alone; `--print_config` parses and loads nothing."""
    base = [] if path.name == "quickstart.yaml" else ["--config", QUICKSTART]
    with pytest.raises(SystemExit) as exit_:
        main([verb, *base, "--config", str(path), "--print_config"])
    assert exit_.value.code == 0
    assert "recast_pl.objectives.DiffusionNFT" in capsys.readouterr().out
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


# ---------------------------------------------------------------------- profile

PAIRED = ("--credit.strategy.estimator", "recast_pl.credit.PairedCompletions")


def credit_of(cli):
    (credit,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, CreditAssigner)]
    return credit


@pytest.fixture(scope="session")
def profiled(overlay, tmp_path_factory):
    """One finished `profile` and its folder."""
    folder = tmp_path_factory.mktemp("profile")
    return run("profile", overlay, folder, "--iterations", "2", "--folder", str(folder), *PAIRED), folder


def test_profile_writes_what_can_be_read_back(profiled):
    cli, folder = profiled
    assert cli.model.iteration == 0
    file, strategy = released.read(folder / "profiles.npz"), credit_of(cli).strategy
    assert file.names == cli.model.rewards.names
    torch.testing.assert_close(file.levels, cli.model.levels)
    for row, name in enumerate(file.names):
        again = renyi_divergence(file.ratios[name], strategy.alpha)
        torch.testing.assert_close(again, strategy.profile.monotone_RK[row], atol=1e-9, rtol=0)
    shares = cli.model.rewards.budgets_R / cli.model.rewards.budgets_R.sum()
    torch.testing.assert_close(file.table_RK.sum(1), shares, atol=1e-9, rtol=0)
    for name in ("profiles.png", "W.png"):
        assert Image.open(folder / name).width > 300


def test_profile_prints_a_table(profiled):
    strategy = credit_of(profiled[0]).strategy
    table = profile_table(strategy.profile, strategy.average.latest, dict.fromkeys(strategy.profile.names, 1.5))
    (line,) = [line for line in table.splitlines() if line.startswith("jpeg ")]
    assert float(line.split()[1]) == pytest.approx(
        strategy.profile.total_R[strategy.profile.names.index("jpeg")].item(), abs=1e-5
    )
    assert line.split()[-2:] == ["48", "1.5"]  # 2 iterations × 6 samples × 4 levels


def test_a_written_profile_and_table_train(profiled, overlay, tmp_path):
    file = str(profiled[1] / "profiles.npz")
    cli = run("fit", overlay, tmp_path, "--trainer.max_epochs", "1",
              "--credit.strategy", "recast_pl.credit.Fixed", "--credit.strategy.path", file)  # fmt: skip
    torch.testing.assert_close(cli.model.weights.values_RK / 4, released.read(Path(file)).table_RK)


def test_profile_without_a_measuring_strategy_says_so(overlay, tmp_path, clip_folder):
    with pytest.raises(ValueError, match="`profile` needs ReCAST with an estimator that measures.*got Uniform"):
        run("profile", overlay, tmp_path, "--credit.strategy", "recast_pl.credit.Uniform")


@pytest.mark.parametrize("name", ["uniform", "snr", "recast"])
def test_strategies_are_swapped_by_overlay(name, overlay, tmp_path):
    cli = run("fit", overlay, tmp_path, "--config", str(CONFIGS / "credit" / f"{name}.yaml"),
              "--trainer.max_epochs", "1")  # fmt: skip
    assert type(credit_of(cli).strategy).__name__.lower() == name
    sums = cli.model.weights.values_RK.sum(1)
    budgets = cli.model.rewards.budgets_R
    torch.testing.assert_close(sums / sums.sum(), budgets / budgets.sum(), atol=1e-9, rtol=0)
