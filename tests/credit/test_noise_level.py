"""NoiseLevel: the noise of Flow-GRPO's stochastic step as a time weight."""

import math

import pytest
import torch
from gaussian import FEW_LEVELS

from recast_pl.credit import NoiseLevel


def test_weights_by_hand_and_the_first_step_as_flow_grpo_has_it():
    """σ(t) = √(t/(1 − t)); at t = 1 its denominator is that of the next level, here .8."""
    W_RK = NoiseLevel().weights(("a", "b"), torch.tensor([3.0, 1.0]), FEW_LEVELS).values_RK
    by_hand = torch.tensor(
        [math.sqrt(1 / 0.2 * 0.2), math.sqrt(0.8 / 0.2 * 0.3), math.sqrt(1.0 * 0.3), math.sqrt(0.25 * 0.2)],
        dtype=torch.float64,
    )
    torch.testing.assert_close(W_RK.sum(0), by_hand / by_hand.mean())
    torch.testing.assert_close(W_RK[0], 3 * W_RK[1])
    assert W_RK.sum(0).mean().item() == pytest.approx(1)


def test_one_step_alone_has_everything():
    assert NoiseLevel().table(("a",), torch.ones(1), torch.tensor([1.0, 0.0])).tolist() == [[1.0]]
