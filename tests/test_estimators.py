"""Profile estimators against closed forms on a Gaussian policy."""

import math
from types import SimpleNamespace

import pytest
import torch
from gaussian import LEVELS, ExactCompletions, Gaussian, probit

from recast_pl.credit import FromFile, PairedCompletions, Preview, ReCAST, ValueHead
from recast_pl.credit.evidence import Evidence, EvidenceAverage, profile_of
from recast_pl.credit.moments import TooFewScores, paired_moment
from recast_pl.credit.regression import cross_fitted, standardised, tangent_terms

RATIO = SimpleNamespace(alpha=2.0, normalisation="ratio", clip=5.0)
OPTIMALITY = SimpleNamespace(alpha=2.0, normalisation="optimality", clip=5.0)


def divergences(evidence):
    return evidence.moments_RK.log(), evidence.errors_RK / evidence.moments_RK


def triple_divergence(scale, slope, t, *, draws=4_000_000):
    """D_3 by quadrature over x_t of the closed-form g."""
    tau = (1 - t) ** 2 * scale**2 / ((1 - t) ** 2 * scale**2 + t**2)
    u = torch.linspace(-8, 8, 20_001, dtype=torch.float64)
    density = torch.exp(-(u**2) / 2) / math.sqrt(2 * math.pi) * (u[1] - u[0])
    a = slope * scale
    g = 2 * torch.special.ndtr(a * math.sqrt(tau) * u / math.sqrt(1 + a**2 * (1 - tau)))
    return math.log(float((density * g**3).sum())) / 2


@pytest.mark.parametrize("case", range(4))
def test_exact_pairs_reproduce_the_golden_divergences(credit_golden, case):
    """20 seeds: right at every level, right coverage, no sign."""
    case = credit_golden["gaussian_probit"][case]
    levels = torch.tensor(case["noise_levels"], dtype=torch.float64)
    policy = Gaussian(scale=case["scale"], rewards={"probit": probit(case["slope"])}, levels=levels)
    truth = torch.tensor(case["renyi2"][1:], dtype=torch.float64)
    deviations = []
    for seed in range(20):
        D, error = divergences(ExactCompletions(policy).measure(policy.probe(samples=2048, seed=seed), RATIO))
        deviations.append((D[0] - truth) / error[0])
    z = torch.stack(deviations)  # seeds × levels
    assert (z.mean(0).abs() < 3 / math.sqrt(20)).all()
    assert (z.abs() < 2).double().mean() >= 0.9
    assert z.mean().abs() < 3 / math.sqrt(20)  # levels share their samples, seeds do not


def test_exact_triples_reproduce_order_three():
    policy = Gaussian(scale=1.0, rewards={"probit": probit(1.5)})
    tilt = SimpleNamespace(alpha=3.0, normalisation="ratio", clip=5.0)
    truth = torch.tensor([triple_divergence(1.0, 1.5, float(t)) for t in LEVELS[1:]], dtype=torch.float64)
    deviations = []
    for seed in range(20):
        evidence = ExactCompletions(policy).measure(policy.probe(samples=2048, seed=seed), tilt)
        D, error = evidence.moments_RK.log() / 2, evidence.errors_RK / evidence.moments_RK / 2
        deviations.append((D[0] - truth) / error[0])
    z = torch.stack(deviations)
    assert (z.mean(0).abs() < 3 / math.sqrt(20)).all()
    assert (z.abs() < 2).double().mean() >= 0.9


def test_the_closed_form_of_the_order_three_check_agrees_with_the_golden_order_two(credit_golden):
    """The quadrature's g, squared, against the golden arcsine."""
    for case in credit_golden["gaussian_probit"]:
        for t, expected in zip(case["noise_levels"], case["renyi2"], strict=True):
            tau = (1 - t) ** 2 * case["scale"] ** 2 / ((1 - t) ** 2 * case["scale"] ** 2 + t**2)
            u = torch.linspace(-8, 8, 20_001, dtype=torch.float64)
            density = torch.exp(-(u**2) / 2) / math.sqrt(2 * math.pi) * (u[1] - u[0])
            a = case["slope"] * case["scale"]
            g = 2 * torch.special.ndtr(a * math.sqrt(tau) * u / math.sqrt(1 + a**2 * (1 - tau)))
            assert math.log(float((density * g**2).sum())) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("normalisation", ["optimality", "ratio"])
