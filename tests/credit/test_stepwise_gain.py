"""Gains of preview rewards along stochastic trajectories, against closed forms on a Gaussian policy."""

import math
from dataclasses import replace

import pytest
import torch
from gaussian import FEW_LEVELS, LEVELS, Gaussian

from recast_pl.credit import CreditAssigner, StepwiseGain
from recast_pl.credit.estimators.preview_gains import gain_evidence, gain_moment, noising_path, preview_scores
from recast_pl.credit.mathematics.moments import TooFewScores
from recast_pl.testing import Near, theta, train


def linear(x0):
    return x0.double()


def told_share(levels, scale):
    """R² of x0 given x_t."""
    t = levels.double()
    return (1 - t) ** 2 * scale**2 / ((1 - t) ** 2 * scale**2 + t**2)


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_gains_of_a_linear_reward_are_its_gains_in_variance(scale):
    """The preview is the posterior mean, a martingale along the path: E[gain²] = scale² (R²_{j+1} − R²_j)."""
    policy = Gaussian(scale=scale, rewards={"linear": linear})
    evidence = gain_evidence(policy.probe(samples=8192, group_size=64))
    truth_K = scale**2 * told_share(LEVELS, scale).diff()
    z_K = (evidence.moments_RK[0] - truth_K) / evidence.errors_RK[0]
    assert z_K.abs().max() < 4
    assert (evidence.errors_RK[0] / truth_K).max() < 0.05  # the comparison has teeth
    assert evidence.moments_RK[0].sum().item() == pytest.approx(scale**2, rel=0.05)


def test_neighbouring_gains_are_uncorrelated_as_along_a_stochastic_rollout():
    policy = Gaussian(rewards={"linear": linear})
    gains_KB = preview_scores(policy.probe(samples=8_000)).squeeze(1).diff(dim=0)
    correlation = torch.corrcoef(gains_KB) - torch.eye(10, dtype=torch.float64)
    assert correlation.abs().max() < 4 / math.sqrt(8_000)


def test_the_path_has_the_forward_law_at_every_level():
    policy = Gaussian(scale=2.0, rewards={"linear": linear})
    probe = policy.probe(samples=8_000)
    x0 = probe.experience.rollout.x0_BCHW.flatten()
    path = dict(noising_path(probe))
    assert sorted(path) == list(range(10))
    noise = torch.stack([(path[j].flatten() - (1 - LEVELS[j]) * x0) / LEVELS[j] for j in range(10)])
    assert noise.mean(1).abs().max() < 4 / math.sqrt(8_000)
    assert (noise.var(dim=1) - 1).abs().max() < 4 * math.sqrt(2 / 8_000)
    joint = torch.corrcoef(noise)
    sigma = LEVELS[:10] / (1 - LEVELS[:10])
    expected = (torch.minimum(sigma[:, None], sigma) / torch.maximum(sigma[:, None], sigma)).nan_to_num(1.0)
    assert (joint - expected).abs().max() < 4 / math.sqrt(8_000)  # Brownian in σ²: correlation σ_s / σ_t


def test_the_path_of_a_sample_does_not_depend_on_its_neighbours():
    policy = Gaussian(rewards={"linear": linear})
    whole = policy.probe(samples=8)
    few = whole.first(3)
    for (j, all_), (i, first) in zip(noising_path(whole), noising_path(few), strict=True):
        assert i == j
        assert torch.equal(all_[:3], first)


def test_a_moment_by_hand():
    """Groups of two: k/(k−1) Σ (gain − mean)² / k = the mean of 2 · (half the difference)²."""
    before = torch.tensor([0.0, 0.0, 1.0, 3.0, 9.0], dtype=torch.float64)
    after = torch.tensor([1.0, 3.0, 2.0, 4.0, 0.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1, 2])  # the last is alone
    moment = gain_moment(before, after, group)  # gains 1, 3 and 1, 1
    assert moment.value == pytest.approx((2 * 1 + 2 * 1 + 0 + 0) / 4)
    assert moment.samples == 4


