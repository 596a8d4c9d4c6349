"""The released format: tables and profiles on file."""

import numpy as np
import pytest
import torch
from gaussian import FEW_LEVELS, LEVELS, Gaussian

from recast_pl.credit import (
    Fixed,
    FromFile,
    ReCAST,
    Uniform,
    npz,
)
from recast_pl.credit.npz import equivalent_ratios
from recast_pl.verbs.profile import write_profile


def written(folder, *, names=("a", "b"), levels=FEW_LEVELS, budgets=(1.0, 1.0)):
    table = Uniform().table(names, torch.tensor(budgets), levels)
    table[0, 0] += 0.01
    table[0, 1] -= 0.01
    moments = torch.tensor([1.0, 1.01, 1.02, 1.04])
    ratios = {name: equivalent_ratios(moments, 2.0) for name in names}
    path = folder / "profiles.npz"
    npz.write(path, names=names, levels=levels, ratios=ratios, table_RK=table)
    return path, table


def test_a_table_comes_back_and_is_stored_from_clean_to_noise(tmp_path):
    path, table = written(tmp_path)
    torch.testing.assert_close(
        Fixed(path=str(path)).table(("a", "b"), torch.ones(2), FEW_LEVELS), table, atol=0, rtol=0
    )
    with np.load(path) as stored:
        assert stored["table"][:, ::-1].tolist() == table.tolist()
        assert stored["sigmas"].tolist() == FEW_LEVELS.tolist()
        assert stored["ratio__a"].shape == (64, 4)


@pytest.mark.parametrize(
    ("names", "budgets", "levels", "message"),
    [
        (("a", "c"), (1.0, 1.0), FEW_LEVELS, "rewards a, b, this run's are a, c"),
        (("a", "b"), (2.0, 1.0), FEW_LEVELS, r"shares 0\.5, 0\.5, rewards\.budgets asks for 0\.6667, 0\.3333"),
        (("a", "b"), (1.0, 1.0), LEVELS, "is of 4 denoising steps, this run's rollout has"),
        (("a", "b"), (1.0, 1.0), torch.tensor([1.0, 0.7, 0.5, 0.2, 0.0]), "noise levels.*this run's are"),
    ],
)
def test_a_table_of_something_else_is_refused(tmp_path, names, budgets, levels, message):
    path, _ = written(tmp_path)
    with pytest.raises(ValueError, match=message):
        Fixed(path=str(path)).table(names, torch.tensor(budgets), levels)


def test_files_that_are_none_are_refused(tmp_path):
    np.savez(tmp_path / "other.npz", something=np.ones(3))
    with pytest.raises(ValueError, match="no `sigmas`; it holds something"):
        Fixed(path=str(tmp_path / "other.npz"))
    np.savez(tmp_path / "ratios.npz", sigmas=np.array([1.0, 0.5, 0.0]), ratio__a=np.ones((3, 3)))
    with pytest.raises(ValueError, match=r"`ratio__a` must be .* N × 2, got \(3, 3\)"):
        Fixed(path=str(tmp_path / "ratios.npz"))
    for table in (np.full((1, 2), np.nan), np.array([[1.5, -0.5]])):
        levels, rewards = np.array([1.0, 0.5, 0.0]), np.array(["a"])
        np.savez(tmp_path / "table.npz", sigmas=levels, rewards=rewards, table=table)
        with pytest.raises(ValueError, match="`table` must be finite, at least 0 and 1 × 2"):
            Fixed(path=str(tmp_path / "table.npz"))
    np.savez(tmp_path / "levels.npz", sigmas=np.array([14.6, 0.5, 0.0]), ratio__a=np.ones((3, 2)))
    with pytest.raises(ValueError, match="`sigmas` must fall from noise"):
        Fixed(path=str(tmp_path / "levels.npz"))
    np.savez(tmp_path / "profiles.npz", sigmas=np.array([1.0, 0.5, 0.0]), ratio__a=np.ones((3, 2)))
    with pytest.raises(ValueError, match="holds no `table`, only a profiles"):
        Fixed(path=str(tmp_path / "profiles.npz"))
    with pytest.raises(ValueError, match=r"credit\.strategy\.init_args\.path: no file"):
        Fixed(path="nowhere.npz")


def test_profiles_from_a_file_give_the_same_divergences(tmp_path):
    path, _ = written(tmp_path)
    policy = Gaussian(rewards={"a": lambda x0: x0, "b": lambda x0: x0}, levels=FEW_LEVELS)
    strategy = ReCAST(estimator=FromFile(path=str(path)))
    strategy.observe(policy.probe(samples=16))
    expected = torch.tensor([1.0, 1.01, 1.02, 1.04], dtype=torch.float64).log()
    torch.testing.assert_close(strategy.profile.divergence_RK[0], expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("names", "levels", "message"),
    [
        (("a", "c"), FEW_LEVELS, "holds no profiles of c, only of a, b"),
        (("a", "b"), LEVELS, "is of 4 denoising steps, this run's rollout has"),
        (("a", "b"), FEW_LEVELS**2, "noise levels.*this run's are"),
    ],
)
def test_profiles_of_something_else_are_refused(tmp_path, names, levels, message):
    path, _ = written(tmp_path)
    policy = Gaussian(rewards=dict.fromkeys(names, lambda x0: x0), levels=levels)
    with pytest.raises(ValueError, match=message):
        ReCAST(estimator=FromFile(path=str(path))).observe(policy.probe(samples=16))


def test_a_profile_on_file_gives_the_W_that_it_gave(tmp_path):
    """Errors, and so shrinkage and what counts as noise, come back with the moments."""
    policy = Gaussian(rewards={"linear": lambda x0: x0.double(), "wave": lambda x0: torch.sin(4 * x0.double())})
    strategy, probe = ReCAST(), policy.probe(samples=256, group_size=8)
    strategy.observe(probe)
    names, budgets = ("linear", "wave"), torch.tensor([1.0, 2.0])
    write_profile(tmp_path, strategy, strategy.weights(names, budgets, LEVELS))
    again = ReCAST(estimator=FromFile(path=str(tmp_path / "profiles.npz")))
    for _ in range(3):  # the same file once more is no more evidence
        again.observe(probe)
    assert 0 < strategy.profile.signal_R.min() < 1
    assert torch.equal(strategy.table(names, budgets, LEVELS), again.table(names, budgets, LEVELS))
    # of one reward alone, its own row; of one that was not measured, nothing
    alone = Gaussian(rewards={"wave": lambda x0: torch.sin(4 * x0.double())})
    one = ReCAST(estimator=FromFile(path=str(tmp_path / "profiles.npz")))
    one.observe(alone.probe(samples=16))
    assert torch.equal(one.profile.divergence_RK[0], strategy.profile.divergence_RK[1])
    other = Gaussian(rewards={"tide": lambda x0: x0})
    with pytest.raises(ValueError, match="holds no profiles of tide, only of linear, wave"):
        ReCAST(estimator=FromFile(path=str(tmp_path / "profiles.npz"))).observe(other.probe(samples=16))
    with pytest.raises(
        ValueError, match=r"init_args\.clip: the evidence in .* is of clip 5\.0, this run's is 3"
    ):
        ReCAST(estimator=FromFile(path=str(tmp_path / "profiles.npz")), clip=3.0)
