"""Strategies: from budgets, levels and evidence to W."""

from dataclasses import replace

import pytest
import torch
from gaussian import FEW_LEVELS, LEVELS, ExactCompletions, Gaussian

from recast_pl.advantages import PerReward, group_z_scores
from recast_pl.credit import (
    SNR,
    CreditAssigner,
    PairedCompletions,
    Preview,
    ReCAST,
    Uniform,
)
from recast_pl.types import Scores


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
        ReCAST(temperature={"a": 1.0, "c": 1.0}).check(("a", "b"), torch.ones(2), 4)


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
