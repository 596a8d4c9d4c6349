import pytest
import torch

from recast_pl.advantages import PerReward, WeightedSum, group_z_scores
from recast_pl.types import Scores, Weights


def scores_of(values, valid=None):
    values = torch.as_tensor(values)
    valid = values.isfinite() if valid is None else valid
    return Scores(names=tuple("abcdef"[: len(values)]), values_RB=values, valid_RB=valid)


def weights_of(table):
    table = torch.as_tensor(table, dtype=torch.float64)
    levels = torch.linspace(1, 0, table.shape[1] + 1, dtype=torch.float64)
    return Weights(names=tuple("abcdef"[: len(table)]), levels=levels, values_RK=table)


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


@pytest.mark.parametrize("order", [PerReward(), WeightedSum()])
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
