"""Averaged weights: a copy that trails, is used for evaluation only, and is never taken for the live ones."""

import lightning.pytorch as pl
import pytest
import torch
from conftest import prompt_batch

from recast_pl.policy import SD3Policy
from recast_pl.policy.average import WeightAverage
from recast_pl.policy.full_parameters import FullFineTuning
from recast_pl.testing import Near, train


class Watch(pl.Callback):
    """The trained and the averaged parameter after each iteration, and what evaluations were made with."""

    def __init__(self):
        self.live, self.averaged, self.roles = [], [], []

    def on_train_batch_end(self, trainer, module, *rest):
        self.live.append(module.policy.weights["default"].item())
        self.averaged.append(module.policy.weights["averaged"].item())

    def on_validation_epoch_start(self, trainer, module):
        collect = module.collect
        module.collect = lambda batch, **given: (self.roles.append(given["role"]), collect(batch, **given))[1]

    def on_validation_epoch_end(self, trainer, module):
        del module.collect


def test_the_average_is_the_recursion_and_evaluation_uses_it():
    watch = Watch()
    average = WeightAverage(decay=0.6)
    train({"near": Near(0.5)}, epochs=2, callbacks=[watch], average=average, evaluated_policy="averaged")
    expected, value = [], 0.0
    for iteration, live in enumerate(watch.live):
        decay = min(0.6, (1 + iteration) / (10 + iteration))
        value = decay * value + (1 - decay) * live
        expected.append(value)
    assert watch.averaged == pytest.approx(expected, rel=1e-5)
    assert set(watch.roles) == {"averaged"}


def test_training_does_not_see_the_average():
    watch = Watch()
    train(
        {"near": Near(0.5)}, epochs=2, callbacks=[watch], average=WeightAverage(), evaluated_policy="averaged"
    )
    without, _ = train({"near": Near(0.5)}, epochs=2)
    assert watch.live[-1] == without.policy.weights["default"].item()


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"evaluated_policy: averaged needs model\.average"):
        train({"near": Near(0.5)}, epochs=1, evaluated_policy="averaged")
    with pytest.raises(ValueError, match=r"model\.average\.decay: expected 0 to below 1, got 1"):
        WeightAverage(decay=1.0)


@pytest.fixture(params=["lora", "full", "full on the cpu"])
def policy(request, pipeline_folder):
    full = None if request.param == "lora" else FullFineTuning(
        keep_copies="cpu" if "cpu" in request.param else "device"
    )  # fmt: skip
    policy = SD3Policy(
        pretrained=str(pipeline_folder), lora_rank=4, max_sequence_length=1, full_fine_tuning=full
    )
    policy.averaged = True
    policy.load(seed=0)
    return policy


def move(policy, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def velocity(policy, role):
    text = policy.text(prompt_batch(["a cat", "a dog"]).texts)
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(7))
    with torch.no_grad(), policy.using(role):
        return policy.velocity(x, torch.tensor([0.3, 0.8]), text)


def test_before_the_first_update_it_is_the_model_that_training_began_with(policy):
    assert torch.equal(velocity(policy, "averaged"), velocity(policy, "default"))
    move(policy, 0)
    assert torch.equal(velocity(policy, "averaged"), velocity(policy, "reference"))


def test_its_velocity_is_that_of_the_averaged_weights(policy):
    start = [p.detach().clone() for p in policy.trainable_parameters()]
    move(policy, 0)
    policy.update_average(0.25)
    shown, live = velocity(policy, "averaged"), velocity(policy, "default")
    moved = [p.detach().clone() for p in policy.trainable_parameters()]
    with torch.no_grad():
        for parameter, old, new in zip(policy.trainable_parameters(), start, moved, strict=True):
            parameter.copy_(0.25 * old + 0.75 * new)
    torch.testing.assert_close(velocity(policy, "default"), shown, atol=1e-5, rtol=1e-5)
    assert (shown - live).abs().max() > 1e-4
    assert torch.equal(velocity(policy, "old"), velocity(policy, "reference"))  # the old one did not move


def test_an_exception_leaves_the_live_weights_in_use(policy):
    move(policy, 0)
    before = velocity(policy, "default")
    with pytest.raises(RuntimeError, match="broken"), policy.using("averaged"):
        raise RuntimeError("broken")
    assert torch.equal(velocity(policy, "default"), before)
    assert all(parameter.requires_grad for parameter in policy.trainable_parameters())


def test_it_is_saved_and_comes_back(policy, pipeline_folder):
    move(policy, 0)
    policy.update_average(0.5)
    saved, shown = policy.saved_state(), velocity(policy, "averaged")
    move(policy, 1)
    policy.update_average(0.0)
    assert not torch.equal(velocity(policy, "averaged"), shown)
    policy.load_saved_state(saved)
    assert torch.equal(velocity(policy, "averaged"), shown)
    plain = SD3Policy(
        pretrained=str(pipeline_folder), lora_rank=4, max_sequence_length=1,
        full_fine_tuning=policy.full_fine_tuning,
    )  # fmt: skip
    plain.load(seed=0)
    with pytest.raises(ValueError, match=r"model\.average where names say `averaged`.*averaged"):
        plain.load_saved_state(saved)
