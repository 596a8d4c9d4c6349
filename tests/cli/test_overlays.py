"""The shipped objectives and advantages over the quickstart, through the real command line."""

import math

import pytest
import yaml
from command_line import CONFIGS, run

from recast_pl.policy import SD3Policy

OBJECTIVES = ("nft", "rvm", "ram", "awm", "dgpo")
ADVANTAGES = ("per_reward", "weighted_sum", "gdpo", "leave_one_out", "global_spread")
SHORT = ["--data.iterations_per_epoch", "2", "--trainer.max_epochs", "1", "--trainer.limit_val_batches", "0",
         "--trainer.num_sanity_val_steps", "0", "--credit.strategy", "Uniform"]  # fmt: skip


def path_of(kind, name):
    return CONFIGS / kind / f"{name}.yaml"


def fit(paths, miniature, folder, *extra):
    overlays = [word for path in paths for word in ("--config", str(path))]
    return run("fit", miniature, folder, *overlays, *SHORT, *extra)


def largest_trained(cli):
    """The largest weight of the trained adapters that start at 0."""
    named = cli.model.policy.named_parameters()
    return max(p.abs().max().item() for name, p in named if ".default." in name and "lora_B" in name)


@pytest.mark.parametrize(("objective", "advantages"), zip(OBJECTIVES, ADVANTAGES, strict=True))
def test_an_objective_and_advantages_train(objective, advantages, overlay, tmp_path):
    """One of each in a run; the quickstart's arguments of another class leave nothing behind."""
    chosen = {"objective": objective, "advantages": advantages}
    paths = [path_of(kind, name) for kind, name in chosen.items()]
    cli = fit(paths, overlay, tmp_path)
    assert cli.model.iteration == 2
    logged = {key: value.item() for key, value in cli.trainer.callback_metrics.items()}
    assert {"loss/total", "loss/policy", "advantages/spread"} <= logged.keys()
    assert all(
        math.isfinite(value) for key, value in logged.items() if key.split("/")[0] in ("loss", "advantages")
    )
    assert logged["advantages/spread"] > 0
    assert 0 < largest_trained(cli) < 1
    (printed,) = tmp_path.rglob("config.yaml")
    used = yaml.safe_load(printed.read_text())["model"]
    for kind, path in zip(chosen, paths, strict=True):
        assert used[kind] == yaml.safe_load(path.read_text())["model"][kind]


@pytest.mark.parametrize(("kind", "names"), [("objective", OBJECTIVES), ("advantages", ADVANTAGES)])
def test_every_file_is_tried(kind, names):
    elsewhere = {"flow_grpo", "ddpo"} if kind == "objective" else set()  # tests/integration/test_sde_runs.py
    assert {path.stem for path in (CONFIGS / kind).iterdir()} == set(names) | elsewhere


def test_a_group_that_no_micro_batch_holds_is_refused_before_weights_are_loaded(overlay, tmp_path, monkeypatch):
    monkeypatch.setattr(SD3Policy, "load", None)  # calling it is another error
    with pytest.raises(ValueError, match=r"model\.micro_batch_size: 2 .*data\.group_size"):
        fit([path_of("objective", "dgpo")], overlay, tmp_path, "--model.micro_batch_size", "2")


def test_impossible_coefficients_are_usage_errors(overlay, tmp_path, capsys):
    with pytest.raises(SystemExit):
        fit([path_of("objective", "rvm")], overlay, tmp_path, "--model.objective.init_args.anchor", "none")
    assert "model.objective.init_args.coefficient" in capsys.readouterr().err
