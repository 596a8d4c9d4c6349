"""Strategies, the CreditAssigner and what a checkpoint keeps, on the one-parameter policy."""

import math
from dataclasses import replace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from gaussian import LEVELS, ExactCompletions, Gaussian
from one_pixel import Near, theta, train

from recast_pl.advantages import PerReward, group_z_scores
from recast_pl.credit import (
    SNR,
    CreditAssigner,
    CreditStrategy,
    Fixed,
    FromFile,
    PairedCompletions,
    Preview,
    ReCAST,
    Uniform,
    ValueHead,
    history_figure,
    profile_figure,
    released,
    weights_figure,
)
from recast_pl.credit.assigner import evenness
from recast_pl.credit.released import equivalent_ratios
from recast_pl.profiling import write_profile
from recast_pl.rewards import Reward
from recast_pl.types import Scores, Weights

FEW_LEVELS = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0], dtype=torch.float64)
NAMES = ("near", "far")
REWARDS = {"near": Near(0.5), "far": Near(-3.0)}


class Spread(Reward):
    """Something else than position: how far a sample is from 0, in either direction."""

    def score(self, images_B3HW, prompts):
        return images_B3HW.mean(dim=(1, 2, 3)).abs()


class Noise(Reward):
    """Another number every time, whatever the picture."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(11)

    def score(self, images_B3HW, prompts):
        return torch.randn(len(images_B3HW), generator=self.generator)


class Still(Reward):
    """The same for all pictures."""

    def score(self, images_B3HW, prompts):
        return torch.ones(len(images_B3HW))


def test_uniform_has_the_budgets_as_rows_and_equal_columns():
    table = Uniform().table(("a", "b", "c", "d"), torch.tensor([2.0, 1.0, 0.0, 1.0]), FEW_LEVELS)
    assert table.dtype == torch.float64
    assert table.sum(1).tolist() == [0.5, 0.25, 0.0, 0.25]
    assert table.sum(0).tolist() == [0.25] * 4


def test_training_weights_sum_to_one_at_every_step():
    weights = Uniform().weights(("a", "b", "c"), torch.tensor([1.0, 5.0, 3.0]), FEW_LEVELS)
    torch.testing.assert_close(weights.values_RK.sum(0), torch.ones(4, dtype=torch.float64))
    assert weights.names == ("a", "b", "c")


@pytest.mark.parametrize("steps", [10, 25, 49])
def test_uniform_training_weights_are_the_budget_shares_bit_for_bit(steps):
    """… and so are advantages: what one mixes by hand who knows no W."""
    budgets = torch.tensor([0.97, 0.01, 0.02], dtype=torch.float64)
    weights = Uniform().weights(("a", "b", "c"), budgets, torch.linspace(1, 0, steps + 1))
    share = budgets / budgets.sum()
    assert torch.equal(weights.values_RK, share[:, None].expand(3, steps))
    scores = torch.rand(3, 16, generator=torch.Generator().manual_seed(0))
    group, valid = torch.arange(16) // 8, torch.ones(3, 16, dtype=torch.bool)
    mixed = PerReward()(Scores(names=("a", "b", "c"), values_RB=scores, valid_RB=valid), group, weights)
    z_RB = group_z_scores(scores, valid, group)
    by_hand = z_RB.T @ share[:, None].expand(3, steps).contiguous()
    assert torch.equal(mixed, by_hand)


def test_snr_weighs_steps_by_hand_and_keeps_budgets():
    table = SNR(maximum=5.0).table(("a", "b"), torch.tensor([3.0, 1.0]), FEW_LEVELS)
    times = torch.tensor([0.0, 1 / 16, 1.0, 5.0], dtype=torch.float64)  # ((1 − t)/t)², clipped from 16
    torch.testing.assert_close(table[0], 0.75 * times / times.sum())
    torch.testing.assert_close(table.sum(1), torch.tensor([0.75, 0.25], dtype=torch.float64))


def test_recast_follows_what_can_be_told_when():
    """Of a linear and a finer reward, the finer one is worth more near the clean end."""
    policy = Gaussian(
        rewards={"linear": lambda x0: x0.double(), "wave": lambda x0: torch.sin(12 * x0.double())}
    )
    strategy = ReCAST(estimator=ExactCompletions(policy))
    strategy.observe(policy.probe(samples=4096, group_size=64))
    W_RK = strategy.table(("linear", "wave"), torch.tensor([1.0, 2.0]), LEVELS)
    torch.testing.assert_close(W_RK.sum(1), torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    torch.testing.assert_close(W_RK.sum(0), torch.full((10,), 0.1, dtype=torch.float64))
    linear, wave = W_RK[0] / W_RK[0].sum(), W_RK[1] / W_RK[1].sum()
    middle = torch.arange(10, dtype=torch.float64)
    assert (linear * middle).sum() < (wave * middle).sum() - 0.5
    assert strategy.profile.half_level(0) > strategy.profile.half_level(1) + 0.2


def test_temperatures_by_reward_and_wrong_names():
    policy = Gaussian(rewards={"a": lambda x0: x0.double(), "b": lambda x0: torch.sin(12 * x0.double())})
    probe = policy.probe(samples=1024, group_size=64)
    tables = {}
    for b in (1.0, 1e6):
        strategy = ReCAST(estimator=ExactCompletions(policy), temperature={"a": 1e6, "b": b})
        strategy.observe(probe)
        tables[b] = strategy.table(("a", "b"), torch.ones(2), LEVELS)
    assert tables[1e6].std() < 1e-5 < tables[1.0].std()
    with pytest.raises(ValueError, match=r"temperature: names a, c, but the rewards are a, b"):
        ReCAST(temperature={"a": 1.0, "c": 1.0}).check(("a", "b"), torch.ones(2))


def test_fewer_samples_are_the_first_ones_of_every_process():
    policy = Gaussian(rewards={"linear": lambda x0: x0.double()})
    few = policy.probe(samples=64, group_size=8, seed=3).first(24)
    assert few.experience.scores.values_RB.shape == (1, 24)
    alone = policy.probe(samples=24, group_size=8, x0=few.experience.rollout.x0_BCHW, seed=3)
    for estimator in (PairedCompletions(), Preview()):
        one, two = ReCAST(estimator=estimator), ReCAST(estimator=estimator, samples=24)
        one.observe(alone)
        two.observe(policy.probe(samples=64, group_size=8, seed=3))
        torch.testing.assert_close(one.profile.divergence_RK, two.profile.divergence_RK, atol=0, rtol=0)


def test_the_second_of_two_processes_keeps_its_own_place():
    policy = Gaussian(rewards={"linear": lambda x0: x0.double()})
    whole = policy.probe(samples=16, group_size=4)
    rollout = whole.experience.rollout
    second = replace(
        whole,
        experience=replace(
            whole.experience,
            rollout=policy.probe(samples=8, group_size=4, x0=rollout.x0_BCHW[8:]).experience.rollout,
            own=slice(8, 16),
        ),
    ).first(4)
    kept = second.experience
    assert kept.group_B.tolist() == [0] * 4 + [2] * 4
    assert kept.own == slice(4, 8)
    torch.testing.assert_close(kept.scores.values_RB[0, kept.own], kept.rollout.x0_BCHW.flatten())


def test_W_before_evidence_is_an_error():
    with pytest.raises(RuntimeError, match="before any evidence"):
        ReCAST().table(("a",), torch.ones(1), LEVELS)


def test_wrong_interval_names_its_key():
    with pytest.raises(ValueError, match=r"credit\.every_n_steps"):
        CreditAssigner(every_n_steps=0)


# ---------------------------------------------------------------------- the released format


def written(folder, *, names=("a", "b"), levels=FEW_LEVELS, budgets=(1.0, 1.0)):
    table = Uniform().table(names, torch.tensor(budgets), levels)
    table[0, 0] += 0.01
    table[0, 1] -= 0.01
    moments = torch.tensor([1.0, 1.01, 1.02, 1.04])
    ratios = {name: equivalent_ratios(moments, 2.0) for name in names}
    path = folder / "profiles.npz"
    released.write(path, names=names, levels=levels, ratios=ratios, table_RK=table)
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
        (("a", "b"), (1.0, 1.0), LEVELS, "noise levels.*this run's are"),
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
        (("a", "c"), FEW_LEVELS, "rewards a, b, this run's are a, c"),
        (("a", "b"), LEVELS, "noise levels.*this run's are"),
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
    with pytest.raises(
        ValueError, match=r"init_args\.clip: the evidence in .* is of clip 5\.0, this run's is 3"
    ):
        ReCAST(estimator=FromFile(path=str(tmp_path / "profiles.npz")), clip=3.0)


# ---------------------------------------------------------------------- in a run


@pytest.mark.parametrize(
    "estimator", [PairedCompletions, Preview, ValueHead, lambda: Preview(regression="isotonic")]
)
def test_every_estimator_trains(estimator):
    credit = CreditAssigner(every_n_steps=5, strategy=ReCAST(estimator=estimator()))
    module, _ = train({"near": Near(0.5), "spread": Spread()}, epochs=4, credit=credit)
    assert theta(module) > 0.2
    assert [iteration for iteration, _ in credit.history] == [0, 5, 10, 15]
    for _, values_RK in credit.history:
        torch.testing.assert_close(values_RK.sum(0), torch.ones(8, dtype=torch.float64), atol=1e-8, rtol=0)


class NoCredit(CreditAssigner):
    """K·W by hand, without a strategy."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.weights = Weights(
            names=pl_module.rewards.names,
            levels=pl_module.levels,
            values_RK=torch.tensor([[0.75], [0.25]], dtype=torch.float64).expand(2, 8),
        )


