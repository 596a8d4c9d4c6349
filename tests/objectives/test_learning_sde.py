"""FlowGRPO and DDPO find known optima on the policy of one parameter, x0 ~ N(θ, .2²).

The stochastic steps keep x0's law symmetric around θ, whatever their size: for x = (1 − t) θ both kinds of step
have the mean (1 − s) θ. So a reward that is symmetric around a target has its optimum at θ = target.
"""

import pytest
import torch
from trajectories import learn

from recast_pl.advantages import BatchNormalised, WeightedSum
from recast_pl.objectives import DDPO, FlowGRPO
from recast_pl.rewards import Reward
from recast_pl.rollout import SDERollout, StochasticWindow
from recast_pl.testing import Near, theta


class Square(Reward):
    """−(x − target)²."""

    def __init__(self, target):
        self.target = target

    def score(self, images_B3HW, prompts):
        return -(images_B3HW.mean(dim=(1, 2, 3)) - self.target).square()


ROLLOUTS = {
    "full": {},
    "cps": {"step": "cps"},
    "keyed": {"window": StochasticWindow(length=3, placement="keyed")},
    "sliding": {"window": StochasticWindow(length=3, placement="sliding", every=2)},
}


def rollout(name):
    return SDERollout(num_steps=8, micro_batch_size=10, progress_bar=False, **ROLLOUTS[name])


SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", ["keyed", *(pytest.param(n, marks=SLOW) for n in ("full", "cps", "sliding"))])
def test_flow_grpo_finds_the_known_optimum(name):
    objective = FlowGRPO(reference_coefficient=0.0)
    module = learn({"near": Near(0.5)}, objective=objective, rollout=rollout(name), epochs=10)
    assert theta(module) == pytest.approx(0.5, abs=0.1)
    assert module.policy.weights["reference"].item() == 0


@pytest.mark.parametrize("estimator", [pytest.param("importance", marks=SLOW), "score"])
def test_ddpo_finds_the_known_optimum(estimator):
    module = learn(
        {"near": Near(-0.5)},
        objective=DDPO(estimator=estimator),
        advantages=BatchNormalised(),
        rollout=rollout("full"),
        epochs=10,
    )
    assert theta(module) == pytest.approx(-0.5, abs=0.1)


@pytest.mark.slow
def test_several_updates_an_iteration_find_it_too():
    objective = FlowGRPO(clip_range=0.05, reference_coefficient=0.0)
    module = learn({"near": Near(0.5)}, objective=objective, epochs=6, updates=3, lr=0.02)
    assert theta(module) == pytest.approx(0.5, abs=0.1)


@pytest.mark.slow
def test_the_penalty_holds_the_policy_near_the_reference():
    free = learn({"near": Near(3.0)}, objective=FlowGRPO(reference_coefficient=0.0), epochs=6)
    held = learn({"near": Near(3.0)}, objective=FlowGRPO(reference_coefficient=10.0), epochs=6)
    assert theta(free) > 0.5
    assert abs(theta(held)) < 0.3 * theta(free)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [FlowGRPO(reference_coefficient=0.0), DDPO()])
@pytest.mark.parametrize(("up", "down"), [(1.0, 1.0), (3.0, 1.0)])
def test_two_conflicting_rewards_come_to_the_trade_off_of_their_budgets(objective, up, down):
    """λ₁ E[−(x − .6)²] + λ₂ E[−(x + .6)²] is largest at θ = .6 (λ₁ − λ₂) / (λ₁ + λ₂): 0 and .3."""
    module = learn(
        {"up": Square(0.6), "down": Square(-0.6)},
        budgets={"up": up, "down": down},
        objective=objective,
        advantages=WeightedSum(),
        epochs=10,
    )
    assert theta(module) == pytest.approx(0.6 * (up - down) / (up + down), abs=0.1)


def test_two_equal_runs_are_equal_bit_for_bit():
    first = learn({"near": Near(0.5)}, objective=FlowGRPO(), rollout=rollout("keyed"), epochs=1)
    torch.manual_seed(99)
    second = learn({"near": Near(0.5)}, objective=FlowGRPO(), rollout=rollout("keyed"), epochs=1)
    assert theta(first) == theta(second)
