import numpy as np
import pytest
import torch
from conftest import prompt_batch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

from recast_pl.noise import Purpose, keyed_normal
from recast_pl.rollout import ODERollout, clean_estimate, euler, multistep

TEXTS = ["a red circle on a white background", "two blue squares on a black background", "something else"]


def start(policy, count, *, seed):
    return keyed_normal(
        policy.latent_shape, seed=seed, iteration=0, samples=range(count), purpose=Purpose.START
    )


@pytest.mark.parametrize(("steps", "guidance"), [(10, 1.0), (4, 1.0), (7, 4.5)])
def test_equals_the_plain_diffusers_pipeline(policy, steps, guidance):
    rollout = ODERollout(num_steps=steps, guidance_scale=guidance, micro_batch_size=2, progress_bar=False)
    batch = prompt_batch(TEXTS)
    with policy.using("reference"):
        x0 = rollout.sample(policy, batch, policy.text(TEXTS), seed=3)
        ours = policy.decode(x0)
        plain = policy.pipeline(
            prompt=TEXTS,
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=1,
            latents=start(policy, 3, seed=3),
            output_type="np",
        ).images
    np.testing.assert_allclose(ours.permute(0, 2, 3, 1).numpy(), plain, atol=1e-4)
    assert ours.std() > 0.01  # pictures, not one grey


@pytest.mark.parametrize("steps", [1, 2, 10, 25])
def test_levels_are_the_scheduler_s(policy, steps):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    levels = policy.levels(steps)
    assert levels.tolist() == scheduler.sigmas.double().tolist()
    assert len(levels) == steps + 1
    assert levels[0] == 1
    assert levels[-1] == 0
    torch.testing.assert_close(levels[:-1] * 1000, scheduler.timesteps.double())


def test_levels_leave_the_pipeline_s_scheduler_alone(policy):
    policy.pipeline.scheduler.set_timesteps(5)
    before = policy.pipeline.scheduler.sigmas.clone()
    policy.levels(9)
    assert torch.equal(policy.pipeline.scheduler.sigmas, before)


def test_dynamic_shifting_follows_the_resolution(policy):
    config = dict(policy.pipeline.scheduler.config) | {"use_dynamic_shifting": True}
    policy.pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    levels = policy.levels(4)
    with policy.using("reference"):
        policy.pipeline(prompt="x", num_inference_steps=4, max_sequence_length=1, output_type="latent")
    assert levels.tolist() == policy.pipeline.scheduler.sigmas.double().tolist()


def test_micro_batches_and_permutation(policy):
    text = policy.text(TEXTS)
    whole = ODERollout(num_steps=3, micro_batch_size=8).sample(policy, prompt_batch(TEXTS), text, seed=0)
    parts = ODERollout(num_steps=3, micro_batch_size=1).sample(policy, prompt_batch(TEXTS), text, seed=0)
    torch.testing.assert_close(whole, parts, atol=1e-5, rtol=1e-5)
    order = torch.tensor([2, 0, 1])
    batch = prompt_batch([TEXTS[i] for i in order])
    object.__setattr__(batch, "sample_B", order)
    shuffled = ODERollout(num_steps=3, micro_batch_size=8).sample(policy, batch, text[order], seed=0)
    torch.testing.assert_close(shuffled, whole[order], atol=1e-5, rtol=1e-5)


def test_rollouts_hold_no_graph(policy):
    x0 = ODERollout(num_steps=2).sample(policy, prompt_batch(TEXTS), policy.text(TEXTS), seed=0)
    assert not x0.requires_grad
    assert x0.grad_fn is None


def test_euler_is_exact_on_straight_paths_and_first_order_else():
    x0 = torch.full((1, 1), 2.0)
    noise = torch.full((1, 1), -1.0)
    levels = torch.linspace(1, 0, 4, dtype=torch.float64)
    assert euler(lambda x, t: noise - x0, noise, levels).item() == pytest.approx(2.0)
    # dx/dt = x from 1 to 0: x(0) = x(1)/e; halving the step halves the error
    errors = [
        abs(euler(lambda x, t: x, torch.ones(1), torch.linspace(1, 0, n + 1)).item() - np.exp(-1))
        for n in (50, 100)
    ]
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.05)


