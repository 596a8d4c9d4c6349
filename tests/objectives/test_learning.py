"""The real loop with every objective, on policies of one parameter whose optimum or trade-off is known."""

import math

import numpy as np
import pytest
import torch

from recast_pl.advantages import GDPO, GlobalSpread, LeaveOneOut, PerReward
from recast_pl.objectives import AWM, DGPO, RAM, RVM, DiffusionNFT
from recast_pl.rewards import Reward
from recast_pl.testing import GROUP_SIZE, Near, OnePixel, TwoModes, theta, train

STEPS = 8

# those that may go as far from the reference as the reward asks
FREE = {
    "nft": DiffusionNFT(reference_coefficient=0.0),
    "nft_plain": DiffusionNFT(beta=1.0, reference_coefficient=0.0, adaptive=False),
    "rvm": RVM(),
    "rvm_old": RVM(residual="old"),
    "awm": AWM(reference_coefficient=0.0),
    "dgpo": DGPO(beta=1.0, reference_coefficient=0.0),  # at 100 the pull fades early
    "dgpo_old": DGPO(baseline="old", reference_coefficient=0.0),
}
# those that a reference holds, and how far they go for each unit of advantage
HELD = {
    "ram": (RAM(scale=1.0), 1.0),
    "rvm": (RVM(scale=1.0, anchor="reference", coefficient=2.0), 0.5),
    "rvm_old": (RVM(scale=1.0, anchor="reference", coefficient=2.0, residual="old"), 0.5),
}


class Scored(Reward):
    """A function of the pixel."""

    def __init__(self, function):
        self.function = function

    def score(self, images_B3HW, prompts):
        return self.function(images_B3HW.mean(dim=(1, 2, 3)))


def rollout_spread():
    """Euler's steps shrink the standard normal to this, and not quite to the policy's 0.2: in closed form."""
    spread = 1.0
    for step in range(STEPS):
        t = 1 - step / STEPS
        total = (1 - t) ** 2 * OnePixel.spread**2 + t**2
        spread *= 1 - (t - (1 - t) * OnePixel.spread**2) / total / STEPS
    return spread


