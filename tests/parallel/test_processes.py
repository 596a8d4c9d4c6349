"""The result of a run does not depend on how many processes it is spread over, nor on how."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from command_line import QUICKSTART

HERE = Path(__file__).parents[1]
STRATEGY = HERE.parent / "configs" / "strategy"

DDP, FSDP = ("--config", str(STRATEGY / "ddp.yaml")), ("--config", str(STRATEGY / "fsdp.yaml"))

CASES = {
    # a group of four is split between two processes of six samples
    "split": {
        "data.num_groups": 3,
        "data.group_size": 4,
        "model.micro_batch_size": 5,
        "model.average": {"decay": 0.5},
        "model.evaluated_policy": "averaged",
    },
    # one of two groups has nothing to learn, and half of the time it is the whole share of a process
    "dull": {
        "data.num_groups": 2,
        "data.group_size": 6,
        "rewards.rewards": {"contrast": {"class_path": "parallel_cases.Contrast"}},
        "rewards.budgets": {"contrast": 1.0},
    },
    # stochastic rollouts with their log-probabilities; whole groups at one step, noised alike
    "grpo": {
        "data.num_groups": 2,
        "data.group_size": 6,
        "model.rollout": {
            "class_path": "recast_pl.rollout.SDERollout",
            "init_args": {"num_steps": 4, "micro_batch_size": 3, "window": {"length": 2}},
        },
        "model.objective": {"class_path": "recast_pl.objectives.FlowGRPO"},
        "model.updates_per_iteration": 2,
    },
    "full": {
        "data.num_groups": 2,
        "data.group_size": 6,
        "model.policy.init_args.full_fine_tuning": {"keep_copies": "cpu"},
        "model.optimizer.init_args.lr": 1e-4,
    },
    "dgpo": {
        "data.num_groups": 2,
        "data.group_size": 6,
        "model.objective": {"class_path": "recast_pl.objectives.DGPO"},
    },
    "masked": {
        "data.num_groups": 3,
        "data.group_size": 4,
        "model.updates_per_iteration": 2,
        "rewards.on_failure": "mask",
        "rewards.rewards": {
            "moody": {"class_path": "parallel_cases.Moody"},
            "brightness": {"class_path": "parallel_cases.Brightness"},
        },
        "rewards.budgets": {"moody": 1.0, "brightness": 2.0},
    },
}


def arguments(overlay, folder, case, *extra, verb="fit"):
    """Three iterations; rollouts in micro-batches of three, so that one process and two have the same ones."""
    prompts = folder.parent / "prompts.txt"
    prompts.write_text("".join(f"{word} number {i}\n" for i in range(3) for word in ("dull", "lively")))
    given = {
        "data.train": {"class_path": "recast_pl.prompts.TextFile", "init_args": {"path": str(prompts)}},
        "data.evaluation.init_args.count": 7,
        "data.evaluation_batch_size": 4,
        "data.iterations_per_epoch": 3,
        "model.rollout.init_args.micro_batch_size": 3,
        "trainer.max_epochs": 1,
        "trainer.callbacks": [{"class_path": "parallel_cases.Recorder", "init_args": {"folder": str(folder)}}],
        "rewards.rewards": {
            "brightness": {"class_path": "parallel_cases.Brightness"},
            "jpeg": {"class_path": "recast_pl.rewards.JPEGIncompressibility"},
        },
        "rewards.budgets": {"brightness": 1.0, "jpeg": 1.0},
        "checkpoint.folder": str(folder),
        "trainer.logger": False,
        **CASES[case],
    }
    pairs = []
    for key, value in given.items():
        pairs += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return [verb, "--config", QUICKSTART, "--config", overlay, *pairs, *extra]


def launch(runs, folder, processes):
    """Runs of the command line, one after another, in as many processes as torchrun would start."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.json").write_text(json.dumps(runs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {
        **{"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "GROUP_RANK": 0},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"},
        "OMP_NUM_THREADS": 1,
    }
    group["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])
    started = []
    for rank in range(processes):
        place = group | {"RANK": rank, "LOCAL_RANK": rank}
        with (folder / f"process-{rank}.log").open("w") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / "parallel_cases.py"), str(folder / "runs.json")],
                    env=os.environ | {key: str(value) for key, value in place.items()},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                )
            )
    try:
        for rank, process in enumerate(started):
            code = process.wait(timeout=600)
            assert code == 0, (folder / f"process-{rank}.log").read_text()[-4000:]
    finally:
        for process in started:
            process.kill()


