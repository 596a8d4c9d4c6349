"""The velocity family: which objective is which other's special case, and what all of them keep to."""

import math
from dataclasses import replace

import pytest
import torch

from recast_pl.objectives import AWM, DGPO, RAM, RVM, DiffusionNFT, matching_likelihood
from recast_pl.types import NoisedSamples, Velocities

GROUPS, SIZE, SHAPE = 3, 4, (2, 3, 3)
N = GROUPS * SIZE


@pytest.fixture
def pairs():
    """Three groups of four, each at one level; θ, old and reference differ."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    velocities = Velocities(
        current_NCHW=normal(N, *SHAPE).requires_grad_(),
        old_NCHW=normal(N, *SHAPE),
        reference_NCHW=normal(N, *SHAPE),
    )
    group_N = torch.arange(GROUPS).repeat_interleave(SIZE)
    advantage = 3 * normal(GROUPS, SIZE)
    samples = NoisedSamples(
        x0_NCHW=normal(N, *SHAPE),
        noise_NCHW=normal(N, *SHAPE),
        t_N=torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64)[group_N],
        advantage_N=(advantage - advantage.mean(1, keepdim=True)).flatten(),
        group_N=group_N,
    )
    return velocities, samples


def at_old(velocities):
    """θ = old."""
    return replace(velocities, current_NCHW=velocities.old_NCHW.clone().requires_grad_())


def gradient(objective, velocities, samples):
    """In the trained velocity, N C H W."""
    current = velocities.current_NCHW.detach().clone().requires_grad_()
    objective.loss(replace(velocities, current_NCHW=current), samples).total.backward()
    return current.grad


def spread_out(values_N):
    return values_N.view(-1, 1, 1, 1)


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


DIMENSIONS = N * math.prod(SHAPE)  # a loss is a mean over pairs and over a pair's dimensions


# ------------------------------------------------------------------ directions and special cases


@pytest.mark.parametrize("anchor", ["reference", "old"])
@pytest.mark.parametrize("residual", ["current", "old"])
def test_rvm_s_gradient_is_its_direction(pairs, anchor, residual):
    velocities, samples = pairs
    objective = RVM(scale=0.3, advantage_clip=2.0, anchor=anchor, coefficient=0.7, residual=residual)
    current = velocities.current_NCHW.detach()
    u = samples.noise_NCHW - samples.x0_NCHW
    A = spread_out(0.3 * samples.advantage_N.clamp(-2, 2))
    at = current if residual == "current" else velocities.old_NCHW
    held = velocities.reference_NCHW if anchor == "reference" else velocities.old_NCHW
    direction = A * (at - u) + 0.7 * (current - held)
    assert_equal(gradient(objective, velocities, samples), direction / DIMENSIONS)


def test_rvm_without_an_anchor_is_the_weighted_regression_alone(pairs):
    velocities, samples = pairs
    with pytest.warns(UserWarning, match="anchor is none"):
        objective = RVM(anchor="none", coefficient=0.0)
    u = samples.noise_NCHW - samples.x0_NCHW
    A = spread_out(0.1 * samples.advantage_N.clamp(-5, 5))
    expected = A * (velocities.current_NCHW.detach() - u) / DIMENSIONS
    assert_equal(gradient(objective, velocities, samples), expected)
    assert not objective.needs_old
    assert not objective.needs_reference


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_nft_without_adaptive_weights_is_rvm_at_the_old_policy(pairs, beta):
    """With x̂0(v) − x0 = t (u − v), the NFT loss is A_max/β t² [r ‖v⁺ − u‖² + (1 − r) ‖v⁻ − u‖²]. As
    dv⁺/dv_θ = β and dv⁻/dv_θ = −β, its gradient is

        2 A_max t² [r (v⁺ − u) − (1 − r) (v⁻ − u)] = 2 A_max t² [(2r − 1)(v_old − u) + β (v_θ − v_old)],

    for r v⁺ − (1 − r) v⁻ = (2r − 1) v_old − β v_old + β v_θ. The published gradient's 2β in front becomes
    2 A_max because the policy loss is multiplied by A_max/β; the t² is that of the x0 space. And
    2r − 1 = clip(A / A_max, ±1) is RVM's advantage with scale 1/A_max and clip A_max.
    """
    velocities, samples = pairs
    A_max = 4.0
    nft = DiffusionNFT(beta=beta, advantage_clip=A_max, reference_coefficient=0.0, adaptive=False)
    rvm = RVM(scale=1 / A_max, advantage_clip=A_max, anchor="old", coefficient=beta, residual="old")
    assert samples.advantage_N.abs().max() > A_max  # the clip is part of the claim
    factor = spread_out(2 * A_max * samples.t_N.square())
    assert_equal(gradient(nft, velocities, samples), factor * gradient(rvm, velocities, samples))
    adaptive = DiffusionNFT(beta=beta, advantage_clip=A_max, reference_coefficient=0.0)
    difference = gradient(adaptive, velocities, samples) - gradient(nft, velocities, samples)
    assert difference.abs().max() > 1e-3


def test_ram_is_rvm_with_the_reference_as_anchor_and_coefficient_one(pairs):
    """RAM's loss has no ½, so its gradient is twice RVM's direction."""
    velocities, samples = pairs
    ram = RAM(scale=0.2, advantage_clip=3.0)
    rvm = RVM(scale=0.2, advantage_clip=3.0, anchor="reference", coefficient=1.0)
    assert_equal(gradient(ram, velocities, samples), 2 * gradient(rvm, velocities, samples))


WEIGHTS = {"uniform": lambda t, e: torch.ones_like(t), "t": lambda t, e: t, "t_squared": lambda t, e: t**2,
           "huber": lambda t, e: t * (e + 1e-10) ** (0.25 - 1)}  # fmt: skip


@pytest.mark.parametrize("weighting", WEIGHTS)
def test_awm_at_ratio_one_is_advantage_weighted_regression(pairs, weighting):
    """∇(−ρ A) = −ρ A ∇ℓ = A w(t) ∇‖v − u‖² at ρ = 1, and the Huber weight is t (e + δ)^(p − 1)."""
    velocities, samples = pairs
    velocities = at_old(velocities)
    awm = AWM(weighting=weighting, reference_coefficient=0.0, old_coefficient=0.0)
    current = velocities.current_NCHW.detach()
    u = samples.noise_NCHW - samples.x0_NCHW
    error_N = (current - u).square().mean((1, 2, 3))
    A_N = samples.advantage_N.clamp(-5, 5) / 5 * WEIGHTS[weighting](samples.t_N, error_N)
    assert_equal(gradient(awm, velocities, samples), spread_out(A_N) * 2 * (current - u) / DIMENSIONS)
    assert awm.loss(velocities, samples).parts["ratio"].item() == 1


def test_awm_with_the_weight_t_squared_is_rvm_without_anchor_at_ratio_one(pairs):
    velocities, samples = pairs
    velocities = at_old(velocities)
    awm = AWM(weighting="t_squared", reference_coefficient=0.0, old_coefficient=0.0)
    with pytest.warns(UserWarning, match="anchor is none"):
        rvm = RVM(scale=1 / 5, advantage_clip=5.0, anchor="none", coefficient=0.0)
    factor = spread_out(2 * samples.t_N.square())
    assert_equal(gradient(awm, velocities, samples), factor * gradient(rvm, velocities, samples))


def test_awm_s_penalties_pull_to_the_old_policy_and_to_the_reference(pairs):
    velocities, samples = pairs
    still = replace(samples, advantage_N=torch.zeros_like(samples.advantage_N))
    pulled = gradient(AWM(reference_coefficient=0.3, old_coefficient=0.5), velocities, still)
    current = velocities.current_NCHW.detach()
    expected = 0.5 * (current - velocities.old_NCHW) + 0.3 * (current - velocities.reference_NCHW)
    assert_equal(pulled, 2 * expected / DIMENSIONS)


def one_number(*, current, old, advantage):
    """u = 2 at t = 1."""

    def cell(value):
        return torch.full((1, 1, 1, 1), value, dtype=torch.float64)

    velocities = Velocities(
        current_NCHW=cell(current).requires_grad_(), old_NCHW=cell(old), reference_NCHW=None
    )
    samples = NoisedSamples(
        x0_NCHW=cell(1.0),
        noise_NCHW=cell(3.0),
        t_N=torch.ones(1, dtype=torch.float64),
        advantage_N=torch.tensor([advantage], dtype=torch.float64),
    )
    return velocities, samples


@pytest.mark.parametrize(
    ("current", "advantage", "value", "moves"),
    [
        (2.0, 5.0, -1.2, False),  # errors 0 and 1: ρ = e, beyond 1 + ε, and better is no further reward
        (2.0, -5.0, math.e, True),  # … but a bad sample that has become likelier is pushed back
        (4.0, 5.0, -math.exp(-3), True),  # errors 4 and 1: ρ = e⁻³
        (4.0, -5.0, 0.8, False),  # a bad sample that is unlikely already is left alone
    ],
)
def test_awm_s_clip_by_hand(current, advantage, value, moves):
    velocities, samples = one_number(current=current, old=1.0, advantage=advantage)
    awm = AWM(clip_range=0.2, reference_coefficient=0.0, old_coefficient=0.0)
    loss = awm.loss(velocities, samples)
    assert loss.total.item() == pytest.approx(value, rel=1e-12)
    assert loss.parts["clipped"].item() == (not moves)
    # at v = u the error's slope is 0, so look a little beside it
    beside, _ = one_number(current=current + 0.01, old=1.0, advantage=advantage)
    assert (gradient(awm, beside, samples).abs().item() > 0) == moves


def test_huber_of_power_one_is_the_weight_t(pairs):
    velocities, samples = pairs
    one, other = (
        matching_likelihood(velocities.old_NCHW, samples, weighting=w, power=1.0) for w in ("huber", "t")
    )
    assert_equal(one, other)


# ------------------------------------------------------------------ groups


def test_dgpo_by_hand():
    """One pixel, a group of two at u = (0, 0): errors of θ 1 and 4, of the reference 4 and 9, A = (1, −1).

    s = ½ [(4 − 1) − (9 − 4)] = −1; L = −1/β log σ(−β) with β = 2: ½ log(1 + e²).
    Gradients σ(2) A_i 2 v_i / 2: σ(2)·1 and −σ(2)·2, with σ(2) = 1/(1 + e⁻²).
    """

    def column(*values):
        return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1, 1)

    velocities = Velocities(
        current_NCHW=column(1.0, 2.0).requires_grad_(), old_NCHW=None, reference_NCHW=column(2.0, 3.0)
    )
    samples = NoisedSamples(
        x0_NCHW=column(0.0, 0.0),
        noise_NCHW=column(0.0, 0.0),
        t_N=torch.full((2,), 0.5, dtype=torch.float64),
        advantage_N=torch.tensor([1.0, -1.0], dtype=torch.float64),
        group_N=torch.tensor([3, 3]),
    )
    objective = DGPO(beta=2.0, reference_coefficient=0.0)
    loss = objective.loss(velocities, samples)
    assert loss.total.item() == pytest.approx(math.log(1 + math.e**2) / 2, rel=1e-12)
    assert loss.parts["margin"].item() == -1
    sigma = 1 / (1 + math.e**-2)
    assert_equal(gradient(objective, velocities, samples), column(sigma, -2 * sigma))
    # one sample that the clip holds back: A = (5, −1) after the clip at 5, centred (3, −3)
    uneven = replace(samples, advantage_N=torch.tensor([9.0, -1.0], dtype=torch.float64))
    assert objective.loss(velocities, uneven).parts["margin"].item() == -3


@pytest.mark.parametrize("baseline", ["reference", "old"])
def test_dgpo_is_the_mean_over_groups_each_by_itself(pairs, baseline):
    velocities, samples = pairs
    objective = DGPO(beta=3.0, baseline=baseline, reference_coefficient=0.01)
    whole = gradient(objective, velocities, samples)
    for group in range(GROUPS):
        rows = samples.group_N == group
        alone = gradient(objective, take(velocities, rows), take(samples, rows))
        assert_equal(whole[rows], alone / GROUPS)
    together = replace(samples, t_N=torch.full((N,), 0.5, dtype=torch.float64))
    merged = replace(together, group_N=torch.zeros(N, dtype=torch.int64))
    assert (
        gradient(objective, velocities, merged) - gradient(objective, velocities, together)
    ).abs().max() > 1e-4


def test_dgpo_at_the_baseline_is_half_the_advantage_weighted_regression(pairs):
    """s = 0 there, and σ(0) = ½."""
    velocities, samples = pairs
    velocities = at_old(velocities)
    objective = DGPO(advantage_clip=100.0, baseline="old", reference_coefficient=0.0)
    u = samples.noise_NCHW - samples.x0_NCHW
    weighted = spread_out(samples.advantage_N) * (velocities.current_NCHW.detach() - u)
    assert_equal(gradient(objective, velocities, samples), weighted / DIMENSIONS)


def test_dgpo_says_what_it_lacks(pairs):
    velocities, samples = pairs
    with pytest.raises(ValueError, match="group"):
        DGPO().loss(velocities, replace(samples, group_N=None))
    with pytest.raises(ValueError, match="reference policy's velocity"):
        DGPO().loss(replace(velocities, reference_NCHW=None), samples)


# ------------------------------------------------------------------ what all keep to

FAMILY = {
    "nft": DiffusionNFT(),
    "nft_plain": DiffusionNFT(adaptive=False),
    "rvm": RVM(),
    "rvm_reference": RVM(anchor="reference", residual="old"),
    "ram": RAM(),
    "awm": AWM(),
    "awm_huber": AWM(weighting="huber", clip_range=0.2),
    "dgpo": DGPO(),
    "dgpo_old": DGPO(baseline="old", beta=2000.0),
}
every = pytest.mark.parametrize("name", FAMILY)


def take(record, rows):
    """The rows of all tensors."""
    return type(record)(**{key: getattr(record, key)[rows] for key in type(record).__dataclass_fields__})


@every
def test_gradients_reach_the_trained_velocity_alone(name, pairs):
    velocities, samples = pairs
    current, old, reference = (
        getattr(velocities, key).detach().clone().requires_grad_()
        for key in ("current_NCHW", "old_NCHW", "reference_NCHW")
    )
    advantage = samples.advantage_N.clone().requires_grad_()
    everything = Velocities(current_NCHW=current, old_NCHW=old, reference_NCHW=reference)
    loss = FAMILY[name].loss(everything, replace(samples, advantage_N=advantage))
    loss.total.backward()
    assert current.grad.abs().min() > 0
    assert (old.grad, reference.grad, advantage.grad) == (None, None, None)
    assert not any(part.requires_grad for part in loss.parts.values())


@every
def test_permuting_pairs_permutes_gradients_and_nothing_else(name, pairs):
    velocities, samples = pairs
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    straight, shuffled = FAMILY[name].loss(velocities, samples), FAMILY[name].loss(
        take(velocities, order), take(samples, order)
    )  # fmt: skip
    assert_equal(straight.total, shuffled.total)
    for key, value in straight.parts.items():
        assert_equal(value, shuffled.parts[key])
    moved = gradient(FAMILY[name], take(velocities, order), take(samples, order))
    assert_equal(moved, gradient(FAMILY[name], velocities, samples)[order])


@every
def test_an_advantage_beyond_the_clip_changes_nothing_and_stays_finite(name, pairs):
    velocities, samples = pairs
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(N // 2)
    at, beyond = (replace(samples, advantage_N=sign * size) for size in (5.0, 1e12))
    bounded = gradient(FAMILY[name], velocities, beyond)
    assert bounded.isfinite().all()
    assert_equal(bounded, gradient(FAMILY[name], velocities, at))


@every
def test_far_velocities_leave_gradients_finite_in_float32(name, pairs):
    """Log-ratios of thousands, errors of millions and errors of exactly 0."""
    velocities, samples = pairs
    small = replace(samples, **{k: getattr(samples, k).float() for k in ("x0_NCHW", "noise_NCHW", "t_N",
                                                                         "advantage_N")})  # fmt: skip
    u = small.noise_NCHW - small.x0_NCHW
    far = 1e3 * velocities.old_NCHW.float()
    for current, old in ((u, far), (far, u), (u, u)):
        for reference in (u, far):
            given = Velocities(current_NCHW=current, old_NCHW=old, reference_NCHW=reference)
            assert gradient(FAMILY[name], given, small).isfinite().all()


@every
def test_a_zero_advantage_has_no_reward_gradient(name, pairs):
    """With old, trained and reference velocities equal, penalties and anchors are silent, too."""
    velocities, samples = pairs
    alike = replace(at_old(velocities), reference_NCHW=velocities.old_NCHW)
    still = replace(samples, advantage_N=torch.zeros(N, dtype=torch.float64))
    # NFT's two halves are opposite sums of equal terms: rounding is left of them
    assert gradient(FAMILY[name], alike, still).abs().max() < 1e-15
    assert gradient(FAMILY[name], alike, samples).abs().max() > 1e-5


@every
def test_a_step_down_the_gradient_raises_good_samples_likelihood(name, pairs):
    """From the old policy, the error falls where the advantage is positive and grows where it is negative."""
    velocities, samples = pairs
    alike = replace(at_old(velocities), reference_NCHW=velocities.old_NCHW)
    u = samples.noise_NCHW - samples.x0_NCHW
    step = -gradient(FAMILY[name], alike, samples)
    change_N = (2 * (alike.current_NCHW.detach() - u) * step).mean((1, 2, 3))
    assert (change_N.sign() == -samples.advantage_N.sign()).all()


@every
def test_parts_have_the_same_keys_whatever_the_numbers(name, pairs):
    velocities, samples = pairs
    still = replace(samples, advantage_N=torch.zeros(N, dtype=torch.float64))
    keys = FAMILY[name].loss(velocities, samples).parts.keys()
    assert keys == FAMILY[name].loss(velocities, still).parts.keys()
    assert "policy" in keys


@every
def test_velocities_that_are_not_asked_for_are_not_read(name, pairs):
    velocities, samples = pairs
    objective = FAMILY[name]
    asked = replace(
        velocities,
        old_NCHW=velocities.old_NCHW if objective.needs_old else None,
        reference_NCHW=velocities.reference_NCHW if objective.needs_reference else None,
    )
    assert objective.loss(asked, samples).total.item() == objective.loss(velocities, samples).total.item()
    needed = replace(asked, old_NCHW=None) if objective.needs_old else replace(asked, reference_NCHW=None)
    with pytest.raises(ValueError, match="velocity"):
        objective.loss(needed, samples)


@pytest.mark.parametrize(
    ("objective", "wrong", "key"),
    [
        (RVM, {"scale": 0.0}, "scale"),
        (RVM, {"advantage_clip": math.nan}, "advantage_clip"),
        (RVM, {"coefficient": -1.0}, "coefficient"),
        (RVM, {"anchor": "none"}, "coefficient"),
        (RVM, {"coefficient": 0.0}, "coefficient"),
        (RVM, {"anchor": "none", "coefficient": 0.0, "residual": "old"}, "anchor"),
        (RVM, {"anchor": "new"}, "anchor"),
        (RVM, {"residual": "new"}, "residual"),
        (RAM, {"scale": math.inf}, "scale"),
        (RAM, {"advantage_clip": 0.0}, "advantage_clip"),
        (AWM, {"clip_range": 0.0}, "clip_range"),
        (AWM, {"weighting": "snr"}, "weighting"),
        (AWM, {"power": 1.5}, "power"),
        (AWM, {"old_coefficient": -0.1}, "old_coefficient"),
        (AWM, {"reference_coefficient": math.nan}, "reference_coefficient"),
        (DGPO, {"beta": 0.0}, "beta"),
        (DGPO, {"baseline": "none"}, "baseline"),
        (DGPO, {"reference_coefficient": -1.0}, "reference_coefficient"),
    ],
)
def test_wrong_coefficients_name_their_key(objective, wrong, key):
    with pytest.raises(ValueError, match=rf"model\.objective\.init_args\.{key}"):
        objective(**wrong)


@every
def test_tensors_of_another_shape_are_refused(name, pairs):
    """An advantage [N, 1] in the place of [N] broadcasts in silence and changes a loss; so does a velocity."""
    velocities, samples = pairs
    with pytest.raises(ValueError, match=r"advantage_N: expected the shape \[N=12\], got \[12, 1\]"):
        FAMILY[name].loss(velocities, replace(samples, advantage_N=samples.advantage_N[:, None]))
    narrow = velocities.current_NCHW[:, :1]
    with pytest.raises(ValueError, match=r"current_NZ: expected the shape \[N=12, 2, 3, 3\], got \[12, 1"):
        FAMILY[name].loss(replace(velocities, current_NCHW=narrow), samples)