def slow_but(quick, names):
    """All of them, only `quick` in every run."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", slow_but(["nft", "rvm", "awm", "dgpo"], FREE))
def test_the_mean_reward_rises_to_the_best_there_is(name):
    """Of N(θ, s²), −|x − ½| has its largest mean at θ = ½: −s √(2/π), where it began at about −½."""
    module, trainer = train({"near": Near(0.5)}, epochs=12, objective=FREE[name], steps=STEPS)
    assert theta(module) == pytest.approx(0.5, abs=0.05)
    reward = trainer.callback_metrics["train/near"].item()
    assert reward == pytest.approx(-rollout_spread() * math.sqrt(2 / math.pi), abs=0.03)


@pytest.mark.parametrize("name", slow_but(["ram"], HELD))
def test_an_objective_with_the_reference_goes_as_far_as_its_fixed_point(name):
    """With R = z of a reward linear in x, at every t the expected direction in the mean m is zero where

        c m = E[R x0] = E[a group's population spread] = s √(2/k) Γ(k/2) / Γ((k − 1)/2):

    v_θ − v_ref = −m t / (s² (1 − t)² + t²), and E[R (u − v_θ)] = −E[R x0] t / (s² (1 − t)² + t²).
    """
    objective, reach = HELD[name]
    up = {"up": Scored(lambda x: 3 * x)}
    module, _ = train(up, objective=objective, lr=0.02, groups=16, micro_batch_size=256, steps=STEPS)
    k = GROUP_SIZE
    expected = rollout_spread() * math.sqrt(2 / k) * math.gamma(k / 2) / math.gamma((k - 1) / 2)
    assert theta(module) == pytest.approx(reach * expected, abs=0.02)


PEAK = 0.15


def trade_off(budgets):
    """Where λ₁ E[z₁ x0] + λ₂ E[z₂ x0] = 0 for −(x ∓ a)², groups of k from N(θ, s²): by simulation in numpy."""
    noise = rollout_spread() * np.random.default_rng(0).standard_normal((5000, GROUP_SIZE))

    def pull(mean):
        x = mean + noise
        scores = [-((x - peak) ** 2) for peak in (PEAK, -PEAK)]
        z = [(score - score.mean(1, keepdims=True)) / score.std(1, keepdims=True) for score in scores]
        return (sum(budget * each for budget, each in zip(budgets, z, strict=True)) * x).mean()

    low, high = -PEAK, PEAK
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if pull(middle) > 0 else (low, middle)
    return low


@pytest.mark.parametrize("name", slow_but(["rvm"], FREE))
def test_two_conflicting_rewards_settle_where_their_budgets_balance(name):
    """No objective here has another fixed point than E[A x0] = 0, so budgets 2 : 1 decide it by themselves."""
    module, _ = train(
        {"right": Scored(lambda x: -((x - PEAK) ** 2)), "left": Scored(lambda x: -((x + PEAK) ** 2))},
        budgets={"right": 2.0, "left": 1.0},
        objective=FREE[name],
        lr=0.01,
        groups=16,
        micro_batch_size=256,
        steps=STEPS,
    )
    expected = trade_off((2, 1))
    assert 0.08 < expected < 0.1  # between the balance of equal budgets, 0, and the peak
    assert theta(module) == pytest.approx(expected, abs=0.03)


def share_of_right(pull):
    """The root p of p − ½ = pull · E[√(p̂ (1 − p̂))], p̂ the share among k draws: by bisection."""
    k, low, high = GROUP_SIZE, 0.0, 1.0
    for _ in range(40):
        p = (low + high) / 2
        spread = sum(
            math.comb(k, j) * p**j * (1 - p) ** (k - j) * math.sqrt(j / k * (1 - j / k)) for j in range(k + 1)
        )
        low, high = (p, high) if p - 0.5 < pull * spread else (low, p)
    return low


@pytest.mark.parametrize(
    ("name", "budgets"),
    [("ram", (3.0, 1.0)), pytest.param("ram", (1.0, 3.0), marks=pytest.mark.slow),
     pytest.param("ram", (1.0, 1.0), marks=pytest.mark.slow),
     pytest.param("rvm", (3.0, 1.0), marks=pytest.mark.slow)],
)  # fmt: skip
def test_two_modes_share_as_the_budgets_ask(name, budgets):
    """Modes at ±1, one reward for each: z₂ = −z₁, so A = (λ₁ − λ₂) z₁ with budgets that sum to 1.

    Trained at pure noise alone, where x_t says nothing: v_θ − v_ref = −2 (p − ½), and
    E[R (u − v_θ)] = −E[R x0] = −2 scale (λ₁ − λ₂) E[√(p̂ (1 − p̂))], as z₁ of a mode is its share's spread
    away. Their balance is the fixed point: the more uneven the budgets, the more uneven the modes, and neither
    mode dies.
    """
    objective, reach = HELD[name]
    module, trainer = train(
        {"right": Scored(lambda x: (x > 0).float()), "left": Scored(lambda x: (x < 0).float())},
        budgets=dict(zip(("right", "left"), budgets, strict=True)),
        policy=TwoModes(),
        objective=objective,
        lr=0.05,
        groups=16,
        micro_batch_size=256,
        timesteps_per_sample=1,
        min_noise_level=1.0,
    )
    expected = share_of_right(reach * (budgets[0] - budgets[1]) / sum(budgets))
    assert torch.sigmoid(torch.tensor(theta(module))).item() == pytest.approx(expected, abs=0.03)
    right, left = (trainer.callback_metrics[f"train/{side}"].item() for side in ("right", "left"))
    assert right + left == 1
    assert (right > left) == (budgets[0] > budgets[1]) or budgets[0] == budgets[1]


@pytest.mark.slow
@pytest.mark.parametrize("advantages", [PerReward(clip=1.0), GDPO(), LeaveOneOut(), GlobalSpread()])
def test_every_kind_of_advantages_finds_the_optimum(advantages):
    module, _ = train({"near": Near(0.5)}, objective=RVM(), advantages=advantages)
    assert theta(module) == pytest.approx(0.5, abs=0.1)
