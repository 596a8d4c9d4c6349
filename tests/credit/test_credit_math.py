"""Divergences, monotone projection, gains and transport projection against golden and closed-form values."""

import math

import pytest
import torch

from recast_pl.credit import NotConverged, gains, monotone, renyi_divergence, transport_weights
from recast_pl.credit.mathematics.divergence import inverse_variances, shrunk, signal_share


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def sinkhorn(kernel_RK, rows_R, *, iterations=20_000):
    """The plain alternation in the log domain, independent of the solver under test."""
    steps = kernel_RK.shape[1]
    f, g = torch.zeros(len(rows_R), dtype=torch.float64), torch.zeros(steps, dtype=torch.float64)
    for _ in range(iterations):
        f = rows_R.log() - torch.logsumexp(kernel_RK + g, dim=1)
        g = -math.log(steps) - torch.logsumexp(kernel_RK + f[:, None], dim=0)
    return (kernel_RK + f[:, None] + g).exp()


def test_the_golden_weight_cases(credit_golden):
    for case in credit_golden["weight_cases"]:
        divergence = torch.stack([renyi_divergence(float64(r), case["alpha"]) for r in case["ratios"]])
        torch.testing.assert_close(divergence, float64(case["divergence"]), atol=1e-9, rtol=0)
        steps = torch.stack([gains(row) for row in divergence])
        torch.testing.assert_close(steps, float64(case["gains"]), atol=1e-9, rtol=0)
        W_RK = transport_weights(steps, float64(case["budgets"]), float64(case["temperatures"]))
        torch.testing.assert_close(W_RK, float64(case["weights"]), atol=1e-9, rtol=0)


def test_the_divergence_of_two_points_by_hand():
    ratios = float64([[1.0, 0.5], [1.0, 1.5]])
    assert renyi_divergence(ratios, 2.0).tolist() == pytest.approx([0.0, math.log(1.25)])
    assert renyi_divergence(ratios, 3.0)[1].item() == pytest.approx(math.log((0.125 + 3.375) / 2) / 2)
    assert renyi_divergence(ratios, 1.5)[1].item() == pytest.approx(2 * math.log((0.5**1.5 + 1.5**1.5) / 2))


@pytest.mark.parametrize("alpha", [1.0, 0.5, -2.0])
def test_an_order_of_one_or_less_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha must be above 1"):
        renyi_divergence(torch.ones(2, 2), alpha)


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_ratios_that_are_none_are_refused(bad):
    with pytest.raises(ValueError, match="finite and at least 0"):
        renyi_divergence(float64([[1.0, bad]]), 2.0)


@pytest.mark.parametrize("seed", range(5))
def test_gains_of_the_monotone_curve_telescope_exactly(seed):
    generator = torch.Generator().manual_seed(seed)
    D_K = torch.randn(25, generator=generator, dtype=torch.float64).cumsum(0) * 0.1
    weights = torch.rand(25, generator=generator, dtype=torch.float64) + 0.1
    curve = monotone(D_K, weights)
    assert (curve.diff() >= 0).all()
    assert (curve >= 0).all()
    assert gains(curve).sum().item() == pytest.approx(curve[-1].item(), abs=1e-12)
    for share in (0.0, 0.3, 1.0):
        assert shrunk(gains(curve), share).sum().item() == pytest.approx(curve[-1].item(), abs=1e-12)


def test_the_monotone_curve_is_the_least_squares_one():
    D_K, weights = float64([0.3, 0.1, 0.2, -0.4, 0.5]), float64([1.0, 2.0, 1.0, 0.5, 1.0])
    curve = monotone(D_K, weights)

    def cost(c):
        return (weights * (c - D_K).square()).sum()

    generator = torch.Generator().manual_seed(0)
    for _ in range(500):
        other = (curve + 0.1 * torch.randn(5, generator=generator, dtype=torch.float64)).clamp_min(0)
        assert cost(other.cummax(0).values) >= cost(curve) - 1e-12


def test_a_curve_without_noise_is_not_changed():
    D_K = float64([0.0, 0.1, 0.1, 0.4])
    torch.testing.assert_close(monotone(D_K, torch.ones(4)), D_K)


def test_inverse_variances_keep_an_exact_point_finite():
    weights = inverse_variances(float64([0.1, 0.2, 0.0]))
    assert weights.isfinite().all()
    assert weights[2] > 1e3 * weights[0]
    assert inverse_variances(torch.zeros(3)).tolist() == [1.0] * 3
    unknown = inverse_variances(float64([0.1, math.inf, 0.2]))
    assert 0 < unknown[1] <= 1e-5 * unknown[2]
    curve = monotone(float64([0.1, 0.0, 0.4]), unknown)  # what is unknown does not pull the others down
    torch.testing.assert_close(curve, float64([0.1, 0.1, 0.4]), atol=1e-5, rtol=0)


def test_the_signal_share_goes_from_noise_to_signal():
    steps = float64([0.0, 0.1, 0.6, 0.3])
    assert signal_share(steps, torch.full((4,), 1e-6)) == pytest.approx(1, abs=1e-6)
    assert signal_share(steps, torch.full((4,), 1.0)) == 0
    assert signal_share(torch.ones(4), torch.zeros(4)) == 0
    assert 0 < signal_share(steps, torch.full((4,), 0.1)) < 1


# ---------------------------------------------------------------------- the transport projection


def extreme_gains(kind, rewards, steps, generator):
    table = torch.rand(rewards, steps, generator=generator, dtype=torch.float64)
    if kind == "peaked":
        return table**8
    if kind == "sparse":
        return torch.where(torch.rand(rewards, steps, generator=generator) < 0.2, table, 0.0)
    if kind == "one step each":
        return torch.eye(max(rewards, steps), dtype=torch.float64)[:rewards, :steps]
    return table


