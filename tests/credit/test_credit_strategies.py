"""What holds of every strategy's W: its total, its budgets, its picture, its state."""

import pytest
import torch
from gaussian import LEVELS, Gaussian

from recast_pl.credit import (
    SNR,
    CreditAssigner,
    NoiseLevel,
    ReCAST,
    Separable,
    Stage,
    StepwiseGain,
    Uniform,
    Window,
    weights_figure,
)
from recast_pl.testing import Near, theta, train

NAMES = ("linear", "wave", "size")
STAGES = {"early": list(NAMES), "middle": ["linear", "wave"], "late": ["wave", "size"]}
STRATEGIES = {
    "uniform": Uniform,
    "snr": SNR,
    "recast": ReCAST,
    "noise_level": NoiseLevel,
    "first": lambda: Window(place="first", steps=3),
    "sliding": Window,
    "stages": lambda: Stage(stages=STAGES),
    "learnt_stages": lambda: Stage(stages=STAGES, by="change"),
    "separable": Separable,
    "stepwise_gain": StepwiseGain,
}
BALANCED = ("uniform", "recast")  # equal columns


def observed(name):
    policy = Gaussian(
        rewards={
            "linear": lambda x0: x0.double(),
            "wave": lambda x0: torch.sin(6 * x0.double()),
            "size": lambda x0: x0.double().abs(),
        }
    )
    strategy = STRATEGIES[name]()
    if strategy.needs_evidence:
        strategy.observe(policy.probe(samples=256, group_size=32, seed=30))
    return strategy


@pytest.mark.parametrize("name", STRATEGIES)
def test_totals_and_rows_for_random_budgets(name):
    strategy, generator = observed(name), torch.Generator().manual_seed(1)
    for trial in range(20):
        budgets = torch.rand(3, generator=generator, dtype=torch.float64) + 0.01
        if trial % 2:
            budgets[[0, 2][trial % 4 // 2]] = 0.0
        W_RK = strategy.weights(NAMES, budgets, LEVELS).values_RK / 10
        assert W_RK.shape == (3, 10)
        assert W_RK.dtype == torch.float64
        assert (W_RK >= 0).all()
        assert not W_RK[budgets == 0].any()
        torch.testing.assert_close(W_RK.sum(1), budgets / budgets.sum(), atol=1e-8, rtol=0)
        if name in BALANCED:
            torch.testing.assert_close(
                W_RK.sum(0), torch.full((10,), 0.1, dtype=torch.float64), atol=1e-8, rtol=0
            )
        scaled = strategy.table(NAMES, 7 * budgets, LEVELS)
        torch.testing.assert_close(scaled, strategy.table(NAMES, budgets, LEVELS), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_W_can_be_drawn(name, tmp_path):
    weights = observed(name).weights(NAMES, torch.tensor([2.0, 1.0, 0.0]), LEVELS)
    figure = weights_figure(weights)
    figure.savefig(tmp_path / "W.png")
    written = [text.get_text() for text in figure.axes[1].texts or figure.axes[0].texts]
    assert written == [f"{value:.2f}" for value in weights.values_RK.flatten().tolist()]


def of_training():
    stages = {"early": ["near"], "middle": ["near", "far"], "late": ["far"]}
    return {
        "sliding": lambda: Window(steps=3, every=3),
        "learnt_stages": lambda: Stage(stages=stages, by="change", log_snr=(-1.0, 1.0)),
        "separable": Separable,
        "stepwise_gain": StepwiseGain,
    }


@pytest.mark.parametrize("name", of_training())
def test_a_strategy_goes_on_where_it_was(name, tmp_path):
    """4 epochs are 2 + 2, bit for bit, with the next recomputation in the middle of the rest."""
    rewards = {"near": Near(0.5), "far": Near(-3.0)}

    def credit():
        return CreditAssigner(every_n_steps=7, strategy=of_training()[name]())

    whole, rest = credit(), credit()
    one, _ = train(rewards, epochs=4, credit=whole)
    _, trainer = train(rewards, epochs=2, credit=credit(), folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["credit"]["state"]
    assert state  # plain types: it loads without unpickling code
    two, _ = train(rewards, epochs=4, credit=rest, folder=tmp_path, resume=tmp_path / "half.ckpt")
    assert [iteration for iteration, _ in rest.history] == [0, 7, 14]
    for (_, before), (_, after) in zip(whole.history, rest.history, strict=True):
        assert torch.equal(before, after)
    assert theta(one) == theta(two)


def test_other_budgets_count_from_the_first_iteration_of_a_resume(tmp_path):
    rewards = {"near": Near(0.5), "far": Near(-3.0)}
    _, trainer = train(rewards, epochs=1, credit=CreditAssigner(strategy=StepwiseGain()), folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "even.ckpt")
    module, _ = train(
        rewards, epochs=2, budgets={"near": 3.0, "far": 1.0}, folder=tmp_path,
        credit=CreditAssigner(every_n_steps=1000, strategy=StepwiseGain()), resume=tmp_path / "even.ckpt",
    )  # fmt: skip
    assert (module.credit.weights.values_RK.sum(1) / 8).tolist() == pytest.approx([0.75, 0.25])
