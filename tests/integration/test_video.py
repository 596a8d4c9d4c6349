"""A latent of five dimensions (a video's) goes the whole way: nothing in the arrow counts them."""

import pytest
import torch
from trajectories import learn

from recast_pl.credit import CreditAssigner, ReCAST, ValueHead
from recast_pl.objectives import AWM, DDPO, DGPO, RAM, RVM, DiffusionNFT, FlowGRPO
from recast_pl.testing.one_pixel import Near, OnePixel
from recast_pl.testing.one_pixel_run import theta, train


class OnePixelVideo(OnePixel):
    """Two frames of one pixel, each as `OnePixel` draws it."""

    latent_shape = (1, 2, 1, 1)

    def velocity(self, x_NCHW, t_N, text):
        t = t_N.view(-1, *[1] * (x_NCHW.ndim - 1))
        mean, variance = self.weights[self.role], self.spread**2
        total = (1 - t) ** 2 * variance + t**2
        centred = x_NCHW - (1 - t) * mean
        return t / total * centred - (mean + (1 - t) * variance / total * centred)

    def decode(self, x0_BCHW):
        return x0_BCHW.mean(2).expand(-1, 3, 2, 2)


OBJECTIVES = {
    "nft": DiffusionNFT(beta=1.0, reference_coefficient=0.01),
    "awm": AWM(),
    "ram": RAM(),
    "rvm": RVM(),
    "dgpo": DGPO(),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_on_noised_samples(name):
    module, _ = train({"near": Near(1.0)}, epochs=2, policy=OnePixelVideo(), objective=OBJECTIVES[name])
    assert theta(module) > 0.01


@pytest.mark.parametrize("objective", [FlowGRPO(), DDPO()], ids=["flow_grpo", "ddpo"])
def test_objectives_on_trajectories(objective):
    module = learn({"near": Near(1.0)}, objective=objective, epochs=2, policy=OnePixelVideo())
    assert theta(module) > 0.01


def test_credit_by_a_value_head():
    credit = CreditAssigner(every_n_steps=3, strategy=ReCAST(estimator=ValueHead()))
    module, _ = train({"near": Near(1.0), "far": Near(-3.0)}, epochs=2, policy=OnePixelVideo(), credit=credit)
    assert len(credit.history) == 4
    assert torch.isfinite(module.credit.weights.values_RK).all()


@pytest.mark.parametrize("estimator", [None])
def test_credit_by_completions(estimator):
    credit = CreditAssigner(every_n_steps=3, strategy=ReCAST())
    train({"near": Near(1.0), "far": Near(-3.0)}, epochs=1, policy=OnePixelVideo(), credit=credit)
    assert len(credit.history) == 2
