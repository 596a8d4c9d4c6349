"""What is made of evidence: averages, noise told from signal, masked scores."""

import math
from types import SimpleNamespace

import pytest
import torch
from gaussian import LEVELS, Gaussian

from recast_pl.credit import PairedCompletions, Preview, ReCAST
from recast_pl.credit.evidence import Evidence, EvidenceAverage
from recast_pl.credit.mathematics.moments import TooFewScores, paired_moment
from recast_pl.credit.mathematics.regression import predicted_moment
from recast_pl.credit.profile import profile_of

RATIO = SimpleNamespace(alpha=2.0, normalisation="ratio", clip=5.0)
OPTIMALITY = SimpleNamespace(alpha=2.0, normalisation="optimality", clip=5.0)


# ---------------------------------------------------------------------- noise


def noise_reward(seed=7):
    generator = torch.Generator().manual_seed(seed)
    return lambda x0: torch.randn(len(x0), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("estimator", [PairedCompletions, Preview])
def test_a_reward_that_is_noise_gets_an_even_row_and_a_warning(estimator):
    """Beside rewards that W follows."""
    policy = Gaussian(
        rewards={
            "noise": noise_reward(),
            "linear": lambda x0: x0.double(),
            "wave": lambda x0: torch.sin(4 * x0.double()),
        }
    )
    strategy = ReCAST(estimator=estimator())
    with pytest.warns(UserWarning, match="profile of noise cannot be told from noise"):
        strategy.observe(policy.probe(samples=1024, group_size=8))
    table = strategy.table(("noise", "linear", "wave"), torch.tensor([2.0, 1.0, 1.0]), LEVELS)
    torch.testing.assert_close(table[0], torch.full_like(table[0], 0.05), atol=1e-15, rtol=0)
    torch.testing.assert_close(table.sum(0), torch.full_like(table[0], 0.1), atol=1e-9, rtol=0)
    assert table[1].std() > 2e-3


@pytest.mark.parametrize("estimator", [PairedCompletions, Preview])
def test_noise_is_taken_for_signal_as_rarely_as_promised(estimator):
    """A few in a hundred rewards that are noise, from 64 samples in groups of 8."""
    policy = Gaussian(rewards={f"noise{i}": noise_reward(i) for i in range(100)})
    strategy = ReCAST(estimator=estimator())
    with pytest.warns(UserWarning, match="cannot be told from noise"):
        strategy.observe(policy.probe(samples=64, group_size=8))
    assert strategy.profile.detected_R.double().mean() < 0.07


def test_W_converges_with_evidence():
    """With all evidence kept, W changes less and less: the mean change by one more recomputation."""
    policy = Gaussian(rewards={"linear": lambda x0: x0.double(), "square": lambda x0: x0.double().square()})
    strategy, tables = ReCAST(estimator=PairedCompletions(), memory=1.0), []
    for seed in range(24):
        strategy.observe(policy.probe(samples=128, group_size=8, seed=seed))
        tables.append(strategy.weights(("linear", "square"), torch.ones(2), LEVELS).values_RK)
    changes = torch.stack(tables).diff(dim=0).abs().mean((1, 2))
    early, late = changes[:8].mean().item(), changes[-8:].mean().item()
    print(f"mean change of K·W by one more recomputation: {early:.4f} at first, {late:.4f} at last")
    assert late < 0.35 * early


# ---------------------------------------------------------------------- the evidence


def evidence(moments, errors, samples=100, names=("a",)):
    row = torch.tensor([moments], dtype=torch.float64)
    return Evidence(
        names=names,
        levels=torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64),
        moments_RK=row,
        errors_RK=torch.tensor([errors], dtype=torch.float64),
        samples_RK=torch.full_like(row, samples),
        units_RK=torch.full_like(row, 10.0),
        reward_calls=0,
        seconds=0.0,
    )


def test_the_average_weighs_by_samples_and_memory():
    average = EvidenceAverage(memory=0.5)
    average.add(evidence([1.0, 1.2], [0.1, 0.1], samples=100))
    mean = average.add(evidence([1.3, 1.5], [0.2, 0.2], samples=50))
    assert mean.moments_RK[0].tolist() == pytest.approx([1.15, 1.35])
    assert mean.errors_RK[0].tolist() == pytest.approx([math.sqrt(0.25 * 0.01 + 0.25 * 0.04)] * 2)
    assert mean.samples_RK[0].tolist() == [100, 100]
    assert mean.units_RK[0].tolist() == [15, 15]


