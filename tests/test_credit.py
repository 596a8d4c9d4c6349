import pytest
import torch

from recast_pl.credit import CreditAssigner, Uniform, weights_figure

LEVELS = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0], dtype=torch.float64)


def test_uniform_has_the_budgets_as_rows_and_equal_columns():
    table = Uniform().table(torch.tensor([2.0, 1.0, 0.0, 1.0]), LEVELS)
    assert table.dtype == torch.float64
    assert table.sum(1).tolist() == [0.5, 0.25, 0.0, 0.25]
    assert table.sum(0).tolist() == [0.25] * 4


def test_training_weights_sum_to_one_at_every_step():
    weights = Uniform().weights(("a", "b", "c"), torch.tensor([1.0, 5.0, 3.0]), LEVELS)
    torch.testing.assert_close(weights.values_RK.sum(0), torch.ones(4, dtype=torch.float64))
    assert weights.names == ("a", "b", "c")


def test_the_heatmap_shows_names_levels_budgets_and_column_sums():
    weights = Uniform().weights(("clipscore", "jpeg"), torch.tensor([3.0, 1.0]), LEVELS)
    figure = weights_figure(weights)
    by_label = {axis.get_label(): axis for axis in figure.axes}
    table, columns, rows = by_label["table"], by_label["columns"], by_label["rows"]
    assert [tick.get_text() for tick in table.get_yticklabels()] == ["clipscore", "jpeg"]
    assert [tick.get_text() for tick in table.get_xticklabels()] == ["1.00", "0.80", "0.50", "0.20"]
    assert [bar.get_height() for bar in columns.patches] == pytest.approx([1.0] * 4)
    assert [bar.get_width() for bar in rows.patches] == pytest.approx([0.75, 0.25])
    assert [text.get_text() for text in table.texts] == ["0.75"] * 4 + ["0.25"] * 4


def test_wrong_interval_names_its_key():
    with pytest.raises(ValueError, match=r"credit\.every_n_steps"):
        CreditAssigner(every_n_steps=0)