@pytest.mark.parametrize("draws", [2, 3])
def test_groups_of_four_leave_no_bias(normalisation, draws):
    """Each group normalised by its own few samples, against one huge group of the same law."""

    def scores(groups, size, seed):
        generator = torch.Generator().manual_seed(seed)
        shared = torch.rand(groups * size, generator=generator, dtype=torch.float64)
        own = torch.rand(draws, groups * size, generator=generator, dtype=torch.float64)
        return 0.7 * shared + 0.3 * own, torch.arange(groups).repeat_interleave(size)

    def moment(*data):
        return paired_moment(*data, normalisation=normalisation, clip=1.0)

    truth = moment(*scores(1, 400_000, 999)).value
    values = torch.tensor([moment(*scores(64, 4, seed)).value for seed in range(200)])
    errors = torch.tensor([moment(*scores(64, 4, seed)).error for seed in range(200)])
    assert (values.mean() - truth).abs() < 3 * values.std() / math.sqrt(200)
    assert errors.mean().item() == pytest.approx(values.std().item(), rel=0.15)


def test_a_moment_by_hand():
    """Two groups of two; correlation of pairs = (pooled covariance) / (pooled variances)."""
    scores = torch.tensor([[0.0, 2.0, 1.0, 5.0], [1.0, 3.0, 1.0, 3.0]], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1])
    covariance = 2 * 2 + 2 * 4  # k/(k−1) Σ (x − x̄)(y − ȳ) of either group: 2·2, 2·4
    variances = 2 * 2 + 2 * 8, 2 * 2 + 2 * 2
    moment = paired_moment(scores, group, clip=5.0)
    assert moment.value == pytest.approx(1 + covariance / math.sqrt(variances[0] * variances[1]) / 25)
    ratio = paired_moment(scores, group, normalisation="ratio")
    products, distinct = 0 + 6 + 1 + 15, (0 * 3 + 2 * 1) + (1 * 3 + 5 * 1)
    assert ratio.value == pytest.approx(products / distinct)


@pytest.mark.parametrize("shift", [-100.0, 3.0, 1e4])
def test_a_constant_added_to_a_reward_changes_nothing(shift):
    policy = Gaussian(rewards={"linear": lambda x0: x0.double()})
    shifted = Gaussian(rewards={"linear": lambda x0: x0.double() + shift})
    for estimator in (PairedCompletions(), Preview(), Preview(regression="isotonic")):
        plain = estimator.measure(policy.probe(samples=64, group_size=8), OPTIMALITY)
        moved = estimator.measure(shifted.probe(samples=64, group_size=8), OPTIMALITY)
        torch.testing.assert_close(plain.moments_RK, moved.moments_RK, atol=1e-9, rtol=0)
        torch.testing.assert_close(plain.errors_RK, moved.errors_RK, atol=1e-9, rtol=0)


def test_a_linear_reward_s_profile_is_its_r_squared():
    """For r = x0, Var g = Var E[x0 | x_t] = τ² scale², so D = log(1 + τ²/A²)."""
    policy = Gaussian(scale=2.0, rewards={"linear": lambda x0: x0.double()})
    tau = torch.tensor([4 * (1 - t) ** 2 / (4 * (1 - t) ** 2 + t**2) for t in LEVELS[1:].tolist()])
    for estimator in (ExactCompletions(policy), Preview(), Preview(regression="isotonic")):
        evidence = estimator.measure(policy.probe(samples=8192, group_size=64), OPTIMALITY)
        share = (evidence.moments_RK[0] - 1) * 25
        error = (evidence.errors_RK[0] * 25).clamp_min(0.003)
        assert ((share - tau).abs() < 3.5 * error).all()


def test_the_preview_is_a_lower_bound_that_the_sanity_curve_rises_with():
    """A reward of the amplitude's square: from x̂0 alone, less than all is seen, more and more of it."""
    policy = Gaussian(rewards={"square": lambda x0: x0.double().square()})
    share = (Preview().measure(policy.probe(samples=8192, group_size=64), OPTIMALITY).moments_RK[0] - 1) * 25
    exact = ExactCompletions(policy).measure(policy.probe(samples=8192, group_size=64), OPTIMALITY)
    assert (share < (exact.moments_RK[0] - 1) * 25 + 0.05).all()
    assert (share.diff() > -0.02).all()
    assert share[-1] > 0.95


