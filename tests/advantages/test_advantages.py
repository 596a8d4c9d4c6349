from math import inf, nan, sqrt

import pytest
import torch

from recast_pl.advantages import (
    GDPO,
    GlobalSpread,
    LeaveOneOut,
    PerReward,
    WeightedSum,
    group_z_scores,
    leave_one_out,
)
from recast_pl.types import Scores, Weights


def scores_of(values, valid=None):
    values = torch.as_tensor(values)
    valid = values.isfinite() if valid is None else valid
    return Scores(names=tuple("abcdef"[: len(values)]), values_RB=values, valid_RB=valid)


def weights_of(table):
    table = torch.as_tensor(table, dtype=torch.float64)
    levels = torch.linspace(1, 0, table.shape[1] + 1, dtype=torch.float64)
    return Weights.of_table(tuple("abcdef"[: len(table)]), levels, table)


@pytest.fixture
def golden(objective_golden):
    case = objective_golden["advantages"]
    scores = scores_of(torch.tensor(case["scores_RB"], dtype=torch.float64))
    return case, scores, torch.tensor(case["group"]), weights_of(case["weights_RK_columns_sum_to_1"])


def assert_close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)


def test_golden_z_scores(golden):
    case, scores, group_B, _ = golden
    assert_close(group_z_scores(scores.values_RB, scores.valid_RB, group_B), case["per_reward_group_z_RB"])


def test_golden_standardised_then_mixed(golden):
    case, scores, group_B, weights = golden
    assert_close(PerReward()(scores, group_B, weights), case["mixed_after_z_BK"])


def test_golden_mixed_then_standardised(golden):
    case, scores, group_B, weights = golden
    assert_close(WeightedSum()(scores, group_B, weights), case["released_pre_order_BK"])


ALL = [PerReward(), WeightedSum(), GDPO(), LeaveOneOut(), LeaveOneOut(divide=True), GlobalSpread()]
every = pytest.mark.parametrize("order", ALL, ids=lambda order: type(order).__name__)


@every
def test_permuting_samples_permutes_advantages(golden, order):
    _, scores, group_B, weights = golden
    shuffle = torch.tensor([3, 0, 5, 1, 4, 2])
    shuffled = order(scores_of(scores.values_RB[:, shuffle]), group_B[shuffle], weights)
    torch.testing.assert_close(shuffled, order(scores, group_B, weights)[shuffle], atol=1e-12, rtol=0)