@pytest.mark.parametrize("kind", ["even", "peaked", "sparse", "one step each"])
@pytest.mark.parametrize("temperature", [0.05, 0.3, 1.0, 100.0])
@pytest.mark.parametrize("steps", [1, 2, 10, 100])
def test_marginals_hold_for_lopsided_budgets_and_sharp_kernels(kind, temperature, steps):
    generator = torch.Generator().manual_seed(steps)
    for budgets in ([1.0], [1.0, 1.0, 1.0, 1.0], [0.97, 0.01, 0.01, 0.01], [3.0, 0.0, 1.0]):
        budgets_R = float64(budgets)
        G_RK = extreme_gains(kind, len(budgets), steps, generator)
        W_RK = transport_weights(G_RK, budgets_R, torch.full((len(budgets),), temperature))
        torch.testing.assert_close(W_RK.sum(1), budgets_R / budgets_R.sum(), atol=1e-9, rtol=0)
        torch.testing.assert_close(W_RK.sum(0), torch.full_like(W_RK[0], 1 / steps), atol=1e-9, rtol=0)
        assert (W_RK >= 0).all()
        assert (W_RK[budgets_R == 0] == 0).all()


def test_marginals_hold_for_mixed_temperatures():
    """Each reward with its own, over three decades; random gains, budgets and sizes."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(400):
        rewards = int(torch.randint(1, 9, (), generator=generator))
        steps = int(torch.randint(2, 101, (), generator=generator))
        G_RK = torch.rand(rewards, steps, generator=generator, dtype=torch.float64) ** (1 + trial % 5)
        if trial % 4 == 0:
            G_RK[0] = 0
        budgets_R = torch.rand(rewards, generator=generator, dtype=torch.float64) + 1e-3
        exponents_R = torch.rand(rewards, generator=generator, dtype=torch.float64) * 3.3 - 1.3
        W_RK = transport_weights(G_RK, budgets_R, 10**exponents_R)
        torch.testing.assert_close(W_RK.sum(1), budgets_R / budgets_R.sum(), atol=1e-9, rtol=0)
        torch.testing.assert_close(W_RK.sum(0), torch.full_like(W_RK[0], 1 / steps), atol=1e-9, rtol=0)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 5.0])
def test_the_solver_agrees_with_sinkhorn(temperature):
    generator = torch.Generator().manual_seed(3)
    G_RK = torch.rand(4, 12, generator=generator, dtype=torch.float64)
    budgets_R = float64([0.7, 0.1, 0.1, 0.1])
    kernel = G_RK / G_RK.mean(1, keepdim=True) / temperature
    W_RK = transport_weights(G_RK, budgets_R, float64([temperature] * 4))
    torch.testing.assert_close(W_RK, sinkhorn(kernel, budgets_R), atol=1e-13, rtol=0)


def test_one_reward_and_equal_profiles_give_the_product():
    G_K = float64([0.0, 3.0, 1.0, 0.2])
    alone = transport_weights(G_K[None], float64([5.0]), float64([0.3]))
    torch.testing.assert_close(alone, torch.full_like(alone, 0.25), atol=1e-15, rtol=0)
    budgets_R = float64([3.0, 1.0, 1.0])
    same = transport_weights(torch.stack([G_K, 2 * G_K, 0.1 * G_K]), budgets_R, float64([0.3] * 3))
    product = (budgets_R / 5)[:, None].expand(3, 4) / 4
    torch.testing.assert_close(same, product, atol=1e-15, rtol=0)


def test_a_reward_without_gains_counts_as_even():
    budgets_R = torch.ones(2)
    flat = transport_weights(float64([[1.0, 2.0], [1.0, 1.0]]), budgets_R, budgets_R)
    none = transport_weights(float64([[1.0, 2.0], [0.0, 0.0]]), budgets_R, budgets_R)
    torch.testing.assert_close(none, flat, atol=0, rtol=0)


def test_a_reward_counts_more_where_it_gains_more_than_others():
    W_RK = transport_weights(float64([[3.0, 1.0, 0.0], [0.0, 1.0, 3.0]]), torch.ones(2), torch.ones(2))
    assert W_RK[0, 0] > W_RK[1, 0]
    assert W_RK[0, 2] < W_RK[1, 2]
    torch.testing.assert_close(W_RK, W_RK.flip(0, 1))


def test_not_converging_names_the_reward():
    """The middle step must be shared 1 : 4, which a kernel of 1e17 leaves no digits for."""
    G_RK = float64([[1.0, 0.3, 0.0], [0.0, 0.37, 1.0]])
    with pytest.raises(NotConverged, match="'(sharp|other)'.*temperature"):
        transport_weights(G_RK, float64([0.4, 0.6]), float64([1e-17, 1e-17]), names=("sharp", "other"))


@pytest.mark.parametrize(
    ("gains_RK", "budgets", "temperatures", "message"),
    [
        ([[math.nan, 1.0]], [1.0], [1.0], "gains"),
        ([[-1.0, 1.0]], [1.0], [1.0], "gains"),
        ([[1.0, 1.0]], [0.0], [1.0], "budgets"),
        ([[1.0, 1.0]], [-1.0], [1.0], "budgets"),
        ([[1.0, 1.0]], [1.0], [0.0], "temperatures"),
    ],
)
def test_values_out_of_range_are_refused(gains_RK, budgets, temperatures, message):
    with pytest.raises(ValueError, match=message):
        transport_weights(float64(gains_RK), float64(budgets), float64(temperatures))
