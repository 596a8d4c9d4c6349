"""The shipped settings for SD3.5-Medium, through the real command line, with other sources and sizes alone."""

from pathlib import Path

import pytest
import torch
import yaml
from command_line import CONFIGS

from recast_pl.cli import main

SETTINGS = ("setting_a", "setting_b", "setting_c")


@pytest.fixture(scope="module")
def miniature(pipeline_folder, clip_folder, reward_checkpoints, tmp_path_factory):
    """One overlay for all settings: sources, sizes, and what a CPU cannot be."""
    folder = tmp_path_factory.mktemp("settings")
    (folder / "open.txt").write_text("a red circle\ntwo blue squares\na green cross\na white cat\n")
    (folder / "ocr.txt").write_text('a sign that says "Open"\na wall with the word "Exit"\n')
    c = reward_checkpoints

    def init_args(suite, name, **arguments):
        return {f"--{suite}.rewards.{name}.init_args.{key}": str(value) for key, value in arguments.items()}

    rewards = {
        **init_args("rewards", "clipscore", pretrained=c.clip),
        **init_args("rewards", "hpsv2", weights=c.hps, tokenizer=c.clip_h),
        **init_args("rewards", "pickscore", pretrained=c.clip_h, processor=c.clip_h),
        **init_args("judges", "aesthetic", pretrained=c.clip, weights=c.aesthetic),
        **init_args("judges", "imagereward", weights=c.imagereward, tokenizer=c.bert),
    }
    geneval = init_args("rewards", "geneval", detector=c.detector, clip=c.clip, threshold=0.0)
    overlay = {
        "model": {
            "policy": {
                "init_args": {
                    "pretrained": str(pipeline_folder),
                    "lora_rank": 2,
                    "third_text_encoder": False,
                    "max_sequence_length": 1,
                    "resolution": None,
                }
            },
            "rollout": {"init_args": {"num_steps": 4}},
        },
        "data": {
            "num_groups": 2,
            "group_size": 4,
            "iterations_per_epoch": 2,
            "evaluation_batch_size": 4,
        },
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "strategy": "auto",
            "max_epochs": 1,
            "enable_progress_bar": False,
        },
    }
    path = folder / "miniature.yaml"
    path.write_text(yaml.safe_dump(overlay))

    def arguments(setting, *, stage=None):
        given = dict(rewards)
        if setting == "setting_a":
            given |= geneval if stage != "open_prompts" else {}
        text = {"setting_b": "open", "setting_c": "ocr"}.get(
            setting, "open" if stage == "open_prompts" else None
        )
        for part in ("train", "evaluation"):
            source = f"--data.{part}.init_args"
            given |= {f"{source}.path": str(folder / f"{text}.txt")} if text else {f"{source}.count": "8"}
        stages = ["--config", str(CONFIGS / "stages" / f"{stage}.yaml")] if stage else []
        return [
            "--config", str(CONFIGS / f"{setting}.yaml"), *stages, "--config", str(path),
            *(item for pair in given.items() for item in pair),
        ]  # fmt: skip

    return arguments


def run(verb, arguments, folder, *extra):
    return main([verb, *arguments, "--trainer.logger.init_args.save_dir", str(folder), *extra])


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_trains_and_judges_on_miniature_checkpoints(setting, miniature, tmp_path):
    cli = run("fit", miniature(setting), tmp_path)
    assert cli.model.iteration == 2
    assert cli.model.policy.distance_to_old() > 0
    (_, before), (_, after) = cli.model.evaluations
    for name in cli.model.rewards.names:
        assert torch.tensor([before[f"val/{name}"], after[f"val/{name}"]]).isfinite().all()
    assert cli.model.policy.pipeline.text_encoder.dtype == torch.bfloat16
    judged = run("test", miniature(setting), tmp_path)
    assert set(judged.model.judges.names) == {"aesthetic", "imagereward"}


def test_stage_two_takes_everything_over_from_stage_one_though_the_rewards_grow(miniature, tmp_path):
    one = run("fit", miniature("setting_a", stage="open_prompts"), tmp_path)
    assert one.model.rewards.names == ("clipscore", "hpsv2", "pickscore")
    (checkpoint,) = Path(tmp_path).rglob("last.ckpt")
    with pytest.warns(UserWarning, match="W is of the rewards clipscore, hpsv2, pickscore, this run's are"):
        two = run(
            "fit", miniature("setting_a", stage="geneval_prompts"), tmp_path,
            "--ckpt_path", str(checkpoint), "--trainer.max_epochs", "2",
        )  # fmt: skip
    assert two.model.rewards.names == ("clipscore", "hpsv2", "pickscore", "geneval")
    assert two.model.iteration == 4
    steps = [int(state["step"]) for state in two.model.optimizers().optimizer.state.values()]
    assert set(steps) == {4}  # the optimiser's count went on


@pytest.mark.parametrize("setting", ["setting_a", "setting_b"])
def test_a_setting_in_miniature_trains_on_the_embedded_pipeline(setting, tmp_path):
    cli = main(
        ["fit", "--config", str(CONFIGS / "tiny" / f"{setting}.yaml"),
         "--data.num_groups", "2", "--data.group_size", "4", "--data.iterations_per_epoch", "2",
         "--trainer.max_epochs", "1", "--data.evaluation.init_args.count", "8",
         "--trainer.enable_progress_bar", "false", "--trainer.logger.init_args.save_dir", str(tmp_path)]
    )  # fmt: skip
    assert cli.model.iteration == 2
    big = content(f"{setting}.yaml")["model"]
    small = content(f"tiny/{setting}.yaml")["model"]
    for stage in ("policy", "rollout", "advantages", "objective", "optimizer"):
        assert small[stage]["class_path"] == big[stage]["class_path"]


def content(path):
    return yaml.safe_load((CONFIGS / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_share_one_recipe(setting):
    """Everything but rewards, prompts, their order of mixing and the folder's name."""
    one, other = content("setting_a.yaml"), content(f"{setting}.yaml")
    for block in ("rewards", "data"):
        one.pop(block), other.pop(block)
    for experiment in (one, other):
        experiment["model"].pop("advantages")
        experiment["trainer"]["logger"]["init_args"].pop("name")
    assert one == other


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_has_five_budgets(setting):
    names = list(content(f"{setting}.yaml")["rewards"]["rewards"])
    folder = CONFIGS / "budgets" / setting
    assert {path.stem for path in folder.glob("*.yaml")} == {"equal", *names}
    for favoured in ("equal", *names):
        budgets = content(f"budgets/{setting}/{favoured}.yaml")["rewards"]["budgets"]
        assert list(budgets) == names
        assert sum(budgets.values()) == pytest.approx(1)
        expected = {name: 0.25 if favoured == "equal" else 0.55 if name == favoured else 0.15 for name in names}
        assert budgets == expected