def recorded(folder):
    """What all processes of a run recorded, by (iteration, sample), and its checkpoint."""
    records = [torch.load(path) for path in sorted(folder.glob("record-*.pt"))]
    rows = {row["key"]: row for record in records for row in record["rows"]}
    noises = {key: value for record in records for key, value in record["noises"].items()}
    return rows, noises, records, torch.load(folder / "last.ckpt", weights_only=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def runs(overlay, place):
    two = ("--trainer.devices", "2")
    kinds = {"one": (), "ddp": (*DDP, *two), "fsdp": (*FSDP, *two)}
    whole = {(case, kind): arguments(overlay, place / f"{case}-{kind}", case, *extra)
             for case in CASES for kind, extra in kinds.items()}  # fmt: skip
    launch([run for (_, kind), run in whole.items() if kind != "one"], place / "two", processes=2)
    launch([run for (_, kind), run in whole.items() if kind == "one"], place / "one", processes=1)
    return {key: recorded(place / "-".join(key)) for key in whole}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", CASES)
def test_prompts_groups_and_noises_are_the_same_ones(runs, case, kind):
    rows, noises, _, _ = runs[case, kind]
    expected_rows, expected_noises, _, _ = runs[case, "one"]
    assert rows.keys() == expected_rows.keys()
    for key, row in rows.items():
        assert (row["prompt"], row["group"]) == (expected_rows[key]["prompt"], expected_rows[key]["group"])
    assert noises.keys() == expected_noises.keys()
    assert all(torch.equal(noise, expected_noises[key][0]) for key, (noise, _) in noises.items())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", CASES)
def test_rollouts_scores_and_advantages_are_the_same(runs, case, kind):
    rows, noises, _, _ = runs[case, kind]
    expected_rows, expected_noises, _, _ = runs[case, "one"]
    for (iteration, sample), row in rows.items():
        expected = expected_rows[iteration, sample]
        for name in ("x0", "image", "scores"):
            if iteration == 0:  # the same weights, and the same micro-batches
                torch.testing.assert_close(row[name], expected[name], rtol=0, atol=0, equal_nan=True)
            else:
                torch.testing.assert_close(row[name], expected[name], rtol=1e-5, atol=1e-5, equal_nan=True)
    for key, (_, advantage) in noises.items():
        if key[0] == 0:
            assert advantage == expected_noises[key][1]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", CASES)
def test_weights_after_three_iterations_are_the_same(runs, case, kind):
    _, _, _, checkpoint = runs[case, kind]
    _, _, _, expected = runs[case, "one"]
    moved = 0.0
    assert checkpoint["state_dict"].keys() == expected["state_dict"].keys()
    for name, tensor in checkpoint["state_dict"].items():
        wanted = expected["state_dict"][name]
        assert (tensor - wanted).norm() <= 1e-4 * wanted.norm()
        start = expected["state_dict"].get(name.replace(".default.", ".old.").replace("default.", "old."))
        moved += float((wanted - start).norm())
    assert moved > 1e-3  # from the old weights, which trail
    for key in ("exp_avg", "exp_avg_sq"):
        for mine, theirs in zip(
            checkpoint["optimizer_states"][0]["state"].values(),
            expected["optimizer_states"][0]["state"].values(),
            strict=True,
        ):
            torch.testing.assert_close(mine[key], theirs[key], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", CASES)
def test_every_process_logs_the_same_and_evaluates_each_prompt_once(runs, case, kind):
    _, _, records, _ = runs[case, kind]
    _, _, (alone,), _ = runs[case, "one"]
    assert len(records) == 2
    for record in records:
        assert record["logged"].keys() == alone["logged"].keys()
        for key, value in alone["logged"].items():
            if not key.startswith("time/"):
                assert record["logged"][key] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), key
        for (iteration, values), (expected_iteration, expected) in zip(
            record["evaluations"], alone["evaluations"], strict=True
        ):
            assert iteration == expected_iteration
            assert values == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", ["one-after-fsdp", "fsdp-after-one"])
def test_a_checkpoint_goes_on_under_another_strategy(runs, overlay, place, kind):
    more = ("--trainer.max_epochs", "2", "--ckpt_path")
    before = {name: str(place / f"split-{name}" / "last.ckpt") for name in ("one", "fsdp")}
    if kind == "one-after-fsdp":
        pair = [
            arguments(overlay, place / f"one-after-{name}", "split", *more, before[name]) for name in before
        ]
        launch(pair, place / "one", processes=1)
    else:
        two = (*FSDP, "--trainer.devices", "2")
        run = arguments(overlay, place / kind, "split", *two, *more, before["one"])
        launch([run], place / "two", processes=2)
    _, _, _, checkpoint = recorded(place / kind)
    _, _, _, expected = recorded(place / "one-after-one")
    assert checkpoint["iteration"] == expected["iteration"] == 6
    for name, tensor in checkpoint["state_dict"].items():
        wanted = expected["state_dict"][name]
        assert (tensor - wanted).norm() <= 1e-4 * wanted.norm()
    for mine, theirs in zip(
        checkpoint["optimizer_states"][0]["state"].values(),
        expected["optimizer_states"][0]["state"].values(),
        strict=True,
    ):
        assert mine["step"] == theirs["step"] == 6
        torch.testing.assert_close(mine["exp_avg_sq"], theirs["exp_avg_sq"], rtol=1e-3, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["split", "full"])
def test_half_precision_base_weights_shard_beside_what_is_trained(overlay, place, case):
    """As on SD3.5-Medium: frozen bfloat16 beside trained float32, under autocast; two copies of two parts."""
    half = ("--trainer.precision", "bf16-mixed", "--model.policy.init_args.weights_dtype", "bfloat16")
    part = ("--model.policy.init_args.full_fine_tuning.modules", '["attn"]') if case == "full" else ()
    hybrid = ("--config", str(STRATEGY / "hybrid.yaml"), "--trainer.strategy.init_args.shard_size", "2")
    four = (*hybrid, "--trainer.num_nodes", "1", "--trainer.devices", "4", *half, *part)
    names = {count: place / f"half-{case}-{count}" for count in ("one", "four")}
    launch([arguments(overlay, names["four"], case, *four)], place / "four", processes=4)
    launch([arguments(overlay, names["one"], case, *half, *part)], place / "one", processes=1)
    rows, _, _, checkpoint = recorded(names["four"])
    expected_rows, _, _, expected = recorded(names["one"])
    for (iteration, sample), row in rows.items():
        if iteration == 0:  # the same weights, and the same micro-batches
            assert torch.equal(row["x0"], expected_rows[iteration, sample]["x0"])
    for name, tensor in checkpoint["state_dict"].items():
        wanted = expected["state_dict"][name]
        assert tensor.dtype == torch.float32
        # gradients of bfloat16 products, added in another order, and divided by their own size in AdamW
        assert (tensor - wanted).norm() <= 0.3 * wanted.norm()


def test_the_cases_are_what_they_say(runs):
    rows, noises, _, _ = runs["split", "ddp"]
    assert {row["group"] for (_, sample), row in rows.items() if sample in (5, 6)} == {1, 4, 7}
    _, noises, _, _ = runs["dull", "one"]
    shares = [all(a == 0 for (i, s, _), (_, a) in noises.items() if i == iteration and s // 6 == share)
              for iteration in range(3) for share in range(2)]  # fmt: skip
    assert any(shares)
    assert not all(shares)
    scores = torch.stack([row["scores"] for row in runs["masked", "one"][0].values()])
    assert 0 < scores[:, 0].isnan().sum() < len(scores)
    assert scores[:, 1].isfinite().all()


def test_a_strategy_that_does_not_fit_says_so(overlay, tmp_path):
    from recast_pl.strategies import FullyShard

    with pytest.raises(ValueError, match=r"trainer\.strategy\.init_args\.shard_size: expected 1 or more"):
        FullyShard(shard_size=0)
    assert yaml.safe_load((STRATEGY / "fsdp.yaml").read_text())["trainer"]["strategy"]