def test_groups_of_two_leave_no_bias():
    generator = torch.Generator().manual_seed(0)
    before, after = torch.randn(2, 40_000, generator=generator, dtype=torch.float64)
    shift = torch.randn(20_000, generator=generator, dtype=torch.float64).repeat_interleave(2)
    moment = gain_moment(before, after + 5 * shift, torch.arange(40_000) // 2)
    assert abs(moment.value - 2) < 4 * moment.error < 0.2


def test_masked_scores_are_left_out_and_too_few_are_said():
    before = torch.tensor([0.0, torch.nan, 0.0, 0.0], dtype=torch.float64)
    after = torch.tensor([1.0, 7.0, 3.0, torch.nan], dtype=torch.float64)
    group = torch.zeros(4, dtype=torch.int64)
    kept = gain_moment(before[[0, 2]], after[[0, 2]], group[:2])
    assert gain_moment(before, after, group) == kept
    with pytest.raises(TooFewScores):
        gain_moment(before[:2], after[:2], group[:2])


def sizes(rewards, *, samples=512, levels=FEW_LEVELS):
    strategy = StepwiseGain()
    strategy.observe(Gaussian(rewards=rewards, levels=levels).probe(samples=samples, group_size=8))
    return strategy.table(tuple(rewards), torch.ones(len(rewards)), levels) * len(rewards)


def test_rows_are_root_mean_squares_over_their_sum():
    table = sizes({"linear": linear}, samples=8192)
    expected = told_share(FEW_LEVELS, 1.0).diff().sqrt()
    torch.testing.assert_close(table[0], expected / expected.sum(), atol=0.01, rtol=0)


def test_scales_and_offsets_change_nothing():
    one, two, three = sizes(
        {"a": linear, "b": lambda x0: 1e-9 * linear(x0), "c": lambda x0: 5 - 1e-3 * linear(x0)}
    )
    torch.testing.assert_close(one, two, atol=1e-12, rtol=0)
    torch.testing.assert_close(one, three, atol=1e-9, rtol=0)


def test_constant_and_wholly_masked_rewards_have_even_rows_and_half_masked_ones_the_mean_there():
    table = sizes(
        {
            "still": lambda x0: torch.full_like(x0.double(), 0.3) + 1e-9 * x0.double(),  # rounding, no signal
            "masked": lambda x0: torch.full_like(x0.double(), torch.nan),
            "linear": linear,
        }
    )
    torch.testing.assert_close(table[:2], torch.full((2, 4), 0.25, dtype=torch.float64))
    assert table[2].std() > 0.01

    class ThirdCallMasked:
        calls = 0

        def __call__(self, x0):
            self.calls += 1
            return linear(x0) if self.calls != 2 else torch.full_like(x0.double(), torch.nan)

    # calls: own scores, then levels .2, .5, .8 and 1: both steps at .2 are unknown
    row = sizes({"gap": ThirdCallMasked()})[0]
    known = sizes({"linear": linear})[0]
    torch.testing.assert_close(row[2:], row[:2].mean().expand(2))
    torch.testing.assert_close(row[0] / row[1], known[0] / known[1])


def test_the_cost_is_counted_and_own_scores_are_not_asked_for_again():
    calls = []
    policy = Gaussian(rewards={"a": linear, "b": torch.sin}, levels=FEW_LEVELS)
    probe = policy.probe(samples=16, group_size=8)
    counted = replace(probe, score=lambda x, p: calls.append(len(x)) or policy.scores(x))
    evidence = gain_evidence(counted)
    assert calls == [16] * 4
    assert evidence.reward_calls == 2 * 16 * 4
    assert evidence.seconds > 0


def test_memory_and_samples():
    policy = Gaussian(rewards={"linear": linear}, levels=FEW_LEVELS)
    probes = [policy.probe(samples=64, group_size=8, seed=seed) for seed in (1, 2)]
    forgets, keeps, alone = StepwiseGain(memory=0.0), StepwiseGain(memory=1.0), StepwiseGain(samples=16)
    for probe in probes:
        forgets.observe(probe)
        keeps.observe(probe)
    means = torch.stack([gain_evidence(probe).moments_RK for probe in probes])
    torch.testing.assert_close(forgets.meter.average.latest.moments_RK, means[1])
    torch.testing.assert_close(keeps.meter.average.latest.moments_RK, means.mean(0))
    alone.observe(probes[0])
    torch.testing.assert_close(
        alone.meter.average.latest.moments_RK, gain_evidence(probes[0].first(16)).moments_RK
    )


def test_it_trains():
    credit = CreditAssigner(every_n_steps=5, strategy=StepwiseGain())
    module, _ = train({"near": Near(0.5)}, epochs=4, credit=credit)
    assert theta(module) > 0.2
    assert len(credit.history) == 4


@pytest.mark.parametrize(("key", "value"), [("samples", 1), ("memory", 1.5)])
def test_wrong_settings_name_their_key(key, value):
    with pytest.raises(ValueError, match=rf"credit\.strategy\.init_args\.{key}.*got {value}"):
        StepwiseGain(**{key: value})


def test_W_before_evidence_is_an_error():
    with pytest.raises(RuntimeError, match="before any evidence"):
        StepwiseGain().table(("a",), torch.ones(1), LEVELS)