def test_a_level_without_news_keeps_what_was_known():
    average = EvidenceAverage(memory=0.5)
    average.add(evidence([1.0, 1.2], [0.1, 0.1]))
    silent = evidence([1.0, 1.0], [math.inf, math.inf], samples=0)
    mean = average.add(silent)
    assert mean.moments_RK[0].tolist() == [1.0, 1.2]
    assert mean.errors_RK[0].tolist() == pytest.approx([0.1, 0.1])
    assert mean.samples_RK[0].tolist() == [100, 100]
    nothing = EvidenceAverage(memory=0.5)
    nothing.add(silent)
    assert nothing.add(silent).errors_RK[0].tolist() == [math.inf, math.inf]
    assert nothing.add(evidence([1.1, 1.3], [0.2, 0.1])).moments_RK[0].tolist() == [1.1, 1.3]


def test_the_average_goes_on_from_its_state():
    one, two = EvidenceAverage(memory=0.9), EvidenceAverage(memory=0.9)
    one.add(evidence([1.0, 1.2], [0.1, 0.1]))
    two.load_state_dict(one.state_dict())
    later = evidence([1.1, 1.3], [0.2, 0.1])
    torch.testing.assert_close(one.add(later).moments_RK, two.add(later).moments_RK, atol=0, rtol=0)


def test_evidence_of_other_rewards_or_nan_is_refused():
    average = EvidenceAverage(memory=1.0)
    average.add(evidence([1.0, 1.2], [0.1, 0.1]))
    with pytest.raises(ValueError, match=r"rewards a, this run's are b"):
        average.add(evidence([1.0, 1.2], [0.1, 0.1], names=("b",)))
    with pytest.raises(ValueError, match="'a' is not finite"):
        evidence([1.0, math.nan], [0.1, 0.1])


@pytest.mark.parametrize("tilt", [OPTIMALITY, RATIO])
def test_masked_scores_count_as_if_they_were_not_there(tilt):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(2, 64, generator=generator, dtype=torch.float64)
    group, masked = torch.arange(64) // 8, torch.arange(64) % 5 == 0
    gappy = scores.masked_fill(masked, torch.nan)
    settings = {"normalisation": tilt.normalisation, "clip": tilt.clip}
    assert paired_moment(gappy, group, **settings) == paired_moment(
        scores[:, ~masked], group[~masked], **settings
    )
    settings |= {"alpha": 2.0, "regression": "linear"}
    assert predicted_moment(*gappy, group, **settings) == predicted_moment(
        *scores[:, ~masked], group[~masked], **settings
    )


@pytest.mark.parametrize("estimator", [PairedCompletions, Preview])
def test_a_reward_whose_scores_are_all_masked_stops_no_other(estimator):
    """At first it has an even row; later it keeps what was known of it, and the others go on."""
    silent = {"on": False}

    def fickle(x0):
        return torch.full_like(x0.double(), torch.nan) if silent["on"] else torch.sin(4 * x0.double())

    policy = Gaussian(rewards={"linear": lambda x0: x0.double(), "fickle": fickle})
    names, budgets = ("linear", "fickle"), torch.ones(2)
    strategy = ReCAST(estimator=estimator(), memory=0.5)
    silent["on"] = True
    with pytest.warns(UserWarning, match="all scores of fickle are masked"):
        strategy.observe(policy.probe(samples=512, group_size=8))
    assert strategy.profile.detected_R.tolist() == [True, False]
    silent["on"] = False
    strategy.observe(policy.probe(samples=512, group_size=8, seed=1))
    known, before = strategy.profile, strategy.table(names, budgets, LEVELS)
    silent["on"] = True
    with pytest.warns(UserWarning, match="all scores of fickle are masked"):
        strategy.observe(policy.probe(samples=512, group_size=8, seed=2))
    assert torch.equal(strategy.profile.divergence_RK[1], known.divergence_RK[1])
    assert not torch.equal(strategy.profile.divergence_RK[0], known.divergence_RK[0])
    assert not torch.equal(strategy.table(names, budgets, LEVELS), before)


def test_a_reward_that_is_told_at_the_clean_end_alone_is_not_told():
    """There a reward that repeats itself is always told, with no error, however few samples there are."""
    told_late = evidence([1.0, 1.0, 1.04], [0.01, 0.01, 1e-17])
    assert not profile_of(told_late, alpha=2.0).detected_R
    told_before = evidence([1.0, 1.035, 1.04], [0.01, 0.001, 1e-17])
    assert profile_of(told_before, alpha=2.0).detected_R


def test_two_samples_in_one_group_are_too_few():
    with pytest.raises(TooFewScores, match="too few"):
        paired_moment(torch.tensor([[1.0, 2.0], [1.5, 2.5]]), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TooFewScores, match="no group has 2"):
        paired_moment(torch.rand(2, 2), torch.arange(2))


def test_telescoping_of_the_profile():
    profile = profile_of(evidence([1.1, 1.05], [0.01, 0.02]), alpha=2.0)
    assert profile.gains_RK.sum().item() == pytest.approx(profile.total_R.item(), abs=1e-12)
    assert profile.half_level(0) == pytest.approx(0.75)