def test_stochastic_completions_come_nearer_with_more_steps():
    levels = torch.tensor([1.0, 0.6, 0.4, 0.0], dtype=torch.float64)
    policy = Gaussian(scale=1.0, rewards={"probit": probit(1.5)}, levels=levels)
    taus = ((1 - t) ** 2 / ((1 - t) ** 2 + t**2) for t in (0.6, 0.4))
    truth = torch.tensor([math.log(1 + 2 / math.pi * math.asin(2.25 * tau / 3.25)) for tau in taus])
    excess = {}
    for steps in (5, 40):
        evidence = PairedCompletions(num_steps=steps).measure(policy.probe(samples=6000), RATIO)
        excess[steps] = ((evidence.moments_RK[0].log()[:2] - truth) / truth).mean().item()
    assert 0.1 < excess[5] < 0.4
    assert abs(excess[40]) < 0.06


# ---------------------------------------------------------------------- noise


def noise_reward():
    generator = torch.Generator().manual_seed(7)
    return lambda x0: torch.randn(len(x0), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("estimator", [PairedCompletions, Preview])
def test_a_reward_that_is_noise_gets_an_even_row_and_a_warning(estimator):
    policy = Gaussian(rewards={"noise": noise_reward()})
    strategy = ReCAST(estimator=estimator())
    with pytest.warns(UserWarning, match="profile of noise cannot be told from noise"):
        strategy.observe(policy.probe(samples=128, group_size=8))
    assert strategy.profile.gains_RK.max() - strategy.profile.gains_RK.min() < 1e-15


def test_noise_beside_a_real_reward_does_not_follow_its_own_noise():
    policy = Gaussian(rewards={"noise": noise_reward(), "linear": lambda x0: x0.double()})
    strategy = ReCAST(estimator=PairedCompletions())
    with pytest.warns(UserWarning, match="profile of noise cannot"):
        strategy.observe(policy.probe(samples=512, group_size=8))
    weights = strategy.weights(("noise", "linear"), torch.ones(2), LEVELS)
    assert (weights.values_RK.sum(0) - 1).abs().max() < 1e-9
    even_RK = torch.stack([strategy.profile.gains_RK[0], strategy.profile.gains_RK[1]])
    assert even_RK[0].std() < 1e-15
    assert even_RK[1].std() > 1e-4


def test_W_converges_with_evidence():
    """With all evidence kept, W changes less and less; by 1/n on average."""
    policy = Gaussian(rewards={"linear": lambda x0: x0.double(), "square": lambda x0: x0.double().square()})
    strategy, tables = ReCAST(estimator=PairedCompletions(), memory=1.0), []
    for seed in range(24):
        strategy.observe(policy.probe(samples=128, group_size=8, seed=seed))
        tables.append(strategy.weights(("linear", "square"), torch.ones(2), LEVELS).values_RK)
    changes = torch.stack(tables).diff(dim=0).abs().mean((1, 2))
    assert changes[-8:].mean() < 0.35 * changes[:8].mean()


# ---------------------------------------------------------------------- the evidence


def evidence(moments, errors, samples=100, names=("a",)):
    return Evidence(
        names=names,
        levels=torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64),
        moments_RK=torch.tensor([moments], dtype=torch.float64),
        errors_RK=torch.tensor([errors], dtype=torch.float64),
        samples=samples,
        reward_calls=0,
        seconds=0.0,
    )


def test_the_average_weighs_by_samples_and_memory():
    average = EvidenceAverage(memory=0.5)
    average.add(evidence([1.0, 1.2], [0.1, 0.1], samples=100))
    mean = average.add(evidence([1.3, 1.5], [0.2, 0.2], samples=50))
    assert mean.moments_RK[0].tolist() == pytest.approx([1.15, 1.35])
    assert mean.errors_RK[0].tolist() == pytest.approx([math.sqrt(0.25 * 0.01 + 0.25 * 0.04)] * 2)


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


