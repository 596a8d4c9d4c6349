"""The benchmarks themselves, at miniature shapes: what they compare is equal, and what they count is there."""

import json
import sys
from dataclasses import asdict

import growth
import iteration
import memory_flat
import operations
import pytest
import torch
import worth_by_step
from gpu_check import MEDIUM, Shape, measured, table
from plain_loop import Outcome
from worth import Worth, figure
from worth import table as worth_table
from worth_by_step import Measurement


@pytest.fixture(autouse=True)
def _own_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmark"])


def test_the_plain_loop_computes_what_the_framework_does(overlay):
    """Every pair of iterations is compared; a run raises where losses differ by more than 1e-5 of them."""
    pairs = iteration.measured(["--config", overlay], pairs=3)
    assert len(pairs) == 3
    for pair in pairs:
        assert pair.ours.loss == pytest.approx(pair.plain.loss, rel=1e-5)
        assert pair.ours.grad_norm == pytest.approx(pair.plain.grad_norm, rel=1e-3)
        assert pair.ours.grad_norm > 1e-4  # the groups' scores differ, or there would be nothing to compare
    assert len({pair.ours.loss for pair in pairs}) == 3
    report = iteration.summary(pairs)
    assert set(report["rows"]) >= {"text", "rollout", "decode", "clipscore", "jpeg", "update", "iteration"}
    assert report["ratios"] == sorted(report["ratios"])
    assert "| update |" in iteration.table(report)


def test_the_best_row_of_w_is_value_over_noise():
    worth = Worth(
        names=("a",),
        levels=torch.tensor([1.0, 0.5, 0.1, 0.0]),
        steps=torch.arange(3),
        mean_square_RK=torch.ones(1, 3),
        noise_RK=torch.tensor([[1.0, 4.0, 1.0]]),
        value_RK=torch.tensor([[2.0, 4.0, -1.0]]),
        error_RK=torch.zeros(1, 3),
        weights_RK=torch.ones(1, 3),
    )
    torch.testing.assert_close(worth.best_RK(), torch.tensor([[2 / 3, 1 / 3, 0.0]]))
    # (2 + 4 − 1) / √6 against √(2²/1 + 4²/4)
    assert float(worth.efficiency_R(torch.ones(1, 3))) == pytest.approx(5 / 6**0.5 / 8**0.5)
    assert float(worth.efficiency_R(worth.best_RK())) == pytest.approx(1.0)


def test_the_worth_of_steps_is_measured_on_a_policy_that_stays_where_it_is(overlay, monkeypatch, tmp_path):
    kept = {}

    def spy(self, module, batches):
        scores = held_out(module, batches)
        kept.setdefault("first", scores)
        kept.setdefault("before", [one.detach().clone() for one in module.policy.trainable_parameters()])
        kept["last"], kept["after"] = scores, list(module.policy.trainable_parameters())
        return scores

    held_out = Measurement._held_out
    monkeypatch.setattr(Measurement, "_held_out", spy)
    worth = worth_by_step.measured(["--config", overlay], batches=2)
    assert all(torch.equal(a, b) for a, b in zip(kept["before"], kept["after"], strict=True))
    shape = len(worth.names), len(worth.steps)
    assert worth.value_RK.shape == worth.noise_RK.shape == worth.weights_RK.shape == shape
    assert (worth.noise_RK > 0).all()
    assert (worth.error_RK > 0).any()
    assert not torch.equal(kept["first"], kept["last"])  # the last one was of a moved policy
    worth.write(tmp_path / "worth.json")
    again = Worth.read(tmp_path / "worth.json")
    assert worth_table(again) == worth_table(worth)
    figure(again, tmp_path / "worth.png")
    assert (tmp_path / "worth.png").stat().st_size > 1000


def test_operations_of_both_programs_are_profiled(overlay):
    profiled = operations.measured(["--config", overlay])
    for seconds in (profiled.ours, profiled.plain):
        assert seconds["matrix products"] > 0
        assert seconds["attention"] > 0
        assert seconds.get("other", 0.0) < sum(seconds.values()) / 2
    assert "| matrix products | " in operations.table(profiled)


