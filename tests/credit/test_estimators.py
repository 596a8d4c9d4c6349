"""Profile estimators against closed forms on a Gaussian policy."""

import math
import runpy
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gaussian import LEVELS, ExactCompletions, Gaussian, probit, probit_divergence

from recast_pl.credit import FromFile, PairedCompletions, Preview, ReCAST, ValueHead
from recast_pl.credit.mathematics.moments import paired_moment
from recast_pl.credit.mathematics.regression import cross_fitted, predicted_moment, standardised, tangent_terms
from recast_pl.types import NoisedSamples, UpdatePart, Velocities

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RATIO = SimpleNamespace(alpha=2.0, normalisation="ratio", clip=5.0)
OPTIMALITY = SimpleNamespace(alpha=2.0, normalisation="optimality", clip=5.0)


def divergences(evidence):
    return evidence.moments_RK.log(), evidence.errors_RK / evidence.moments_RK


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
    truth = torch.tensor([probit_divergence(1.0, 1.5, float(t), alpha=3) for t in LEVELS[1:]])
    deviations = []
    for seed in range(20):
        evidence = ExactCompletions(policy).measure(policy.probe(samples=2048, seed=seed), tilt)
        D, error = evidence.moments_RK.log() / 2, evidence.errors_RK / evidence.moments_RK / 2
        deviations.append((D[0] - truth) / error[0])
    z = torch.stack(deviations)
    assert (z.mean(0).abs() < 3 / math.sqrt(20)).all()
    assert (z.abs() < 2).double().mean() >= 0.9


def test_the_quadrature_agrees_with_the_golden_order_two(credit_golden):
    for case in credit_golden["gaussian_probit"]:
        for t, expected in zip(case["noise_levels"], case["renyi2"], strict=True):
            found = probit_divergence(case["scale"], case["slope"], t, alpha=2)
            assert found == pytest.approx(expected, abs=1e-9)


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


@pytest.mark.parametrize("alpha", [2, 3])
def test_stochastic_completions_are_off_by_what_the_benchmark_says(alpha):
    """Its closed form, against the estimator itself; and the estimator's docstring against the closed form."""
    bench = runpy.run_path(str(BENCHMARKS / "completion_steps.py"))
    levels = torch.tensor([1.0, 0.6, 0.4, 0.0], dtype=torch.float64)
    policy = Gaussian(scale=1.0, rewards={"probit": probit(1.5)}, levels=levels)
    tilt = SimpleNamespace(alpha=float(alpha), normalisation="ratio", clip=5.0)
    for steps in (5, 40):
        evidence = PairedCompletions(num_steps=steps).measure(policy.probe(samples=4_000), tilt)
        for k, t in enumerate((0.6, 0.4)):
            excess = bench["excess"](1.0, 1.5, t, alpha=alpha, steps=steps)
            expected = probit_divergence(1.0, 1.5, t, alpha=alpha) * (1 + excess)
            moment, error = evidence.moments_RK[0, k].item(), evidence.errors_RK[0, k].item()
            assert abs(math.log(moment) / (alpha - 1) - expected) < 3 * error / moment / (alpha - 1)
    quoted = {2: [(0.16, 0.15, 0.22), (0.07, 0.06, 0.11), (0.02, 0.02, 0.03)],
              3: [(0.21, 0.20, 0.30), (0.08, 0.09, 0.14), (0.02, 0.02, 0.04)]}  # fmt: skip
    for steps, row in zip((10, 25, 100), quoted[alpha], strict=True):
        for (scale, slope), figure in zip(bench["LAWS"], row, strict=True):
            largest = max(
                abs(bench["excess"](scale, slope, t, alpha=alpha, steps=steps)) for t in bench["LEVELS"]
            )
            assert largest == pytest.approx(figure, abs=0.0051)