def test_masked_scores_stay_out_of_the_evidence():
    policy = Gaussian(rewards={"linear": lambda x0: x0.double()})
    masked = Gaussian(
        rewards={"linear": lambda x0: torch.where(torch.arange(len(x0)) % 4 == 0, torch.nan, x0.double())}
    )
    x0 = torch.randn(64, 1, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = policy.probe(samples=64, group_size=8, x0=x0)
    gappy = masked.probe(samples=64, group_size=8, x0=x0)
    for estimator in (PairedCompletions(), Preview()):
        found = estimator.measure(gappy, OPTIMALITY)
        assert found.moments_RK.isfinite().all()
        assert not torch.equal(found.moments_RK, estimator.measure(whole, OPTIMALITY).moments_RK)


def test_W_stays_where_nearly_all_scores_are_masked():
    policy = Gaussian(rewards={"linear": lambda x0: x0.double()})
    silent = Gaussian(rewards={"linear": lambda x0: torch.full_like(x0.double(), torch.nan)})
    for estimator in (PairedCompletions(), Preview()):
        strategy = ReCAST(estimator=estimator)
        with pytest.raises(TooFewScores):
            strategy.observe(silent.probe(samples=64, group_size=8))
        strategy.observe(policy.probe(samples=64, group_size=8))
        before = strategy.profile
        with pytest.warns(UserWarning, match="W stays as it was"):
            strategy.observe(silent.probe(samples=64, group_size=8, seed=1))
        assert strategy.profile is before


def test_telescoping_of_the_profile():
    profile = profile_of(evidence([1.1, 1.05], [0.01, 0.02]), alpha=2.0)
    assert profile.gains_RK.sum().item() == pytest.approx(profile.total_R.item(), abs=1e-12)
    assert profile.half_level(0) == pytest.approx(0.75)


# ---------------------------------------------------------------------- regressions


def test_predictions_never_see_what_they_predict():
    """Pure noise predicts noise: in sample the fit would look like signal, out of fold it does not."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 200, generator=generator, dtype=torch.float64)
    for regression in ("linear", "isotonic"):
        predicted = cross_fitted(x, y, torch.zeros(200, dtype=torch.int64), regression=regression)
        assert (2 * y * predicted - predicted.square()).mean() < 0.02


def test_the_tangent_is_a_lower_bound_and_tight_at_the_truth():
    generator = torch.Generator().manual_seed(2)
    g = 1 + 0.3 * torch.rand(100_000, generator=generator, dtype=torch.float64)
    g = g / g.mean()
    rho = g * (1 + 0.2 * torch.randn(100_000, generator=generator, dtype=torch.float64))
    for alpha in (1.5, 2.0, 3.0):
        truth = g.pow(alpha).mean()
        assert tangent_terms(rho, g, alpha).mean().item() == pytest.approx(truth.item(), rel=5e-3)
        assert tangent_terms(rho, torch.ones_like(g), alpha).mean() < truth


def test_standardised_values_have_unit_variance_in_small_groups():
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(4000, generator=generator, dtype=torch.float64) + torch.arange(1000).repeat_interleave(
        4
    )
    z = standardised(values, torch.arange(1000).repeat_interleave(4))
    assert z.square().mean().item() == pytest.approx(1)
    assert standardised(torch.full((8,), 3.0), torch.zeros(8, dtype=torch.int64)).tolist() == [0.0] * 8


# ---------------------------------------------------------------------- configuration


def test_paired_completions_refuse_other_orders():
    with pytest.raises(ValueError, match=r"alpha: PairedCompletions measures orders 2 and 3, got 1\.5"):
        ReCAST(alpha=1.5, estimator=PairedCompletions())
    ReCAST(alpha=1.5, estimator=Preview())


def test_constructors_name_their_keys():
    with pytest.raises(ValueError, match=r"estimator\.init_args\.num_steps"):
        PairedCompletions(num_steps=0)
    with pytest.raises(ValueError, match=r"estimator\.init_args\.width"):
        ValueHead(width=0)
    with pytest.raises(ValueError, match=r"estimator\.init_args\.path: no file"):
        FromFile(path="nowhere.npz")
    for arguments, key in (
        ({"alpha": 1.0}, "alpha"),
        ({"temperature": 0.0}, "temperature"),
        ({"memory": 1.5}, "memory"),
        ({"clip": 0.0}, "clip"),
        ({"samples": 1}, "samples"),
    ):
        with pytest.raises(ValueError, match=rf"credit\.strategy\.init_args\.{key}"):
            ReCAST(**arguments)
