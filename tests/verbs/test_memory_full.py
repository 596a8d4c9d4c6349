"""The verb `memory` for full fine-tuning, against what a loaded policy takes."""

import pytest
import torch
from command_line import CONFIGS, run
from test_memory import allocators_peak, module_with, real_loss, saved_by_autograd

from recast_pl.policy import FullFineTuning, SD3Policy
from recast_pl.verbs.memory import memory_table, optimizer_memory, update_memory
from recast_pl.verbs.memory.sketch import Sketch, module_bytes, stored_bytes

FULL = str(CONFIGS / "policy" / "full.yaml")


@pytest.fixture(scope="module", params=["device", "cpu"])
def pair(request, pipeline_folder):
    """The miniature pipeline, loaded, and its sketch."""
    arguments = {
        "pretrained": str(pipeline_folder),
        "max_sequence_length": 1,
        "full_fine_tuning": FullFineTuning(keep_copies=request.param),
    }
    real = SD3Policy(**arguments)
    real.load(seed=0)
    for parameter in real.trainable_parameters():
        parameter.grad = torch.zeros_like(parameter)
    real_loss(real, 1)  # the text is cached from here on
    return real, Sketch(SD3Policy(**arguments), gpu=False)


def test_weights_are_exactly_the_loaded_ones(pair):
    real, sketch = pair
    assert module_bytes(sketch.policy.denoiser) == module_bytes(real.denoiser)
    for which in ("trained", "old", "reference", "copies"):
        a, b = (stored_bytes(getattr(policy.adapters, which)) for policy in (sketch.policy, real))
        assert a == b > 0


def test_an_update_takes_what_it_really_takes(pair):
    real, sketch = pair
    counted = update_memory(module_with(sketch.policy), sketch, 2, checkpointing=False)
    latents = 5 * 2 * torch.Size(real.latent_shape).numel() * 4  # x0, noise and three velocities wait
    assert counted.kept == pytest.approx(saved_by_autograd(real, 2) + latents, rel=0.02)
    measured = allocators_peak(lambda: real_loss(real, 2).backward())
    assert counted.peak == pytest.approx(measured, rel=0.1)


def test_visiting_copies_are_counted(pair):
    real, sketch = pair
    x, t, text = torch.randn(4, *real.latent_shape), torch.rand(4), real.text(["", "a", "b", "c"])

    def step():
        with torch.no_grad(), real.using("old"):
            real.velocity(x, t, text)

    counted = sketch.rollout_peak(4)
    assert counted == pytest.approx(allocators_peak(step), rel=0.06)
    visit = stored_bytes(real.trainable_parameters())
    assert (counted > visit) == (real.adapters.keep_copies == "cpu")


@pytest.mark.parametrize("gpu", [False, True])
def test_an_optimiser_takes_what_it_really_takes(pair, gpu):
    real, sketch = pair
    module = module_with(sketch.policy)
    module.optimizer, sketch.gpu = torch.optim.AdamW, gpu
    state, step = optimizer_memory(module, sketch)
    optimizer = torch.optim.AdamW(real.trainable_parameters(), foreach=gpu)
    optimizer.step()
    assert state == stored_bytes(v for kept in optimizer.state.values() for v in kept.values())
    assert step == pytest.approx(allocators_peak(optimizer.step), rel=0.05)


def test_the_verb_counts_the_trained_weights_and_their_copies(overlay, tmp_path, monkeypatch, pipeline_folder):
    budgets = []
    monkeypatch.setattr("recast_pl.cli.trainer.memory_table", lambda b: budgets.append(b) or memory_table(b))
    keep = "--model.policy.init_args.full_fine_tuning.keep_copies"
    for where in ("device", "cpu"):
        run("memory", overlay, tmp_path, "--config", FULL, keep, where, "--trainer.accelerator", "gpu",
            "--trainer.devices", "2", "--trainer.precision", "bf16-mixed")  # fmt: skip
    beside, away = budgets
    from diffusers import SD3Transformer2DModel

    base = SD3Transformer2DModel.from_pretrained(pipeline_folder / "transformer")
    size = stored_bytes(base.parameters())
    for budget in budgets:
        fixed = budget.fixed
        assert fixed.trained == sum(p.numel() for p in base.parameters())
        assert (fixed.parameters, fixed.denoiser) == (0, stored_bytes(base.buffers()))
        assert fixed.gradients == 2 * size  # and as much in DDP's buckets
        assert fixed.optimizer == 2 * size + 4 * len(list(base.parameters()))
        assert budget.moments["step"] - fixed.standing - budget.stored.total == fixed.gradients + fixed.step
    assert (beside.fixed.adapters, beside.fixed.waiting) == (3 * size, 0)
    assert (away.fixed.adapters, away.fixed.waiting) == (size, 2 * size)
    assert away.passing.rollout - beside.passing.rollout == size  # what visits
    assert "weights, trained, old and reference" in memory_table(beside)
    assert "trained weights, copies on the CPU" in memory_table(away)
