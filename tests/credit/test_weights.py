"""W taken apart: shares of a step, and how much the step counts; and what reads them."""

import pytest
import torch

from recast_pl.advantages import GDPO, BatchNormalised, PerReward, WeightedSum
from recast_pl.credit import SNR, CreditAssigner, CreditStrategy, NoiseLevel, Uniform, Window
from recast_pl.credit.weights_record import weights_from_record, weights_record
from recast_pl.testing.one_pixel import Near
from recast_pl.testing.one_pixel_run import train
from recast_pl.types import Scores, Weights

LEVELS = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0], dtype=torch.float64)
BUDGETS = torch.tensor([3.0, 1.0])
TRAINED = torch.tensor([True, True, True, False])
GROUPS = torch.arange(12) // 4


def scores(seed=0):
    values = torch.randn(2, 12, generator=torch.Generator().manual_seed(seed)) * torch.tensor([[5.0], [0.3]])
    return Scores(names=("a", "b"), values_RB=values, valid_RB=values.isfinite())


@pytest.mark.parametrize("strategy", [SNR(), NoiseLevel(), Window(place="last", steps=2), Uniform()])
def test_shares_sum_to_one_and_trained_steps_weigh_one_in_the_mean(strategy):
    weights = strategy.weights(("a", "b"), BUDGETS, LEVELS, TRAINED)
    torch.testing.assert_close(weights.shares_RBK.sum(0), torch.ones(1, 4, dtype=torch.float64))
    step_K = weights.step_weights_BK[0]
    assert float(step_K[TRAINED].mean()) == pytest.approx(1.0)
    assert step_K[3] == 0  # whatever the strategy gives to a step that is not trained
    whole = strategy.weights(("a", "b"), BUDGETS, LEVELS)
    table_RK = strategy.table(("a", "b"), BUDGETS.double(), LEVELS)
    torch.testing.assert_close(whole.values_RBK[:, 0], 4 * table_RK)
    torch.testing.assert_close(weights.values_RK, 4 * table_RK)  # what is shown is the strategy's own


def test_a_table_that_leaves_trained_steps_nothing_is_refused():
    with pytest.raises(ValueError, match=r"these are \[0, 1\], and W counts \[3\]"):
        Window(place="last", steps=1).weights(("a", "b"), BUDGETS, LEVELS, torch.arange(4) < 2)


class Rising(CreditStrategy):
    """A weight over time alone: 1, 2, 3, 4."""

    def table(self, names, budgets_R, levels):
        return budgets_R[:, None] / budgets_R.sum() * torch.arange(1.0, 5.0, dtype=torch.float64) / 10


@pytest.mark.parametrize(
    "advantages", [WeightedSum(), GDPO(), PerReward(), BatchNormalised(), WeightedSum(clip=0.5)]
)
def test_a_weight_over_time_alone_multiplies_whatever_is_standardised(advantages):
    even = advantages(scores(), GROUPS, Uniform().weights(("a", "b"), BUDGETS, LEVELS))
    risen = advantages(scores(), GROUPS, Rising().weights(("a", "b"), BUDGETS, LEVELS))
    torch.testing.assert_close(risen, even * torch.tensor([0.4, 0.8, 1.2, 1.6]).double())


@pytest.mark.parametrize("advantages", [WeightedSum(), GDPO(), PerReward()])
def test_samples_may_have_tables_of_their_own(advantages):
    """The same table for each sample says what one says; by other tables, each is mixed by its own."""
    one = Rising().weights(("a", "b"), BUDGETS, LEVELS)
    each = Weights(
        names=one.names,
        levels=LEVELS,
        shares_RBK=one.shares_RBK.expand(-1, 12, -1),
        step_weights_BK=one.step_weights_BK.expand(12, -1),
    )
    torch.testing.assert_close(advantages(scores(), GROUPS, each), advantages(scores(), GROUPS, one))
    shares = one.shares_RBK.expand(-1, 12, -1).clone()
    shares[:, 4:8] = torch.tensor([0.0, 1.0]).double()[:, None, None]
    step = one.step_weights_BK.expand(12, -1).clone()
    step[8:] = 1
    mixed = advantages(
        scores(), GROUPS, Weights(names=one.names, levels=LEVELS, shares_RBK=shares, step_weights_BK=step)
    )
    if not isinstance(advantages, GDPO):  # which standardises over the batch
        torch.testing.assert_close(mixed[:4], advantages(scores(), GROUPS, one)[:4])
        second = Weights.of_table(
            one.names, LEVELS, torch.tensor([[0.0], [1.0]]).double().expand(2, 4), one.step_weights_BK[0]
        )
        torch.testing.assert_close(mixed[4:8], advantages(scores(), GROUPS, second)[4:8])
        even = Uniform().weights(("a", "b"), BUDGETS, LEVELS)
        torch.testing.assert_close(mixed[8:], advantages(scores(), GROUPS, even)[8:])


def test_scores_in_another_order_than_w_are_refused():
    weights = Uniform().weights(("b", "a"), BUDGETS, LEVELS)
    with pytest.raises(ValueError, match="scores are of the rewards a, b, W is of b, a"):
        PerReward()(scores(), GROUPS, weights)


def test_w_is_read_at_a_noise_level_and_a_sample():
    weights = Rising().weights(("a", "b"), BUDGETS, LEVELS)
    t_N, row_N = torch.tensor([1.0, 0.9, 0.8, 0.21, 0.2, 0.1]), torch.tensor([0, 5, 1, 1, 2, 3])
    assert weights.columns(t_N).tolist() == [0, 0, 1, 2, 3, 3]
    expected = torch.tensor([0.4, 0.4, 0.8, 1.2, 1.6, 1.6]).double()
    torch.testing.assert_close(weights.at(t_N, row_N), torch.stack([0.75 * expected, 0.25 * expected]))


def test_a_record_gives_w_back_also_one_of_before_shares_stood_apart():
    weights = Rising().weights(("a", "b"), BUDGETS, LEVELS, TRAINED)
    record = weights_record(weights)
    back = weights_from_record(record)
    old = weights_from_record({key: record[key] for key in ("names", "levels", "values")})
    for name in ("shares_RBK", "step_weights_BK", "values_RK"):
        assert torch.equal(getattr(back, name), getattr(weights, name))
    torch.testing.assert_close(old.values_RBK[:, 0], weights.values_RK)


def test_a_time_weight_changes_a_run_under_the_weighted_sum():
    """It cancelled while the sum was standardised after it."""
    ends = []
    for strategy in (Uniform(), Window(place="first", steps=4)):
        module, _ = train(
            {"near": Near(0.5)}, epochs=1, advantages=WeightedSum(), credit=CreditAssigner(strategy=strategy)
        )
        ends.append(module.policy.weights["default"].item())
    assert ends[0] != ends[1]