def test_uniform_equals_a_run_without_credit_code():
    budgets = {"near": 3.0, "far": 1.0}
    one, _ = train(REWARDS, epochs=2, budgets=budgets)
    two, _ = train(REWARDS, epochs=2, budgets=budgets, credit=NoCredit())
    assert theta(one) == theta(two)


def test_looking_at_the_samples_changes_nothing_but_W():
    """Evidence is gathered without touching the iteration: with a huge temperature, ReCAST is Uniform."""
    even = CreditAssigner(strategy=ReCAST(estimator=PairedCompletions(), temperature=1e9))
    one, _ = train(REWARDS, epochs=2)
    two, _ = train(REWARDS, epochs=2, credit=even)
    assert theta(one) == pytest.approx(theta(two), abs=1e-6)


class WatchedUniform(Uniform):
    """Uniform, while a value head learns from the update."""

    needs_updates = True

    def __init__(self):
        self.estimator = ValueHead(learning_rate=0.1)
        self.estimator.check(ReCAST())

    def watch(self, part):
        self.estimator.watch(part)

    def learn(self, total):
        self.estimator.learn(total)


def test_the_value_head_never_changes_the_policy_s_gradients():
    plain, _ = train(REWARDS, epochs=2)
    strategy = WatchedUniform()
    watched, _ = train(REWARDS, epochs=2, credit=CreditAssigner(strategy=strategy))
    assert strategy.estimator.head is not None
    assert theta(plain) == theta(watched)
    for key, value in plain.policy.saved_state().items():
        assert torch.equal(value, watched.policy.saved_state()[key])


