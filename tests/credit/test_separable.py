"""Separable: W of rank 1, from the same evidence of which ReCAST makes more."""

import pytest
import torch
from gaussian import FEW_LEVELS, LEVELS, ExactCompletions, Gaussian

from recast_pl.credit import CreditAssigner, Preview, ReCAST, Separable, ValueHead
from recast_pl.credit.strategies.separable import mean_gain, told_share
from recast_pl.testing import Near, theta, train

NAMES = ("linear", "wave")
BUDGETS = torch.tensor([1.0, 2.0])


def two_rewards():
    return Gaussian(rewards={"linear": lambda x0: x0.double(), "wave": lambda x0: torch.sin(12 * x0.double())})


def observed(strategy_class, **settings):
    policy = two_rewards()
    strategy = strategy_class(estimator=ExactCompletions(policy), **settings)
    strategy.observe(policy.probe(samples=2048, group_size=64))
    return strategy


def test_its_W_has_rank_1_and_recast_s_has_not():
    """One evidence: rewards that are told at different levels. No λ ⊗ ω says when each counts."""
    recast = observed(ReCAST).table(NAMES, BUDGETS, LEVELS)
    for objectives in ("budgets", "evidence"):
        strategy = observed(Separable, objectives=objectives)
        separable = strategy.table(NAMES, BUDGETS, LEVELS)
        singular = torch.linalg.svdvals(separable)
        assert singular[1] < 1e-14 * singular[0]
        assert separable.sum().item() == pytest.approx(1)
    singular = torch.linalg.svdvals(recast)
    assert singular[1] > 0.1 * singular[0]


def test_the_time_weight_is_the_mean_of_the_rewards_gains():
    strategy = observed(Separable)
    gains = strategy.profile.gains_RK
    relative = gains / gains.sum(1, keepdim=True)
    W_RK = strategy.table(NAMES, BUDGETS, LEVELS)
    torch.testing.assert_close(W_RK.sum(0), relative[0] / 3 + 2 * relative[1] / 3)
    torch.testing.assert_close(W_RK.sum(1), torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    assert relative[0].argmax() < relative[1].argmax()


def test_evidence_gives_more_to_what_is_told_at_more_levels():
    strategy = observed(Separable, objectives="evidence")
    told = strategy.profile.monotone_RK.mean(1) * BUDGETS.double()
    W_RK = strategy.table(NAMES, BUDGETS, LEVELS)
    torch.testing.assert_close(W_RK.sum(1), told / told.sum())
    assert W_RK[0].sum() > 1 / 3


def test_a_reward_of_budget_0_has_no_effect():
    strategy = observed(Separable, objectives="evidence")
    W_RK = strategy.table(NAMES, torch.tensor([1.0, 0.0]), LEVELS)
    assert not W_RK[1].any()
    gains = strategy.profile.gains_RK[0]
    torch.testing.assert_close(W_RK[0], gains / gains.sum())


def test_given_weights_need_no_evidence():
    strategy = Separable(time=[0.0, 1.0, 1.0, 2.0])
    assert strategy.ready
    assert not strategy.needs_evidence
    table = strategy.table(("a", "b"), torch.tensor([3.0, 1.0]), FEW_LEVELS)
    expected = torch.tensor([[0.0, 3, 3, 6], [0, 1, 1, 2]], dtype=torch.float64) / 16
    torch.testing.assert_close(table, expected)
    assert Separable(time=[1.0], objectives="evidence").needs_evidence


def test_means_without_evidence_are_even_and_the_budgets():
    share = torch.tensor([0.25, 0.75], dtype=torch.float64)
    nothing = torch.zeros(2, 4, dtype=torch.float64)
    assert mean_gain(nothing, share).tolist() == [0.25] * 4
    assert told_share(nothing, share).tolist() == share.tolist()


def test_an_estimator_that_learns_sees_the_update():
    credit = CreditAssigner(every_n_steps=5, strategy=Separable(estimator=ValueHead(learning_rate=1e-2)))
    module, _ = train({"near": Near(0.5), "far": Near(-3.0)}, epochs=2, credit=credit)
    assert credit.strategy.measured.estimator.head is not None
    assert theta(module) != 0
    assert not Separable(time=[1.0], estimator=ValueHead()).needs_updates
    assert not Separable(estimator=Preview()).needs_updates


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time": [1.0, -1.0]}, r"init_args\.time: expected finite weights of at least 0, not all 0"),
        ({"time": [0.0, 0.0]}, r"init_args\.time"),
        ({"time": [float("nan")]}, r"init_args\.time"),
        ({"time": [float("inf")]}, r"init_args\.time"),
        ({"objectives": "rewards"}, r"init_args\.objectives: expected budgets or evidence, got rewards"),
        ({"alpha": 1.0}, r"init_args\.alpha"),
    ],
)
def test_wrong_settings_name_their_key(settings, message):
    with pytest.raises(ValueError, match=message):
        Separable(**settings)


def test_weights_of_another_number_of_steps_name_both_keys():
    with pytest.raises(ValueError, match=r"init_args\.time: 2 weights, but the rollout has 4 steps.*num_steps"):
        Separable(time=[1.0, 1.0]).table(("a",), torch.ones(1), FEW_LEVELS)


def test_W_before_evidence_is_an_error():
    with pytest.raises(RuntimeError, match="before any evidence"):
        Separable().table(("a",), torch.ones(1), LEVELS)
