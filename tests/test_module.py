"""The loop itself, on a policy of one parameter whose optimum is known."""

from contextlib import contextmanager

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from recast_pl.advantages import PerReward, WeightedSum
from recast_pl.callbacks.report import comparison
from recast_pl.credit import CreditAssigner
from recast_pl.module import ReCASTModule
from recast_pl.objectives import DiffusionNFT
from recast_pl.old_policy import OldPolicyRamp
from recast_pl.policy import Policy
from recast_pl.prompts import PromptData, SceneGrammar
from recast_pl.rewards import Reward, RewardSuite
from recast_pl.rollout import ODERollout
from recast_pl.types import TextEmbeddings


class OnePixel(Policy):
    """Samples x0 ~ N(θ, 0.2²): the exact velocity field of that Gaussian, shifted by the one parameter θ."""

    spread = 0.2

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterDict()
        self.role = "default"

    def load(self, *, seed):
        if not self.weights:
            for role in ("default", "old", "reference"):
                self.weights[role] = nn.Parameter(torch.zeros(()), requires_grad=role == "default")

    latent_shape = (1, 1, 1)

    def levels(self, num_steps):
        return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)

    def text(self, texts):
        return TextEmbeddings(sequence_BLD=torch.zeros(len(texts), 1, 1), pooled_BD=torch.zeros(len(texts), 1))

    def velocity(self, x_NCHW, t_N, text):
        t = t_N[:, None, None, None]
        mean, variance = self.weights[self.role], self.spread**2
        total = (1 - t) ** 2 * variance + t**2
        centred = x_NCHW - (1 - t) * mean
        return t / total * centred - (mean + (1 - t) * variance / total * centred)

    def decode(self, x0_BCHW):
        return x0_BCHW.expand(-1, 3, 2, 2)

    @contextmanager
    def using(self, role):
        self.role = role
        try:
            yield
        finally:
            self.role = "default"

    def trainable_parameters(self):
        return [self.weights["default"]]

    def update_old(self, decay):
        self.weights["old"].data.lerp_(self.weights["default"].data, 1 - decay)

    def distance_to_old(self):
        return (self.weights["default"] - self.weights["old"]).detach().abs()

    def saved_state(self):
        return {role: value.detach().clone() for role, value in self.weights.items()}

    def load_saved_state(self, state):
        for role, value in state.items():
            self.weights[role].data.copy_(value)


class Near(Reward):
    """−|x − target|, scaled."""

    def __init__(self, target, scale=1.0):
        self.target, self.scale = target, scale

    def score(self, images_B3HW, prompts):
        return -self.scale * (images_B3HW.mean(dim=(1, 2, 3)) - self.target).abs()


def train(
    rewards, *, epochs=8, budgets=None, advantages=None, updates=1, folder=None, resume=None, callbacks=()
):
    module = ReCASTModule(
        policy=OnePixel(),
        rewards=RewardSuite(rewards=rewards, budgets=budgets),
        rollout=ODERollout(num_steps=8, progress_bar=False),
        advantages=advantages or PerReward(),
        objective=DiffusionNFT(beta=1.0, reference_coefficient=0.0),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.03),
        old_policy=OldPolicyRamp(slope=0.01, maximum=0.5),
        timesteps_per_sample=4,
        micro_batch_size=37,  # does not divide the number of pairs
        updates_per_iteration=updates,
        seed=3,
    )
    data = PromptData(
        train=SceneGrammar(count=8),
        evaluation=SceneGrammar(count=4),
        num_groups=4,
        group_size=8,
        iterations_per_epoch=5,
    )
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=folder is not None,
        default_root_dir=folder,
        inference_mode=False,
        num_sanity_val_steps=0,
        callbacks=[CreditAssigner(), *callbacks],
    )
    trainer.fit(module, data, ckpt_path=resume)
    return module, trainer


def theta(module):
    return module.policy.weights["default"].item()


def test_the_known_optimum_is_found():
    module, _ = train({"near": Near(0.5)}, epochs=12)
    assert theta(module) == pytest.approx(0.5, abs=0.1)
    assert module.policy.weights["old"].item() == pytest.approx(0.5, abs=0.15)
    assert module.policy.weights["reference"].item() == 0


def test_a_reward_of_budget_zero_has_no_effect():
    alone, _ = train({"a": Near(0.5)}, epochs=2)
    beside, _ = train({"a": Near(0.5), "b": Near(-3.0)}, budgets={"a": 1.0, "b": 0.0}, epochs=2)
    assert theta(alone) == theta(beside)


def test_scale_decides_nothing_per_reward_and_everything_in_a_weighted_sum():
    conflict = {"up": Near(0.6, scale=1.0), "down": Near(-0.6, scale=0.01)}
    balanced, _ = train(conflict, epochs=6)
    assert abs(theta(balanced)) < 0.2
    dominated, _ = train(conflict, epochs=6, advantages=WeightedSum())
    assert theta(dominated) > 0.3


