"""FlowGRPO and DDPO: their losses by hand and by torch.distributions, and their ratio in the real module."""

import math
from dataclasses import replace

import pytest
import torch
from command_line import CONFIGS, QUICKSTART
from conftest import prompt_batch
from trajectories import learn

from recast_pl.advantages import BatchNormalised
from recast_pl.cli import main
from recast_pl.credit import CreditAssigner, ReCAST, ValueHead
from recast_pl.objectives import DDPO, DiffusionNFT, FlowGRPO
from recast_pl.objectives.policy_gradient import clipped_surrogate
from recast_pl.rollout import ODERollout, SDERollout, StochasticWindow
from recast_pl.rollout.transition import cps_steps, flow_grpo_steps, step_draw, step_log_prob, step_mean
from recast_pl.testing import Near
from recast_pl.types import Rollout, Scores, Trajectory, Transitions, Velocities, Weights
from recast_pl.update import training_pairs, transitions

LEVELS = torch.linspace(1, 0, 9, dtype=torch.float64)


def pairs_of(*, steps=flow_grpo_steps, seed=0, shift=0.0, with_old=True, with_reference=True):
    """Five steps that an old policy has taken, and velocities near it; float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(5, 2, 3, 3, generator=generator, dtype=torch.float64)

    step_N = torch.tensor([0, 1, 3, 5, 6])
    gaussian, x, old = steps(LEVELS)[step_N], normal(), normal()
    drawn = step_draw(gaussian, step_mean(gaussian, x, old), normal())
    velocities = Velocities(
        current_NCHW=(old + shift * normal()).requires_grad_(),
        old_NCHW=old if with_old else None,
        reference_NCHW=old + 0.1 * normal() if with_reference else None,
    )
    samples = Transitions(
        before_NCHW=x,
        x_next_NCHW=drawn,
        t_N=LEVELS[step_N],
        t_next_N=LEVELS[step_N + 1],
        steps_N=gaussian,
        log_prob_old_N=step_log_prob(gaussian, step_mean(gaussian, x, old), drawn),
        advantage_N=torch.tensor([1.0, -2.0, 0.5, 9.0, -0.3], dtype=torch.float64),
    )
    return velocities, samples


def normals(velocity_NCHW, samples):
    a, b, std = (getattr(samples.steps_N, name)[:, None, None, None] for name in ("x_N", "velocity_N", "std_N"))
    return torch.distributions.Normal(a * samples.x_t_NCHW + b * velocity_NCHW, std.expand_as(velocity_NCHW))


# ---------------------------------------------------------------------- the loss


@pytest.mark.parametrize("steps", [flow_grpo_steps, cps_steps])
def test_the_penalty_is_the_closed_form_between_gaussians(steps):
    velocities, samples = pairs_of(steps=steps, shift=0.2)
    loss = FlowGRPO(reference_coefficient=0.5).loss(velocities, samples)
    expected = torch.distributions.kl_divergence(
        normals(velocities.current_NCHW, samples), normals(velocities.reference_NCHW, samples)
    ).mean()
    assert loss.parts["divergence_from_reference"].item() == pytest.approx(expected.item(), abs=1e-12)
    assert (loss.total - loss.parts["policy"]).item() == pytest.approx(0.5 * expected.item(), abs=1e-12)


@pytest.mark.parametrize("steps", [flow_grpo_steps, cps_steps])
@pytest.mark.parametrize("objective", [FlowGRPO(reference_coefficient=0.0), DDPO(), DDPO(estimator="score")])
def test_at_ratio_one_the_gradient_is_reinforce_s(objective, steps):
    velocities, samples = pairs_of(steps=steps, with_reference=False)
    (gradient,) = torch.autograd.grad(objective.loss(velocities, samples).total, velocities.current_NCHW)
    v = velocities.current_NCHW.detach().requires_grad_()
    log_prob_N = normals(v, samples).log_prob(samples.x_next_NCHW).mean(dim=(1, 2, 3))
    advantage_N = samples.advantage_N.clamp(-5, 5)
    (expected,) = torch.autograd.grad(-(advantage_N * log_prob_N).mean(), v)
    torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=0)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("old_log_prob", ["recomputed", "rollout"])
def test_loss_by_torch_distributions(old_log_prob):
    velocities, samples = pairs_of(shift=0.3, with_old=old_log_prob == "recomputed")
    objective = FlowGRPO(clip_range=0.02, reference_coefficient=0.0, old_log_prob=old_log_prob)
    assert objective.needs_old == (old_log_prob == "recomputed")
    loss = objective.loss(velocities, samples)
    now_N = normals(velocities.current_NCHW, samples).log_prob(samples.x_next_NCHW).mean(dim=(1, 2, 3))
    ratio_N = (now_N - samples.log_prob_old_N).exp()
    A = samples.advantage_N.clamp(-5, 5)
    expected = torch.maximum(-A * ratio_N, -A * ratio_N.clamp(0.98, 1.02)).mean()
    assert loss.total.item() == pytest.approx(expected.item(), abs=1e-12)
    assert loss.parts["ratio"].item() == pytest.approx(ratio_N.mean().item(), abs=1e-12)
    outside = ((ratio_N - 1).abs() > 0.02).double().mean().item()
    assert 0 < outside < 1
    assert loss.parts["clipped"].item() == pytest.approx(outside)
    assert ("rounding" in loss.parts) == objective.needs_old


def test_the_surrogate_and_its_gradient_by_hand():
    # ε = .2: moved too far along the advantage: held, no gradient; against it: the ratio itself, gradient −A ρ
    ratio = torch.tensor([1.5, 0.5, 1.1, 1.5, 0.5, 0.9], dtype=torch.float64)
    A = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    log_ratio = ratio.log().requires_grad_()
    loss = clipped_surrogate(log_ratio, A, clip_range=0.2)
    torch.testing.assert_close(
        loss.detach(), torch.tensor([-2.4, -1.0, -2.2, 3.0, 1.6, 1.8], dtype=torch.float64)
    )
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    torch.testing.assert_close(gradient, torch.tensor([0, -1.0, -2.2, 3.0, 0, 1.8], dtype=torch.float64))


def test_extreme_ratios_and_advantages_stay_finite():
    log_ratio = torch.tensor([1e4, -1e4, 1e4, -1e4], requires_grad=True)
    loss = clipped_surrogate(log_ratio, torch.tensor([5.0, 5.0, -5.0, -5.0]), clip_range=0.1)
    assert loss.isfinite().all()
    velocities, samples = pairs_of()
    at, beyond = (
        FlowGRPO().loss(velocities, replace(samples, advantage_N=sign * samples.advantage_N.sign())).total
        for sign in (5.0, 1e30)
    )
    assert torch.equal(at, beyond)


def test_gradients_flow_through_the_current_velocity_alone_and_pairs_are_apart():
    velocities, samples = pairs_of(shift=0.1)
    velocities.old_NCHW.requires_grad_()
    velocities.reference_NCHW.requires_grad_()
    FlowGRPO(clip_range=0.2).loss(velocities, samples).total.backward()
    assert velocities.old_NCHW.grad is None
    assert velocities.reference_NCHW.grad is None
    nothing = replace(samples, advantage_N=torch.zeros_like(samples.advantage_N))
    (gradient,) = torch.autograd.grad(DDPO().loss(velocities, nothing).total, velocities.current_NCHW)
    assert not gradient.any()


@pytest.mark.parametrize("objective", [FlowGRPO, DDPO])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clip_range": 1e-8}, "clip_range: expected 1e-06 to below 1"),
        ({"clip_range": math.nan}, "clip_range"),
        ({"clip_range": 1.0}, "clip_range"),
        ({"advantage_clip": 0.0}, "advantage_clip"),
        ({"old_log_prob": "guess"}, "old_log_prob"),
    ],
)
def test_wrong_coefficients_name_their_key(objective, wrong, said):
    with pytest.raises(ValueError, match=f"model.objective.init_args.{said}"):
        objective(**wrong)


def test_the_smallest_clip_range_is_above_float32_s_rounding():
    """Ratios of equal steps whose log-probabilities were rounded in another order stay within it."""
    velocities, samples = pairs_of()
    mean = step_mean(samples.steps_N, samples.x_t_NCHW, velocities.old_NCHW)
    exact_N = step_log_prob(samples.steps_N, mean, samples.x_next_NCHW)
    single_N = step_log_prob(samples.steps_N, mean.float(), samples.x_next_NCHW.float())
    assert ((single_N - exact_N).abs() < 1e-6).all()


def test_reference_only_where_it_is_used():
    assert FlowGRPO().needs_reference
    assert not FlowGRPO(reference_coefficient=0.0).needs_reference
    assert not DDPO().needs_reference
    with pytest.raises(ValueError, match=r"init_args.reference_coefficient"):
        FlowGRPO(reference_coefficient=-1.0)
    with pytest.raises(ValueError, match=r"init_args.estimator"):
        DDPO(estimator="ppo")


# ---------------------------------------------------------------------- pairs and transitions


def rollout_of(first=(2, 0, 4)):
    latents = torch.arange(3 * 4 * 2, dtype=torch.float32).view(3, 4, 2, 1, 1)
    trajectory = Trajectory(
        first_B=torch.tensor(first),
        latents_BTCHW=latents,
        log_prob_BS=torch.arange(9.0).view(3, 3),
        count_B=torch.full((3,), 3),
        steps_BS=flow_grpo_steps(LEVELS)[torch.tensor(first)[:, None] + torch.arange(3)],
    )
    batch = prompt_batch(["a", "b", "c"])
    return Rollout.on_schedule(
        LEVELS, batch=batch, text=None, x0_BCHW=latents[:, -1], images_B3HW=None, trajectory=trajectory
    )


def trained(rollout, steps, *, seed=0):
    return training_pairs(
        rollout,
        iteration=rollout.batch.iteration,
        trainable_BK=FlowGRPO().trainable(rollout, min_noise_level=0.01),
        levels=LEVELS,
        timesteps_per_sample=steps,
        seed=seed,
    )


def test_pairs_are_drawn_among_the_stochastic_steps_alone():
    rollout = rollout_of()
    pairs = trained(rollout, None)
    assert pairs.row_N.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert pairs.step_N.tolist() == [2, 3, 4, 0, 1, 2, 4, 5, 6]
    seen = set()
    for seed in range(30):
        pairs = trained(rollout, 2, seed=seed)
        seen |= set(zip(pairs.row_N.tolist(), pairs.step_N.tolist(), strict=True))
        assert pairs.row_N.tolist() == [0, 0, 1, 1, 2, 2]
    assert seen == {(0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2), (2, 4), (2, 5), (2, 6)}


def test_transitions_are_the_recorded_steps():
    rollout, advantages_BK = rollout_of(), torch.arange(24.0).view(3, 8)
    pairs = trained(rollout, None).at(torch.tensor([7, 2]))  # row 2 at its step 5, row 0 at its step 4
    got = transitions(rollout, advantages_BK, pairs)
    assert got.x_t_NCHW.flatten().tolist() == [18, 19, 4, 5]  # rows 2 and 0, places 1 and 2
    assert got.x_next_NCHW.flatten().tolist() == [20, 21, 6, 7]
    assert got.log_prob_old_N.tolist() == [7, 2]
    assert got.advantage_N.tolist() == [21, 4]
    torch.testing.assert_close(got.t_N.double(), LEVELS[[5, 4]])
    torch.testing.assert_close(got.t_next_N.double(), LEVELS[[6, 5]])
    assert torch.equal(got.steps_N.std_N, flow_grpo_steps(LEVELS).std_N[[5, 4]])


def test_batch_normalised_knows_no_groups_and_masks_scores():
    # (1, 2, 3, 6): mean 3, population spread √(14/4); the masked score of the last sample is 0
    values = torch.tensor([[1.0, 2.0, 3.0, 6.0, math.nan]])
    scores = Scores(names=("r",), values_RB=values, valid_RB=values.isfinite())
    weights = Weights.of_table(("r",), LEVELS[:3], torch.ones(1, 2), torch.tensor([1.0, 0.5]))
    got = BatchNormalised()(scores, torch.tensor([0, 0, 1, 1, 1]), weights)
    z = torch.tensor([-2.0, -1.0, 0.0, 3.0, 0.0], dtype=torch.float64) / math.sqrt(14 / 4)
    torch.testing.assert_close(got, torch.stack([z, z / 2], dim=1))


# ---------------------------------------------------------------------- in the real module


def fit(overlay, folder, *extra, objective="flow_grpo"):
    return main(
        ["fit", "--config", QUICKSTART, "--config", overlay,
         "--config", str(CONFIGS / "objective" / f"{objective}.yaml"),
         "--model.rollout.init_args.num_steps", "4", "--model.micro_batch_size", "5",
         "--model.rollout.init_args.micro_batch_size", "4", "--trainer.max_epochs", "1",
         "--trainer.num_sanity_val_steps", "0", "--trainer.limit_val_batches", "0",
         "--credit.strategy", "Uniform",
         "--trainer.logger.init_args.save_dir", str(folder), *extra]
    )  # fmt: skip


@pytest.fixture
def log_ratios(monkeypatch):
    """The log ratios of every micro-batch, in order, and how far the policy is from the reference there."""
    seen, plain = [], FlowGRPO.loss

    def loss(self, velocities, samples):
        result = plain(self, velocities, samples)
        mean = step_mean(samples.steps_N, samples.x_t_NCHW, velocities.current_NCHW)
        old = samples.log_prob_old_N
        if velocities.old_NCHW is not None:
            earlier = step_mean(samples.steps_N, samples.x_t_NCHW, velocities.old_NCHW)
            old = step_log_prob(samples.steps_N, earlier, samples.x_next_NCHW)
        now = step_log_prob(samples.steps_N, mean, samples.x_next_NCHW)
        seen.append(((now - old).detach(), result.parts))
        return result

    monkeypatch.setattr(FlowGRPO, "loss", loss)
    return seen


KEYED = ["--model.rollout.init_args.window", '{"length": 2, "placement": "keyed"}']


@pytest.mark.parametrize(
    ("guidance", "window"), [("4.5", KEYED), pytest.param("1.0", [], marks=pytest.mark.slow)]
)
def test_the_ratio_is_exactly_one_before_the_first_update(overlay, tmp_path, log_ratios, guidance, window):
    """Two iterations of one update: 18 or 12 pairs in micro-batches of 5, rolled out in micro-batches of 4."""
    cli = fit(overlay, tmp_path, "--model.updates_per_iteration", "1", *window,
              "--model.rollout.init_args.guidance_scale", guidance, "--model.optimizer.lr", "0.05")  # fmt: skip
    assert cli.model.iteration == 2
    assert len(log_ratios) == 2 * (3 if window else 4)
    for log_ratio, parts in log_ratios:
        assert not log_ratio.any()
        assert parts["ratio"] == 1
        assert parts["clipped"] == 0
        assert parts["rounding"] < 1e-5  # the update's velocity is the rollout's: guided alike
    assert log_ratios[-1][1]["divergence_from_reference"] > 0  # the policy had moved by then


@pytest.mark.slow
def test_the_recorded_log_prob_gives_it_up_to_rounding(overlay, tmp_path, log_ratios):
    fit(overlay, tmp_path, "--model.updates_per_iteration", "1", "--model.optimizer.lr", "0.05",
        "--model.objective.init_args.old_log_prob", "rollout",
        "--model.rollout.init_args.guidance_scale", "4.5")  # fmt: skip
    for log_ratio, _ in log_ratios:
        assert log_ratio.abs().max() < 1e-5


def test_the_ratio_drifts_with_further_updates_of_one_iteration(overlay, tmp_path, log_ratios):
    cli = fit(overlay, tmp_path, "--model.updates_per_iteration", "3", "--model.optimizer.lr", "0.05")
    assert cli.trainer.global_step == 6
    first_iteration = log_ratios[: len(log_ratios) // 2]
    assert len(first_iteration) == 6  # 6 pairs in each of three updates, in micro-batches of 5 and 1
    for log_ratio, _ in first_iteration[:2]:
        assert not log_ratio.any()
    for log_ratio, _ in first_iteration[2:]:
        assert log_ratio.any()


def test_several_updates_do_not_change_what_the_rollout_policy_is():
    one, three = (
        learn({"near": Near(0.5)}, objective=FlowGRPO(clip_range=0.2), epochs=1, updates=updates)
        for updates in (1, 3)
    )
    for module in (one, three):
        assert torch.equal(module.policy.weights["old"], module.policy.weights["default"])


# ---------------------------------------------------------------------- couples that do not go together


@pytest.mark.parametrize("objective", [FlowGRPO(), DDPO()])
def test_a_deterministic_rollout_is_refused(objective):
    with pytest.raises(ValueError, match=r"model.rollout: .*a deterministic sampler has no log-probability"):
        learn({"near": Near(0.5)}, objective=objective, rollout=ODERollout(num_steps=8))


def test_a_deterministic_rollout_is_refused_before_any_weight_is_loaded(overlay, tmp_path, monkeypatch):
    from recast_pl.policy import SD3Policy

    monkeypatch.setattr(SD3Policy, "load", lambda self, seed: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match=r"take recast_pl.rollout.SDERollout"):
        main(["fit", "--config", QUICKSTART, "--config", overlay, "--model.objective", "FlowGRPO",
              "--trainer.logger.init_args.save_dir", str(tmp_path)])  # fmt: skip


def test_an_objective_of_noised_samples_takes_stochastic_rollouts_and_records_nothing():
    module = learn({"near": Near(0.5)}, objective=DiffusionNFT(beta=1.0), epochs=1)
    assert module.iteration == 5


def test_more_steps_than_are_stochastic_are_refused():
    rollout = SDERollout(num_steps=8, window=StochasticWindow(length=2))
    with pytest.raises(ValueError, match=r"model.timesteps_per_sample: 4 .* only 2 of each sample"):
        learn({"near": Near(0.5)}, objective=FlowGRPO(), rollout=rollout, timesteps=4)
    with pytest.raises(ValueError, match=r"model.min_noise_level: lets 5 .* reach up to step 6"):
        learn({"near": Near(0.5)}, objective=FlowGRPO(), min_noise_level=0.5)


def test_the_value_head_is_refused():
    credit = CreditAssigner(strategy=ReCAST(estimator=ValueHead()))
    with pytest.raises(ValueError, match=r"credit.strategy: .*FlowGRPO trains on the rollout's own steps"):
        learn({"near": Near(0.5)}, objective=FlowGRPO(), credit=credit)