def test_the_larger_pipeline_is_one_that_the_policy_takes(tmp_path):
    from quickstart import built, larger

    cli = built(larger(tmp_path), iterations=1)
    cli.model.policy.load(seed=0)
    assert cli.model.policy.latent_shape == (8, 32, 32)
    assert cli.model.policy.denoiser.config.num_attention_heads == 6


def test_a_difference_is_found():
    one = Outcome(loss=1.0, grad_norm=1.0, seconds={}, cpu_seconds=0.0)
    for changes in ({"loss": 1.00002}, {"grad_norm": 1.002}, {"loss": float("nan")}):
        with pytest.raises(RuntimeError, match="the plain loop's"):
            iteration.check_equal(one, Outcome(**(asdict(one) | changes)))


def test_ratios_are_within_pairs():
    def outcome(seconds):
        return Outcome(loss=0.0, grad_norm=0.0, cpu_seconds=seconds, seconds=dict.fromkeys(
            ("text", "rollout", "decode", "rewards", "advantages", "credit", "update", "old_policy", "other"),
            seconds,
        ))  # fmt: skip

    pairs = [iteration.Pair(ours=outcome(a), plain=outcome(b)) for a, b in ((1, 2), (30, 40), (1, 10))]
    report = iteration.summary(pairs)
    assert report["ratios"] == pytest.approx([0.1, 0.5, 0.75])
    assert report["ratio"] == pytest.approx(0.5)


def test_memory_is_read_after_every_iteration(overlay):
    values = memory_flat.resident(["--config", overlay], iterations=3)
    assert len(values) == 3
    assert all(2**20 < value < 2**40 for value in values)
    assert memory_flat.slope([3.0, 3.5, 4.0, 4.5]) == pytest.approx(0.5)


def test_growth_counts_what_it_varies(overlay, tmp_path):
    found = growth.measured(growth.Variant(groups=2, steps=4, rewards=2), ["--config", overlay], iterations=1)
    assert set(found) == {"iteration", "rollout", "rewards", "update", "memory"}
    assert found["iteration"] > found["rollout"] > 0
    rows = [{"varied": "steps", "value": value, **found} for value in (5, 10)]
    assert growth.table(rows).count("\n") == 3
    growth.figure(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert {len(variants) for variants in growth.SERIES.values()} == {3}
    assert len(growth.REWARDS) == 8


SMALL = Shape(
    transformer={
        **MEDIUM, "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2,
        "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32,
        "caption_projection_dim": 32, "pooled_projection_dim": 32, "pos_embed_max_size": 8,
        "dual_attention_layers": (0,),
    },
    vae={
        "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (8, 8), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4,
        "sample_size": 16, "use_quant_conv": False, "use_post_quant_conv": False,
        "scaling_factor": 0.8, "shift_factor": 0.1,
    },
    resolution=16, tokens=5, rank=4, steps=6, trained=5,
)  # fmt: skip


@pytest.mark.parametrize("backend", [None, pytest.param("eager", marks=pytest.mark.slow)])
def test_the_gpu_check_in_miniature_on_a_cpu(capsys, backend):
    rows = measured(SMALL, torch.device("cpu"), [2, 3], backends=(backend,), seconds=300)
    assert [(row.mode, row.batch, row.pairs) for row in rows] == [("eager", 2, 10), ("eager", 3, 15)]
    for row in rows:
        assert row.rate < row.rollout_rate
        assert row.note == ""
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert told == [asdict(row) for row in rows]
    assert table(rows).count("| eager |") == 2


def test_what_there_is_no_time_for_is_said_to_be_so():
    (row,) = measured(SMALL, torch.device("cpu"), [2], backends=(None,), seconds=-1)
    assert (row.note, row.rate) == ("no time", None)
