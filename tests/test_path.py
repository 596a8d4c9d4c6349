"""The path and its change of variables, against hand-computed points and diffusers' own schedulers."""

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler

from recast_pl import path


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("shape", [(3, 5), (3, 2, 4, 4), (3, 2, 5, 4, 4)])
def test_estimates_invert_the_path_for_latents_of_any_size(shape):
    x0, noise, t_N = draw(*shape), draw(*shape, seed=1), torch.tensor([1.0, 0.3, 0.0], dtype=torch.float64)
    x_t, velocity = path.noised(x0, noise, t_N), path.target_velocity(x0, noise)
    assert torch.equal(x_t[0], noise[0])
    assert torch.equal(x_t[2], x0[2])
    torch.testing.assert_close(path.clean_estimate(x_t, velocity, t_N), x0)
    torch.testing.assert_close(path.noise_estimate(x_t, velocity, t_N), noise)
    for row, t in enumerate(t_N.tolist()):  # one number for all, and one for each
        assert torch.equal(path.noised(x0, noise, t)[row], x_t[row])
        assert torch.equal(
            path.clean_estimate(x_t, velocity, t)[row], path.clean_estimate(x_t, velocity, t_N)[row]
        )


def test_the_velocity_is_the_path_s_derivative():
    x0, noise, h = draw(2, 3), draw(2, 3, seed=1), 1e-6
    slope = (path.noised(x0, noise, 0.4 + h) - path.noised(x0, noise, 0.4 - h)) / (2 * h)
    torch.testing.assert_close(path.target_velocity(x0, noise), slope, atol=1e-8, rtol=1e-6)


def test_log_snr_at_three_quarters_is_minus_two_log_three():
    assert path.log_snr(torch.tensor(0.75, dtype=torch.float64)).item() == pytest.approx(-2.1972245773)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("to_one", [True, False])
def test_an_euler_step_on_the_path_is_the_ddim_step(prediction, to_one):
    """Through a whole schedule, with a made-up network that is a function of state and timestep."""
    zero_snr = prediction == "v_prediction" and to_one  # then the first level is 1
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False,
        prediction_type=prediction, set_alpha_to_one=to_one, rescale_betas_zero_snr=zero_snr,
        timestep_spacing="trailing",
    )  # fmt: skip
    scheduler.set_timesteps(8)  # a divisor of 1000: elsewhere its steps end beside the next timestep
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()

    def network(x_vp, timestep):
        return torch.sin(3 * x_vp + timestep / 300)

    theirs = draw(2, 4, 3, 3)
    last = scheduler.final_alpha_cumprod.double()[None]
    levels = path.vp_levels(torch.cat([scheduler.alphas_cumprod[scheduler.timesteps], last]))
    assert (levels[0] == 1) == zero_snr
    assert (levels[-1] == 0) == to_one
    ours = theirs / path.vp_scale(levels[0])
    velocity = {"epsilon": path.velocity_of_noise, "v_prediction": path.velocity_of_vp_velocity}[prediction]
    for timestep, t, t_next in zip(scheduler.timesteps, levels, levels[1:], strict=False):
        torch.testing.assert_close(ours * path.vp_scale(t), theirs, atol=1e-6, rtol=0)  # their α are float32
        predicted = network(ours * path.vp_scale(t), timestep)
        ours = ours + (t_next - t) * velocity(ours, predicted, t)
        theirs = scheduler.step(network(theirs, timestep), timestep, theirs).prev_sample
    torch.testing.assert_close(ours * path.vp_scale(levels[-1]), theirs, atol=1e-6, rtol=0)


def test_both_predictions_of_one_model_are_one_velocity():
    t = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    alpha, sigma = (path.along(value * path.vp_scale(t), draw(3, 4)) for value in (1 - t, t))
    torch.testing.assert_close(alpha**2 + sigma**2, torch.ones(3, 1, dtype=torch.float64))
    x0, noise = draw(3, 4), draw(3, 4, seed=1)
    x_t, expected = path.noised(x0, noise, t), path.target_velocity(x0, noise)
    torch.testing.assert_close(path.velocity_of_noise(x_t, noise, t), expected)
    torch.testing.assert_close(path.velocity_of_vp_velocity(x_t, alpha * noise - sigma * x0, t), expected)


def test_timesteps_of_levels_are_diffusers_inverse_interpolation():
    scheduler = EulerDiscreteScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    squared = scheduler.alphas_cumprod.double()
    own = path.vp_timesteps(path.vp_levels(squared)[[0, 1, 500, 999]], squared)
    torch.testing.assert_close(own, torch.tensor([0.0, 1.0, 500.0, 999.0], dtype=torch.float64))
    t_N = torch.tensor([0.001, 0.1, 0.345, 0.8, 0.99], dtype=torch.float64)
    sigmas, log_sigmas = t_N / (1 - t_N), ((1 - squared) / squared).sqrt().log()
    theirs = [float(scheduler._sigma_to_t(sigma.numpy(), log_sigmas.numpy())) for sigma in sigmas]
    torch.testing.assert_close(path.vp_timesteps(t_N, squared), torch.tensor(theirs, dtype=torch.float64))
    zero = torch.tensor([0.99, 0.5, 0.0])
    assert path.vp_timesteps(torch.tensor([0.0, 1.0]), zero).tolist() == [0, 2]
