"""The CreditAssigner and what a checkpoint keeps, on the one-parameter policy."""

import lightning.pytorch as pl
import pytest
import torch

from recast_pl.credit import (
    SNR,
    CreditAssigner,
    CreditStrategy,
    PairedCompletions,
    Preview,
    ReCAST,
    Uniform,
    ValueHead,
)
from recast_pl.rewards import Reward
from recast_pl.testing import Near, theta, train
from recast_pl.types import Weights

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
    """W by hand, without a strategy."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        shares_RK = torch.tensor([[0.75], [0.25]], dtype=torch.float64).expand(2, 8)
        weights = Weights.of_table(pl_module.rewards.names, pl_module.levels, shares_RK)
        pl_module.credit = lambda experience: weights
        pl_module.credit.observer = None

    def on_train_batch_end(self, *ignored):
        pass


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
    assert module.credit.weights.values_RK[1].abs().max() == 0
    torch.testing.assert_close(module.credit.weights.values_RK[0], torch.ones(8, dtype=torch.float64))
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
    assert torch.equal(one.credit.weights.values_RK, two.credit.weights.values_RK)
    torch.testing.assert_close(
        whole.strategy.profile.divergence_RK, rest.strategy.profile.divergence_RK, atol=0, rtol=0
    )


def test_another_strategy_starts_from_its_own_W(tmp_path):
    _, trainer = train(REWARDS, epochs=1, credit=CreditAssigner(strategy=SNR()), folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "snr.ckpt")
    module, _ = train(REWARDS, epochs=2, folder=tmp_path, resume=tmp_path / "snr.ckpt")
    assert module.credit.weights.values_RK.tolist() == [[0.5] * 8] * 2


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
            seen.append(pl_module.credit.weights.values_RK.sum(1) / 8)

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
            seen.append((pl_module.iteration, theta(pl_module)))

        def on_train_batch_end(self, trainer, pl_module, *rest):
            seen.append(pl_module.credit.weights.names)

    credit = CreditAssigner(strategy=ReCAST(), on_other_rewards="restart")
    with pytest.warns(UserWarning, match="of the rewards near, far, this run's are near, far, spread: credit"):
        train(
            {**REWARDS, "spread": Spread()}, epochs=2, credit=credit, callbacks=[Look()],
            folder=tmp_path, resume=tmp_path / "one.ckpt",
        )  # fmt: skip
    assert seen[:2] == [(5, theta(one)), ("near", "far", "spread")]
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
        credit = CreditAssigner(strategy=strategy)
        module, _ = train(REWARDS, epochs=2, credit=credit, settings={"precision": "bf16-mixed"})
        tables[name] = theta(module)
    assert tables["recast"] == pytest.approx(tables["uniform"], abs=1e-6)


def test_the_strategy_s_own_error_ends_the_run():
    class Late(CreditStrategy):
        def table(self, names, budgets_R, levels):
            return torch.ones(1, 3)

    with pytest.raises(ValueError, match=r"W of the shape \(1, 3\) by Late does not fit 2 × 8"):
        train(REWARDS, epochs=1, credit=CreditAssigner(strategy=Late()))
