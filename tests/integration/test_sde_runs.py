"""The shipped overlays for rollouts and policy gradients, through the real command line."""

from pathlib import Path

import pytest
import torch
from command_line import CONFIGS, QUICKSTART

from recast_pl.cli import main
from recast_pl.rollout import ODERollout, SDERollout

RUNS = {
    "flow_grpo": ["objective/flow_grpo"],
    "ddpo": ["objective/ddpo"],
    "sde": ["objective/flow_grpo", "rollout/sde"],
    "cps": ["objective/flow_grpo", "rollout/cps"],
    "window": ["objective/flow_grpo", "rollout/window"],
    "ddpo-cps": ["objective/ddpo", "rollout/cps"],
    "nft-sde": ["rollout/sde"],
    "ode": ["rollout/ode"],
    "multistep": ["rollout/multistep"],
}


def fit(overlay, folder, name, *extra):
    overlays = [item for path in RUNS[name] for item in ("--config", str(CONFIGS / f"{path}.yaml"))]
    return main(
        ["fit", "--config", QUICKSTART, "--config", overlay, *overlays,
         "--model.rollout.init_args.num_steps", "6", "--data.iterations_per_epoch", "1",
         "--trainer.num_sanity_val_steps", "0", "--trainer.limit_val_batches", "0",
         "--credit.strategy", "Uniform", "--trainer.logger.init_args.save_dir", str(folder), *extra]
    )  # fmt: skip


def each():
    """All runs; those that differ least from another are slow ones."""
    for name in RUNS:
        quick = name in ("ddpo", "cps", "multistep")
        yield pytest.param(name, id=name, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize("name", each())
def test_an_overlay_trains(name, overlay, tmp_path):
    cli = fit(overlay, tmp_path, name, "--trainer.max_epochs", "1")
    model, metrics = cli.model, cli.trainer.callback_metrics
    assert model.iteration == 1
    assert metrics["loss/total"].isfinite()
    assert metrics["loss/grad_norm"] > 0
    moved = [p for name, p in model.policy.named_parameters() if ".default." in name and "lora_B" in name]
    assert any(p.any() for p in moved)
    on_trajectories = any(path.startswith("objective") for path in RUNS[name])
    assert isinstance(model.rollout, SDERollout if on_trajectories or name == "nft-sde" else ODERollout)
    if on_trajectories:
        assert cli.trainer.global_step == 2  # two updates an iteration
        assert model.policy.distance_to_old() == 0  # the next rollout is the trained policy's own
        assert metrics["loss/ratio"].isfinite()


def test_two_iterations_are_one_and_one(overlay, tmp_path):
    keyed = ["--model.rollout.init_args.window.placement", "keyed"]
    whole = fit(overlay, tmp_path / "whole", "window", "--trainer.max_epochs", "2", *keyed)
    fit(overlay, tmp_path / "half", "window", "--trainer.max_epochs", "1", *keyed)
    (checkpoint,) = Path(tmp_path / "half").rglob("*.ckpt")
    again = ["--trainer.max_epochs", "2", "--ckpt_path", str(checkpoint)]
    resumed = fit(overlay, tmp_path / "more", "window", *again, *keyed)
    assert resumed.model.iteration == whole.model.iteration == 2
    first, second = whole.model.policy.saved_state(), resumed.model.policy.saved_state()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_memory_counts_trajectories_and_guided_updates(overlay, tmp_path, caplog):
    """Of 6 samples: latents before and after 5 stochastic steps, 4 × 8 × 8 float32 each."""
    with caplog.at_level("INFO"):
        main(["memory", "--config", QUICKSTART, "--config", overlay,
              "--config", str(CONFIGS / "objective" / "flow_grpo.yaml"),
              "--model.rollout.init_args.num_steps", "6", "--model.rollout.init_args.guidance_scale", "4.5",
              "--trainer.logger.init_args.save_dir", str(tmp_path)])  # fmt: skip
    (line,) = [line for line in caplog.text.splitlines() if line.startswith("  trajectories")]
    assert float(line.split()[1]) == pytest.approx(6 * 6 * 4 * 8 * 8 * 4 / 2**20, abs=5e-4)
