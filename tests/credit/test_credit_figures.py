"""Pictures of W, its history and the profiles behind it."""

import math

import pytest
import torch
from gaussian import FEW_LEVELS, Gaussian

from recast_pl.callbacks.credit_assigner import evenness
from recast_pl.credit import (
    PairedCompletions,
    ReCAST,
    Uniform,
    history_figure,
    profile_figure,
    weights_figure,
)

NAMES = ("near", "far")


def test_the_heatmap_shows_names_levels_budgets_and_column_sums():
    weights = Uniform().weights(("clipscore", "jpeg"), torch.tensor([3.0, 1.0]), FEW_LEVELS)
    figure = weights_figure(weights)
    by_label = {axis.get_label(): axis for axis in figure.axes}
    table, columns, rows = by_label["table"], by_label["columns"], by_label["rows"]
    assert [tick.get_text() for tick in table.get_yticklabels()] == ["clipscore", "jpeg"]
    assert [tick.get_text() for tick in table.get_xticklabels()] == ["1.00", "0.80", "0.50", "0.20"]
    assert [bar.get_height() for bar in columns.patches] == pytest.approx([1.0] * 4)
    assert [bar.get_width() for bar in rows.patches] == pytest.approx([0.75, 0.25])
    assert [text.get_text() for text in table.texts] == ["0.75"] * 4 + ["0.25"] * 4


def test_the_profile_figure_draws_a_curve_and_a_band_for_each_reward():
    policy = Gaussian(rewards={"linear": lambda x0: x0.double(), "square": lambda x0: x0.double() ** 2})
    strategy = ReCAST(estimator=PairedCompletions())
    strategy.observe(policy.probe(samples=256, group_size=8))
    (axes,) = profile_figure(strategy.profile).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [label.split(" ")[0] for label in labels] == ["linear", "square"]
    assert len(axes.lines) == 4
    assert len(axes.collections) == 2
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(1)


def test_the_history_has_a_row_for_each_recomputation():
    weights = Uniform().weights(NAMES, torch.ones(2), FEW_LEVELS)
    figure = history_figure(weights, [(0, weights.values_RK), (20, weights.values_RK), (40, weights.values_RK)])
    panels = [axes for axes in figure.axes if axes.get_title() in NAMES]
    assert [panel.images[0].get_array().shape for panel in panels] == [(3, 4)] * 2


def test_evenness_is_an_entropy():
    assert evenness(torch.ones(5, dtype=torch.float64)) == pytest.approx(1)
    assert evenness(torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)) == pytest.approx(0)
    half = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    assert evenness(half) == pytest.approx(math.log(2) / math.log(4))
    assert evenness(torch.zeros(3)) == 0