def test_two_equal_runs_are_equal_bit_for_bit():
    first, _ = train({"near": Near(0.5)}, epochs=2)
    torch.manual_seed(99)
    second, _ = train({"near": Near(0.5)}, epochs=2)
    assert theta(first) == theta(second)


def test_four_epochs_are_two_and_two(tmp_path):
    whole, _ = train({"near": Near(0.5)}, epochs=4)
    half, trainer = train({"near": Near(0.5)}, epochs=2, folder=tmp_path)
    path = tmp_path / "half.ckpt"
    trainer.save_checkpoint(path)
    resumed, _ = train({"near": Near(0.5)}, epochs=4, folder=tmp_path, resume=path)
    assert resumed.iteration == whole.iteration == 20
    assert half.iteration == 10
    assert theta(resumed) == theta(whole)
    assert resumed.policy.weights["old"].item() == whole.policy.weights["old"].item()


def test_a_checkpoint_of_other_rewards_is_refused(tmp_path):
    _, trainer = train({"near": Near(0.5)}, epochs=1, folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match=r"near.*this run's are other"):
        train({"other": Near(0.5)}, epochs=2, folder=tmp_path, resume=tmp_path / "one.ckpt")


def test_checkpoints_hold_plain_types_and_no_base_weights(tmp_path):
    _, trainer = train({"near": Near(0.5)}, epochs=1, folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert saved["iteration"] == 5
    assert set(saved["state_dict"]) == {"default", "old", "reference"}  # this policy's own choice
    assert saved["PromptData"] == {"position": 5}
    assert saved["credit"]["names"] == ["near"]


def test_several_updates_in_one_iteration_take_as_many_steps():
    module, trainer = train({"near": Near(0.5)}, epochs=1, updates=3)
    assert trainer.global_step == 15
    assert module.iteration == 5


class Record(pl.Callback):
    def __init__(self):
        self.keys = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.keys.append(frozenset(trainer.callback_metrics))


def test_log_keys_are_the_same_in_every_iteration_and_say_what_happened():
    record = Record()
    train({"near": Near(0.5)}, epochs=1, callbacks=[record])
    assert len(set(record.keys)) == 1
    promised = [
        *("train/near", "train_spread/near", "train_masked/near", "advantages/spread"),
        *("loss/total", "loss/policy", "loss/grad_norm"),
        *("loss/distance_to_old", "loss/distance_to_reference", "old_policy/distance", "old_policy/decay"),
        *("time/rollout", "time/rewards", "time/update", "time/images_per_second"),
    ]
    for key in promised:
        assert key in record.keys[0]


def test_masked_scores_are_counted_and_the_run_goes_on():
    class Half(Near):
        def score(self, images_B3HW, prompts):
            scores = super().score(images_B3HW, prompts)
            scores[::2] = float("nan")
            return scores

    module = None
    record = {}

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *rest):
            record.update({k: v.item() for k, v in trainer.callback_metrics.items()})

    suite = {"half": Half(0.5), "near": Near(0.5)}
    original = RewardSuite.__init__

    def masking(self, **kwargs):
        original(self, **(kwargs | {"on_failure": "mask"}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RewardSuite, "__init__", masking)
        module, _ = train(suite, epochs=2, callbacks=[Keep()])
    assert record["train_masked/half"] == 16
    assert record["train_masked/near"] == 0
    assert 0 < theta(module) < 1


def test_without_a_credit_assigner_the_run_ends_at_once():
    module = ReCASTModule(policy=OnePixel(), rewards=RewardSuite(rewards={"near": Near(0.5)}))
    with pytest.raises(RuntimeError, match="CreditAssigner"):
        _ = module.weights


@pytest.mark.parametrize(
    ("wrong", "key"),
    [({"micro_batch_size": 0}, "micro_batch_size"), ({"timesteps_per_sample": 11}, "timesteps_per_sample"),
     ({"max_grad_norm": 0.0}, "max_grad_norm"), ({"updates_per_iteration": 0}, "updates_per_iteration")],
)  # fmt: skip
def test_wrong_arguments_name_their_key(wrong, key):
    with pytest.raises(ValueError, match=rf"model\.{key}"):
        ReCASTModule(policy=OnePixel(), rewards=RewardSuite(rewards={"near": Near(0.5)}), **wrong)


def test_ramp_by_hand():
    ramp = OldPolicyRamp()
    assert [ramp.decay(i) for i in (0, 1, 100, 499, 5000)] == pytest.approx([0, 0.001, 0.1, 0.499, 0.5])
    with pytest.raises(ValueError, match=r"model\.old_policy\.maximum"):
        OldPolicyRamp(maximum=1.0)


def test_the_report_s_table():
    before = {"val/a": 1.0, "val/a/spread": 0.5, "val/b": 2.0, "val/b/spread": 4.0}
    after = {"val/a": 2.0, "val/b": 0.0}
    table = comparison(("a", "b"), before, after, first=0, last=9)
    assert "+2.00" in table
    assert "-0.50" in table
    assert table.splitlines()[-1].split()[-1] == "+0.75"
