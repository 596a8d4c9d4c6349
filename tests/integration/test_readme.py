"""What the README says, run."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from recast_pl.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


SHORT = [
    *("--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"),
    *("--data.iterations_per_epoch", "2", "--data.num_groups", "2", "--data.group_size", "4"),
    *("--data.evaluation.init_args.count", "8"),
]


def test_the_commands_one_after_another_on_a_shortened_schedule(tmp_path, monkeypatch):
    """`fit`, then `validate` and `export` of its checkpoint by the path that the README names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")

    def run(pattern):
        return main([*shlex.split(re.search(rf"python -m recast_pl ({pattern}.*)", README).group(1)), *SHORT])

    cli = run("fit")
    assert cli.model.iteration == 2
    assert cli.model.policy.distance_to_old() >= 0
    assert len(cli.model.evaluations) == 2
    assert list(tmp_path.rglob("before_after.png"))
    after = run("validate .* --ckpt_path").trainer.callback_metrics
    expected = {key: pytest.approx(value, abs=1e-6) for key, value in cli.model.evaluations[-1][1].items()}
    assert {key: float(after[key]) for key in expected} == expected
    run("export")
    names = {path.name for path in (tmp_path / "lora").iterdir()}
    assert names == {"README.md", "W.png", "pytorch_lora_weights.safetensors"}


def test_the_reward_in_ten_lines():
    code = re.search(r"```python\n(from recast_pl.rewards.*?)```", README, re.S).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    names = {}
    exec(code, names)
    scores = names["Redness"]().score(torch.ones(2, 3, 4, 4), [])
    assert scores.tolist() == pytest.approx([1 / 3] * 2)


def test_the_yaml_it_shows_parses(tmp_path, capsys):
    block = re.search(r"```yaml\n(.*?)```", README, re.S).group(1)
    path = tmp_path / "shown.yaml"
    path.write_text(block)
    assert yaml.safe_load(block)["rewards"]["budgets"]
    source = '{"class_path": "recast_pl.prompts.SceneGrammar"}'
    with pytest.raises(SystemExit) as exit_:
        main(
            [
                "fit",
                "--config",
                str(path),
                "--data.train",
                source,
                "--data.evaluation",
                source,
                "--print_config",
            ]
        )
    assert exit_.value.code == 0
    assert "lora_rank: 16" in capsys.readouterr().out