def test_the_value_head_learns_what_can_be_told():
    """Near the clean end more than near noise; of noise, and before it has learnt, it says nothing."""
    rewards = {"still": Still(), "near": Near(3.0), "noise": Noise()}
    budgets = {"still": 1.0, "near": 0.0, "noise": 0.0}  # nothing moves
    strategy = ReCAST(estimator=ValueHead(learning_rate=1e-2), memory=0.5)
    untrained = CreditAssigner(every_n_steps=1000, strategy=ReCAST(estimator=ValueHead()))
    train(rewards, budgets=budgets, epochs=1, credit=untrained)
    assert untrained.strategy.profile.total_R.tolist() == pytest.approx([0, 0, 0], abs=1e-12)
    credit = CreditAssigner(every_n_steps=10, strategy=strategy)
    train(rewards, budgets=budgets, epochs=16, credit=credit)
    profile = strategy.profile
    assert profile.total_R[0] == 0
    assert profile.undetected == ("still", "noise")
    share, error = profile.divergence_RK[1] * 25, profile.errors_RK[1] * 25
    t = torch.linspace(1, 0, 9, dtype=torch.float64)[1:]
    truth = 0.04 * (1 - t) ** 2 / (0.04 * (1 - t) ** 2 + t**2)  # R² of the pixel given its noisy version
    assert (share < truth + 3 * error).all()
    assert share[0].abs() < 0.1 < 0.2 < share[-2]


def test_budget_zero_is_left_out_and_still_measured():
    credit = CreditAssigner(strategy=ReCAST(estimator=Preview()))
    module, _ = train(REWARDS, epochs=1, budgets={"near": 1.0, "far": 0.0}, credit=credit)
    assert module.weights.values_RK[1].abs().max() == 0
    torch.testing.assert_close(module.weights.values_RK[0], torch.ones(8, dtype=torch.float64))
    assert credit.strategy.profile.total_R[1] > 0