def test_previews_of_groups_of_four_leave_no_bias_under_ratio():
    """For r = x0² and its exact preview at t = 0, E[g²] − 1 = Var r / (E r)²: 2 for one Gaussian prompt."""
    values = []
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(64 * 4, generator=generator, dtype=torch.float64).square()
        moment = predicted_moment(
            x, x, torch.arange(64).repeat_interleave(4),
            alpha=2.0, normalisation="ratio", clip=5.0, regression="linear",
        )  # fmt: skip
        values.append(moment.value - 1)
    values = torch.tensor(values)
    assert (values.mean() - 2).abs() < 3 * values.std() / math.sqrt(200) + 0.02  # order 1/64 of the ratio


class TwoProcesses:
    """Sums over two threads that take the part of processes."""

    def __init__(self):
        self.barrier, self.values = threading.Barrier(2), [None, None]

    def total_of(self, rank):
        def total(tensor):
            self.values[rank] = tensor
            self.barrier.wait()
            result = self.values[0] + self.values[1]
            self.barrier.wait()
            return result

        return total


def update_part(policy, probe, rows, steps):
    """What the update would show of the samples `rows`, at two steps each."""
    experience = probe.experience
    row_N = torch.arange(rows.start, rows.stop).repeat_interleave(len(steps))
    step_N = torch.tensor(steps).repeat(rows.stop - rows.start)
    t_N = probe.levels[step_N].float()
    x0 = experience.rollout.x0_BCHW[row_N].float()
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))[: len(row_N)]
    t = t_N[:, None, None, None]
    samples = NoisedSamples(x0_NCHW=x0, noise_NCHW=noise, t_N=t_N, advantage_N=torch.zeros(len(row_N)))
    velocity = torch.stack(
        [policy.velocity(x, float(s)) for x, s in zip((1 - t) * x0 + t * noise, t_N, strict=True)]
    )
    velocities = Velocities(current_NCHW=velocity, old_NCHW=velocity, reference_NCHW=None)
    return UpdatePart(
        experience=experience,
        row_N=row_N,
        column_N=step_N,
        columns=len(probe.levels) - 1,
        samples=samples,
        velocities=velocities,
    )


def test_the_value_head_is_the_same_on_two_processes_as_on_one():
    """Head, terms and so W: whatever part of the samples a process has, also half a group."""
    policy = Gaussian(rewards={"linear": lambda x0: x0.double(), "square": lambda x0: x0.double() ** 2})
    probe = policy.probe(samples=40, group_size=8)
    halves = [slice(0, 20), slice(20, 40)]
    parts = [update_part(policy, probe, half, (2, 5, 8)) for half in halves]
    alone, pair, link = ValueHead(), [ValueHead(), ValueHead()], TwoProcesses()
    for head in (alone, *pair):
        head.check(OPTIMALITY)
    for rank in (0, 1):
        alone.watch(parts[rank])
        pair[rank].watch(parts[rank])
    for head in (alone, *pair):
        head._ready(head._seen[0])  # threads would share the generator of initial weights
    alone.learn(lambda tensor: tensor)
    threads = [threading.Thread(target=pair[rank].learn, args=(link.total_of(rank),)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for one, two, single in zip(*(head.head.parameters() for head in (*pair, alone)), strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, single, atol=1e-5, rtol=1e-4)
    assert torch.equal(pair[0]._sums, pair[1]._sums)
    torch.testing.assert_close(pair[0]._sums, alone._sums, atol=1e-9, rtol=1e-9)
    assert alone._sums[0, 0].tolist() == [0, 0, 5, 0, 0, 5, 0, 0, 5, 0]  # groups at each trained step


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
    with pytest.raises(ValueError, match=r"alpha: with normalisation 'ratio' Preview measures order 2, got 3"):
        ReCAST(alpha=3.0, estimator=Preview(), normalisation="ratio")
    with pytest.raises(ValueError, match=r"normalisation: ValueHead measures 'optimality', got 'ratio'"):
        ReCAST(estimator=ValueHead(), normalisation="ratio")


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
