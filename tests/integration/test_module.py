"""The loop itself, on a policy of one parameter whose optimum is known."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from recast_pl.advantages import WeightedSum
from recast_pl.callbacks.report import comparison
from recast_pl.module import ReCASTModule
from recast_pl.policy.old_policy import OldPolicyRamp
from recast_pl.prompts import PromptData, SceneGrammar
from recast_pl.rewards import RewardSuite
from recast_pl.testing import Near, OnePixel, theta, train
from recast_pl.trainer_limits import unfused


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
    module, trainer = train({"near": Near(0.5)}, epochs=1, updates_per_iteration=3)
    assert trainer.global_step == 15
    assert module.iteration == 5


class Record(pl.Callback):
    def __init__(self):
        self.keys = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.keys.append(frozenset(trainer.callback_metrics))


def test_gradients_are_clipped_to_scale_under_16_mixed():
    """They are unscaled within the optimiser's step; clipped before, next to nothing would be left of them."""

    class Scaled(MixedPrecision):
        def autocast_context_manager(self):  # half precision on a CPU is another matter
            return torch.autocast("cpu", enabled=False)

    def trained(**options):
        module, trainer = train({"near": Near(0.5)}, epochs=1, lr=0.1, max_grad_norm=0.01, **options)
        return theta(module), float(trainer.callback_metrics["loss/grad_norm"])

    plugin = Scaled("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    plain, scaled = trained(), trained(settings={"plugins": [plugin]})
    assert scaled == pytest.approx(plain, rel=1e-4)
    assert plain[1] > 0.01


def test_a_fused_optimiser_is_refused_where_gradients_are_scaled():
    fused = torch.optim.Adam([torch.zeros((), requires_grad=True)], fused=True)
    assert unfused(fused, "bf16-mixed") is fused
    with pytest.raises(ValueError, match=r"model\.optimizer\.init_args\.fused.*max_grad_norm"):
        unfused(fused, "16-mixed")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (
            {"precision": "bf16-true"},
            r"trainer\.precision.*one of 32-true, bf16-mixed, 16-mixed, got bf16-true",
        ),
        ({"limit_train_batches": 3}, r"trainer\.limit_train_batches.*data\.iterations_per_epoch \(5\)"),
        ({"overfit_batches": 0.5}, r"overfit_batches.*data\.iterations_per_epoch \(5\)"),
    ],
)
def test_what_the_loop_cannot_honour_is_refused_before_anything_is_loaded(settings, key, monkeypatch):
    monkeypatch.setattr(OnePixel, "load", None)
    with pytest.raises(ValueError, match=key):
        train({"near": Near(0.5)}, settings=settings)


def test_a_process_without_held_out_prompts_gathers_nothing_from_itself(monkeypatch):
    monkeypatch.setattr(PromptData, "_place", lambda self: (0, 2))  # of two processes that share one prompt
    module = ReCASTModule(policy=OnePixel(), rewards=RewardSuite(rewards={"a": Near(0.5), "b": Near(0.1)}))
    data = PromptData(train=SceneGrammar(count=1), evaluation=SceneGrammar(count=1))
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, inference_mode=False)
    trainer.validate(module, data, verbose=False)
    assert [part.shape for part in module.statistics.values] == [(0, 2)]


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


def test_w_is_not_known_before_the_first_iteration():
    module = ReCASTModule(policy=OnePixel(), rewards=RewardSuite(rewards={"near": Near(0.5)}))
    with pytest.raises(RuntimeError, match="before the first iteration"):
        _ = module.credit.weights


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
