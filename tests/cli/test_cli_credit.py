"""The verb `profile`, and strategies swapped by overlay."""

from pathlib import Path

import pytest
import torch
from command_line import CONFIGS, credit_of, run
from PIL import Image

from recast_pl.credit import npz, renyi_divergence
from recast_pl.verbs.profile import change_line, profile_table

PAIRED = ("--credit.strategy.estimator", "recast_pl.credit.PairedCompletions")


@pytest.fixture(scope="session")
def profiled(overlay, tmp_path_factory):
    """One finished `profile` and its folder."""
    folder = tmp_path_factory.mktemp("profile")
    return run("profile", overlay, folder, "--iterations", "2", "--folder", str(folder), *PAIRED), folder


def test_profile_writes_what_can_be_read_back(profiled):
    cli, folder = profiled
    assert cli.model.iteration == 0
    file, strategy = npz.read(folder / "profiles.npz"), credit_of(cli).strategy
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


def test_a_checkpoint_of_another_alpha_is_not_profiled(overlay, tmp_path):
    cli = run("fit", overlay, tmp_path, "--trainer.max_epochs", "1")
    checkpoint = next(tmp_path.rglob("last.ckpt"))
    other = str(2 * cli.model.policy.settings["lora_alpha"])
    with pytest.raises(ValueError, match=r"lora_alpha: the checkpoint's is"):
        run("profile", overlay, tmp_path, "--iterations", "1", "--ckpt_path", str(checkpoint),
            "--model.policy.init_args.lora_alpha", other, *PAIRED)  # fmt: skip


def test_a_written_profile_and_table_train(profiled, overlay, tmp_path):
    file = str(profiled[1] / "profiles.npz")
    cli = run("fit", overlay, tmp_path, "--trainer.max_epochs", "1",
              "--credit.strategy", "recast_pl.credit.Fixed", "--credit.strategy.path", file)  # fmt: skip
    torch.testing.assert_close(cli.model.credit.weights.values_RK / 4, npz.read(Path(file)).table_RK)


def test_a_written_profile_gives_the_W_that_profile_gave(profiled, overlay, tmp_path):
    file = profiled[1] / "profiles.npz"
    cli = run("fit", overlay, tmp_path, "--trainer.max_epochs", "1",
              "--credit.strategy.estimator", "recast_pl.credit.FromFile",
              "--credit.strategy.estimator.path", str(file))  # fmt: skip
    torch.testing.assert_close(cli.model.credit.weights.values_RK / 4, npz.read(file).table_RK)


def test_the_change_of_W_by_hand():
    tables = [torch.zeros(2, 2), torch.tensor([[0.4, 0.0], [0.0, 0.0]]), torch.tensor([[0.4, 0.2], [0.0, 0.0]])]
    assert "at first 0.1000, at last 0.0500" in change_line(tables)
    assert "no change" in change_line(tables[:1])


def test_profile_without_a_measuring_strategy_says_so(overlay, tmp_path, clip_folder):
    with pytest.raises(ValueError, match="`profile` needs ReCAST with an estimator that measures.*got Uniform"):
        run("profile", overlay, tmp_path, "--credit.strategy", "recast_pl.credit.Uniform")


@pytest.mark.parametrize("name", ["uniform", "snr", "recast", "fixed"])
def test_strategies_are_swapped_by_overlay(name, overlay, tmp_path, profiled):
    table = ("--credit.strategy.path", str(profiled[1] / "profiles.npz")) if name == "fixed" else ()
    cli = run("fit", overlay, tmp_path, "--config", str(CONFIGS / "credit" / f"{name}.yaml"),
              "--trainer.max_epochs", "1", *table)  # fmt: skip
    assert type(credit_of(cli).strategy).__name__.lower() == name
    sums = cli.model.credit.weights.values_RK.sum(1)
    budgets = cli.model.rewards.budgets_R
    torch.testing.assert_close(sums / sums.sum(), budgets / budgets.sum(), atol=1e-9, rtol=0)