def test_clean_estimate_inverts_the_forward_process():
    x0, noise, t = torch.randn(3), torch.randn(3), torch.tensor(0.3)
    torch.testing.assert_close(clean_estimate((1 - t) * x0 + t * noise, noise - x0, t), x0)


@pytest.mark.parametrize(
    ("wrong", "key"),
    [({"num_steps": 0}, "num_steps"), ({"guidance_scale": 0.5}, "guidance_scale"),
     ({"micro_batch_size": 0}, "micro_batch_size")],
)  # fmt: skip
def test_wrong_arguments_name_their_key(wrong, key):
    with pytest.raises(ValueError, match=f"model.rollout.init_args.{key}"):
        ODERollout(**wrong)


def test_multistep_is_diffusers_dpm_solver_on_the_scheduler_s_levels(policy):
    """The scheduler's arithmetic on our levels, with a velocity that is not linear in x."""
    levels = policy.levels(12)
    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++", solver_order=2, prediction_type="flow_prediction", use_flow_sigmas=True
    )
    scheduler.set_timesteps(12)
    scheduler.sigmas, scheduler.timesteps = levels.float(), levels[:-1].float() * 1000

    def velocity(x, t):
        return torch.sin(3 * x) + t * x

    start_ = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    x = start_
    for t in scheduler.timesteps:
        x = scheduler.step(velocity(x, t.item() / 1000), t, x, return_dict=False)[0]
    torch.testing.assert_close(multistep(velocity, start_, levels), x, atol=1e-5, rtol=1e-5)


def test_multistep_rollout_is_the_plain_pipeline_with_that_scheduler(policy):
    rollout = ODERollout(num_steps=8, solver="multistep", micro_batch_size=2, progress_bar=False)
    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++", solver_order=2, prediction_type="flow_prediction", use_flow_sigmas=True
    )
    levels = policy.levels(8)
    scheduler.set_timesteps(8)
    scheduler.sigmas, scheduler.timesteps = levels.float(), levels[:-1].float() * 1000
    with policy.using("reference"):
        text = policy.text(TEXTS)
        ours = rollout.sample(policy, prompt_batch(TEXTS), text, seed=3)
        x = start(policy, 3, seed=3)
        with torch.no_grad():
            for t in scheduler.timesteps:
                v = policy.velocity(x, t.expand(3) / 1000, text)
                x = scheduler.step(v, t, x, return_dict=False)[0]
        plain = ODERollout(num_steps=8, progress_bar=False).sample(policy, prompt_batch(TEXTS), text, seed=3)
    torch.testing.assert_close(ours, x, atol=1e-4, rtol=1e-4)
    assert (ours - plain).abs().max() > 1e-3


def test_multistep_is_of_second_order_and_better_than_euler():
    """x0 ~ N(0, .5²): along the ODE x(0) = .5 x(1). From t = .98, where the flow's level is finite in log."""

    def velocity(x, t):
        return (t - (1 - t) * 0.25) / ((1 - t) ** 2 * 0.25 + t**2) * x

    begin, end = 0.98, 0.02
    x = torch.tensor([(((1 - begin) ** 2 * 0.25) + begin**2) ** 0.5])
    exact = ((1 - end) ** 2 * 0.25 + end**2) ** 0.5

    def error(solver, steps):
        inner = torch.linspace(begin, end, steps + 1, dtype=torch.float64)
        return abs(solver(velocity, x, inner).item() - exact)

    assert error(multistep, 40) / error(multistep, 80) == pytest.approx(4, rel=0.25)
    assert error(euler, 40) / error(euler, 80) == pytest.approx(2, rel=0.1)
    assert error(multistep, 40) < 0.2 * error(euler, 40)


def test_an_unknown_solver_names_its_key():
    with pytest.raises(ValueError, match=r"model.rollout.init_args.solver"):
        ODERollout(solver="heun")