def test_rewards_of_different_spread_move_the_policy_equally():
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    scaled = raw * torch.tensor([[1.0], [0.01]])
    group_B = torch.zeros(8, dtype=torch.int64)
    z = group_z_scores(scaled, torch.ones(2, 8, dtype=torch.bool), group_B)
    torch.testing.assert_close(z.std(dim=1, correction=0), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("level", [0.0, 0.3, 26.0, 1e4])
def test_rounding_noise_is_no_signal(level):
    values = torch.full((1, 4), level)
    values[0, 1] = torch.nextafter(values[0, 1], torch.tensor(1e9))  # one float32 step away
    z = group_z_scores(values, torch.ones(1, 4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64))
    assert z.tolist() == [[0.0] * 4]


def test_one_failed_score_is_left_out_and_touches_no_other():
    values = torch.tensor([[1.0, 2.0, 3.0, float("nan")], [4.0, 5.0, 6.0, 7.0]])
    group_B = torch.zeros(4, dtype=torch.int64)
    z = group_z_scores(values, values.isfinite(), group_B)
    expected = group_z_scores(values[:, :3], values[:, :3].isfinite(), group_B[:3])
    torch.testing.assert_close(z[0, :3], expected[0])
    assert z[0, 3] == 0
    assert z[1].abs().min() > 0.4  # the other reward still speaks of the masked sample


def test_masked_sample_has_no_weighted_sum_unless_its_reward_has_no_weight():
    scores = scores_of([[1.0, 2.0, float("nan")], [3.0, 5.0, 8.0]])
    group_B = torch.zeros(3, dtype=torch.int64)
    masked = WeightedSum()(scores, group_B, weights_of([[0.5], [0.5]]))
    assert masked[2, 0] == 0
    unused = WeightedSum()(scores, group_B, weights_of([[0.0], [1.0]]))
    assert unused[2, 0] > 1


def test_group_of_one_valid_sample_is_zero():
    values = torch.tensor([[3.0, float("nan"), 1.0, 2.0]])
    z = group_z_scores(values, values.isfinite(), torch.tensor([1, 1, 2, 2]))
    assert z.tolist() == [[0.0, 0.0, -1.0, 1.0]]


def test_group_ids_beyond_float32():
    first = 2**40
    group_B = torch.tensor([first, first, first + 1, first + 1])
    z = group_z_scores(torch.tensor([[0.0, 1.0, 10.0, 11.0]]), torch.ones(1, 4, dtype=torch.bool), group_B)
    assert z.tolist() == [[-1.0, 1.0, -1.0, 1.0]]


def test_large_mean_small_spread_keeps_its_digits():
    """E[x²] − E[x]² in float32 would give 0 or nonsense here."""
    values = torch.tensor([[1000.0, 1000.25, 1000.5]])
    z = group_z_scores(values, torch.ones(1, 3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(z, torch.tensor([[-(1.5**0.5), 0.0, 1.5**0.5]], dtype=torch.float64))


# ------------------------------------------------------------------ tables by hand

# two interleaved groups; a is constant in the second, b is masked once in the first
GROUPS = torch.tensor([7, 9, 7, 9, 7, 9])
A = [1.0, 4.0, 3.0, 4.0, 5.0, 4.0]  # group 7: 1 3 5, mean 3, variance 8/3; group 9: 4 4 4
B = [0.0, 1.0, nan, 2.0, 2.0, 6.0]  # group 7: 0 – 2, mean 1, variance 1; group 9: 1 2 6, mean 3, variance 14/3
MIX = [[0.25, 1.0], [0.75, 0.0]]  # step 0: ¼ a + ¾ b; step 1: a alone
Z_A = [-2 / sqrt(8 / 3), 0, 0, 0, 2 / sqrt(8 / 3), 0]
Z_B = [-1, -2 / sqrt(14 / 3), 0, -1 / sqrt(14 / 3), 1, 3 / sqrt(14 / 3)]


def mixed(a, b):
    """[B, K] of two rewards' advantages."""
    return [[0.25 * x + 0.75 * y, x] for x, y in zip(a, b, strict=True)]


def by_hand():
    yield PerReward(), mixed(Z_A, Z_B)
    # each less the mean of the others: 1 − (3 + 5)/2, …; b in group 7 has one other
    difference_a, difference_b = [-3, 0, 0, 0, 3, 0], [-2, -3, 0, -1.5, 2, 4.5]
    yield LeaveOneOut(), mixed(difference_a, difference_b)
    yield (
        LeaveOneOut(divide=True),
        mixed([x / sqrt(8 / 3) for x in difference_a],
              [-2, -3 / sqrt(14 / 3), 0, -1.5 / sqrt(14 / 3), 2, 4.5 / sqrt(14 / 3)]),
    )  # fmt: skip
    # a over all six: mean 3.5, variance 9.5/6; b over its five: mean 2.2, variance 20.8/5
    yield (
        GlobalSpread(),
        mixed([x / sqrt(9.5 / 6) for x in (-2, 0, 0, 0, 2, 0)],
              [x / sqrt(20.8 / 5) for x in (-1, -2, 0, -1, 1, 3)]),
    )  # fmt: skip
    # step 0: squares add up to 2 (¼·√1.5 + ¾)² + (¾)² (4 + 1 + 9)/(14/3); step 1: 2 · 1.5; each over six
    first = sqrt((2 * (sqrt(1.5) / 4 + 0.75) ** 2 + 3 * 0.75**2) / 6)
    yield GDPO(), [[x / first, y / sqrt(0.5)] for x, y in mixed(Z_A, Z_B)]
    # the masked sample has no sum at step 0 nor, as b is used at some step, at step 1;
    # group 7 at step 0: ¼ and 2.75, at step 1: 1 and 5; group 9: ¾·(1 2 6) + 1, then 4 4 4
    yield WeightedSum(), [[-1, -1], [-2 / sqrt(14 / 3), 0], [0, 0], [-1 / sqrt(14 / 3), 0], [1, 1],
                          [3 / sqrt(14 / 3), 0]]  # fmt: skip


@pytest.mark.parametrize(("order", "expected"), by_hand(), ids=lambda value: type(value).__name__)
def test_masked_constant_and_interleaved_groups_by_hand(order, expected):
    actual = order(scores_of([A, B]), GROUPS, weights_of(MIX))
    assert_close(actual, expected)
    zero = torch.tensor(expected) == 0
    assert (actual[zero] == 0).all()  # exactly, not nearly


@every
def test_a_clip_cuts_the_mixture(order):
    scores, weights = scores_of([A, B]), weights_of(MIX)
    clipped = type(order)(clip=0.5, **({"divide": order.divide} if isinstance(order, LeaveOneOut) else {}))
    whole = order(scores, GROUPS, weights)
    assert whole.abs().max() > 0.5
    assert torch.equal(clipped(scores, GROUPS, weights), whole.clamp(-0.5, 0.5))


@every
@pytest.mark.parametrize("wrong", [0.0, -1.0, nan, inf])
def test_a_wrong_clip_names_its_key(order, wrong):
    with pytest.raises(ValueError, match=r"model\.advantages\.init_args\.clip"):
        type(order)(clip=wrong)


@every
def test_advantages_of_a_group_sum_to_zero(order, golden):
    _, scores, group_B, weights = golden
    advantages = order(scores, group_B, weights)
    for group in group_B.unique():
        assert advantages[group_B == group].sum(0).abs().max() < 1e-12


@every
def test_what_is_not_valid_is_not_read(order):
    values = torch.tensor([A, B])
    filled = torch.where(values.isfinite(), values, 1e30)
    weights = weights_of(MIX)
    plain = order(scores_of(values), GROUPS, weights)
    assert torch.equal(order(scores_of(filled, valid=values.isfinite()), GROUPS, weights), plain)
    nothing = order(scores_of(filled, valid=torch.zeros(2, 6, dtype=torch.bool)), GROUPS, weights)
    assert (nothing == 0).all()


@every
@pytest.mark.parametrize("level", [0.3, 26.0, 1e4])
def test_rounding_noise_in_all_groups_is_no_signal(order, level):
    values = torch.full((1, 6), level)
    values[0, 1] = torch.nextafter(values[0, 1], torch.tensor(1e9))
    assert (order(scores_of(values), GROUPS, weights_of([[1.0]])) == 0).all()


@pytest.mark.parametrize("divide", [False, True])
def test_leave_one_out_is_the_difference_to_the_others_mean(divide):
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    valid = torch.rand(3, 40, generator=generator) < 0.8
    group_B = torch.randint(0, 6, (40,), generator=generator)
    actual = leave_one_out(values, valid, group_B, divide=divide)
    for row in range(3):
        for sample in range(40):
            mine = valid[row] & (group_B == group_B[sample])
            others = mine.clone()
            others[sample] = False
            expected = 0.0
            if valid[row, sample] and others.any():
                spread = values[row, mine].std(correction=0) if divide else 1.0
                expected = ((values[row, sample] - values[row, others].mean()) / spread).item()
            assert actual[row, sample].item() == pytest.approx(expected, abs=1e-12)


def test_gdpo_has_spread_one_at_every_step_over_the_samples_that_have_a_score():
    scores = scores_of([[1.0, 3.0, nan, 2.0, 2.0, nan]])
    advantages = GDPO()(scores, torch.tensor([0, 0, 0, 1, 1, 1]), weights_of([[1.0, 0.2]]))
    # z: ∓1 and 0 0, over four samples: spread √½, at both steps
    column = [-sqrt(2), sqrt(2), 0, 0, 0, 0]
    assert_close(advantages, [[value, value] for value in column])


def test_gdpo_has_no_advantages_where_rewards_cancel():
    scores = scores_of([[1.0, 2.0, 4.0], [-1.0, -2.0, -4.0]])
    group_B = torch.zeros(3, dtype=torch.int64)
    advantages = GDPO()(scores, group_B, weights_of([[0.5, 0.75], [0.5, 0.25]]))
    assert (advantages[:, 0] == 0).all()
    # step 1: z/2 over its spread ½
    assert_close(advantages[:, 1], group_z_scores(scores.values_RB, scores.valid_RB, group_B)[0].tolist())


@pytest.mark.parametrize("order", [PerReward(), GDPO(), LeaveOneOut(divide=True), GlobalSpread()])
def test_a_reward_s_scale_and_offset_decide_nothing(order):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    group_B, weights = torch.arange(12) % 3, weights_of([[0.3, 0.6], [0.7, 0.4]])
    scaled = values * torch.tensor([[100.0], [1.0]]) + torch.tensor([[7.0], [0.0]])
    one, other = (order(scores_of(v), group_B, weights) for v in (values, scaled))
    torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


def test_a_global_spread_leaves_a_hardly_differing_group_small():
    scores = scores_of([[0.0, 1.0, 0.50, 0.51]])
    group_B = torch.tensor([0, 0, 1, 1])
    advantages = GlobalSpread()(scores, group_B, weights_of([[1.0]]))[:, 0]
    assert advantages[2:].abs().max() < 0.02
    own = PerReward()(scores, group_B, weights_of([[1.0]]))[:, 0]
    assert own.abs().min() > 0.99