@pytest.mark.parametrize("estimator", [Preview, ValueHead])
def test_W_evidence_and_history_survive_a_resume(tmp_path, estimator):
    def credit():
        return CreditAssigner(every_n_steps=7, strategy=ReCAST(estimator=estimator()))

    whole, half, rest = credit(), credit(), credit()
    one, _ = train(REWARDS, epochs=4, credit=whole)
    _, trainer = train(REWARDS, epochs=2, credit=half, folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    two, _ = train(REWARDS, epochs=4, credit=rest, folder=tmp_path, resume=tmp_path / "half.ckpt")
    assert [iteration for iteration, _ in rest.history] == [0, 7, 14]
    assert theta(one) == theta(two)
    assert torch.equal(one.weights.values_RK, two.weights.values_RK)
    torch.testing.assert_close(
        whole.strategy.profile.divergence_RK, rest.strategy.profile.divergence_RK, atol=0, rtol=0
    )


def test_another_strategy_starts_from_its_own_W(tmp_path):
    _, trainer = train(REWARDS, epochs=1, credit=CreditAssigner(strategy=SNR()), folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "snr.ckpt")
    module, _ = train(REWARDS, epochs=2, folder=tmp_path, resume=tmp_path / "snr.ckpt")
    assert module.weights.values_RK.tolist() == [[0.5] * 8] * 2


def test_evidence_of_another_order_is_refused(tmp_path):
    _, trainer = train(REWARDS, epochs=1, credit=CreditAssigner(strategy=ReCAST()), folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    with pytest.raises(ValueError, match=r"evidence is of alpha 2\.0, this run's is 3\.0"):
        train(
            REWARDS,
            epochs=2,
            credit=CreditAssigner(strategy=ReCAST(alpha=3.0)),
            folder=tmp_path,
            resume=tmp_path / "two.ckpt",
        )


def test_other_budgets_count_from_the_first_iteration_of_a_resume(tmp_path):
    """W is made again from the evidence; the rows are the new budgets."""
    _, trainer = train(REWARDS, epochs=1, credit=CreditAssigner(strategy=ReCAST()), folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "even.ckpt")
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *rest):
            seen.append(pl_module.weights.values_RK.sum(1) / 8)

    resumed = CreditAssigner(every_n_steps=1000, strategy=ReCAST())
    train(
        REWARDS, epochs=2, budgets={"near": 3.0, "far": 1.0}, credit=resumed, callbacks=[Look()],
        folder=tmp_path, resume=tmp_path / "even.ckpt",
    )  # fmt: skip
    assert len(seen) == 5
    for share in seen:
        assert share.tolist() == pytest.approx([0.75, 0.25])


def test_another_estimator_starts_its_evidence_anew(tmp_path):
    _, trainer = train(REWARDS, epochs=1, credit=CreditAssigner(strategy=ReCAST()), folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "preview.ckpt")
    credit = CreditAssigner(every_n_steps=5, strategy=ReCAST(estimator=ValueHead()))
    with pytest.warns(UserWarning, match="evidence is of Preview, this run's estimator is ValueHead"):
        train(REWARDS, epochs=3, credit=credit, folder=tmp_path, resume=tmp_path / "preview.ckpt")
    assert [iteration for iteration, _ in credit.history] == [0, 5, 10]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": 3.0}, r"clip 5\.0, this run's is 3\.0 \(credit\.strategy\.init_args\.clip\)"),
        ({"normalisation": "ratio"}, "normalisation optimality, this run's is ratio"),
    ],
)
def test_evidence_of_another_divergence_is_refused(tmp_path, settings, message):
    _, trainer = train(REWARDS, epochs=1, credit=CreditAssigner(strategy=ReCAST()), folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    credit = CreditAssigner(strategy=ReCAST(**settings))
    with pytest.raises(ValueError, match=message):
        train(REWARDS, epochs=2, credit=credit, folder=tmp_path, resume=tmp_path / "one.ckpt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 5}, r"noise levels \[1\.0, 0\.875.*this run's are \[1\.0, 0\.8, 0\.6"),
        ({"rewards": {"near": Near(0.5), "new": Near(-3.0)}}, "rewards near, far, this run's are near, new"),
    ],
)
def test_a_W_of_another_run_is_refused(tmp_path, change, message):
    _, trainer = train(REWARDS, epochs=1, folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    arguments = {"rewards": REWARDS, "epochs": 2, "folder": tmp_path, **change}
    with pytest.raises(ValueError, match=message):
        train(**arguments, resume=tmp_path / "one.ckpt")


def test_a_stage_with_more_rewards_goes_on_and_starts_its_credit_anew(tmp_path):
    one, trainer = train(REWARDS, epochs=1, credit=CreditAssigner(strategy=ReCAST()), folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    seen = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append((pl_module.iteration, theta(pl_module), pl_module.weights.names))

    credit = CreditAssigner(strategy=ReCAST(), on_other_rewards="restart")
    with pytest.warns(UserWarning, match="of the rewards near, far, this run's are near, far, spread: credit"):
        train(
            {**REWARDS, "spread": Spread()}, epochs=2, credit=credit, callbacks=[Look()],
            folder=tmp_path, resume=tmp_path / "one.ckpt",
        )  # fmt: skip
    assert seen[0] == (5, theta(one), ("near", "far", "spread"))
    assert [iteration for iteration, _ in credit.history] == [5]


def test_wrong_temperatures_end_the_run_before_anything_is_loaded():
    credit = CreditAssigner(strategy=ReCAST(temperature={"near": 1.0, "fra": 1.0}))
    loaded = []

    class Loud(Near):
        def load(self, device):
            loaded.append(device)

    with pytest.raises(ValueError, match="temperature: names near, fra, but the rewards are near, far"):
        train({"near": Loud(0.5), "far": Near(-3.0)}, epochs=1, credit=credit)
    assert not loaded


def test_evidence_is_gathered_in_the_precision_of_the_training_step():
    """Rollouts that credit asks for first are those that the training step would have made."""
    tables = {}
    for name, strategy in (("uniform", Uniform()), ("recast", ReCAST(temperature=1e9))):
        module, _ = train(REWARDS, epochs=2, credit=CreditAssigner(strategy=strategy), precision="bf16-mixed")
        tables[name] = theta(module)
    assert tables["recast"] == pytest.approx(tables["uniform"], abs=1e-6)


def test_the_strategy_s_own_error_ends_the_run():
    class Late(CreditStrategy):
        def table(self, names, budgets_R, levels):
            return torch.ones(1, 3)

    with pytest.raises(ValueError, match=r"W of the shape \(1, 3\) .* does not fit 2 × 8"):
        train(REWARDS, epochs=1, credit=CreditAssigner(strategy=Late()))


# ---------------------------------------------------------------------- pictures


def test_the_heatmap_shows_names_levels_budgets_and_column_sums():
    weights = Uniform().weights(("clipscore", "jpeg"), torch.tensor([3.0, 1.0]), FEW_LEVELS)
    figure = weights_figure(weights)
    by_label = {axis.get_label(): axis for axis in figure.axes}
    table, columns, rows = by_label["table"], by_label["columns"], by_label["rows"]
    assert [tick.get_text() for tick in table.get_yticklabels()] == ["clipscore", "jpeg"]
    assert [tick.get_text() for tick in table.get_xticklabels()] == ["1.00", "0.80", "0.50", "0.20"]
    assert [bar.get_height() for bar in columns.patches] == pytest.approx([1.0] * 4)
    assert [bar.get_width() for bar in rows.patches] == pytest.approx([0.75, 0.25])
    assert [text.get_text() for text in table.texts] == ["0.75"] * 4 + ["0.25"] * 4


def test_the_profile_figure_draws_a_curve_and_a_band_for_each_reward():
    policy = Gaussian(rewards={"linear": lambda x0: x0.double(), "square": lambda x0: x0.double() ** 2})
    strategy = ReCAST(estimator=PairedCompletions())
    strategy.observe(policy.probe(samples=256, group_size=8))
    (axes,) = profile_figure(strategy.profile).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [label.split(" ")[0] for label in labels] == ["linear", "square"]
    assert len(axes.lines) == 4
    assert len(axes.collections) == 2
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(1)


def test_the_history_has_a_row_for_each_recomputation():
    weights = Uniform().weights(NAMES, torch.ones(2), FEW_LEVELS)
    figure = history_figure(weights, [(0, weights.values_RK), (20, weights.values_RK), (40, weights.values_RK)])
    panels = [axes for axes in figure.axes if axes.get_title() in NAMES]
    assert [panel.images[0].get_array().shape for panel in panels] == [(3, 4)] * 2


def test_evenness_is_an_entropy():
    assert evenness(torch.ones(5, dtype=torch.float64)) == pytest.approx(1)
    assert evenness(torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)) == pytest.approx(0)
    half = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    assert evenness(half) == pytest.approx(math.log(2) / math.log(4))
    assert evenness(torch.zeros(3)) == 0
