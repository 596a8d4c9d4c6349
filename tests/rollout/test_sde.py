"""Stochastic steps and rollouts, against closed forms, torch.distributions and the golden step."""

import math

import pytest
import torch
from conftest import prompt_batch

from recast_pl.rollout import Keys, ODERollout, SDERollout, StochasticWindow, euler
from recast_pl.rollout.transition import cps_steps, flow_grpo_steps, step_draw, step_log_prob, step_mean

TEXTS = [f"scene number {i}" for i in range(6)]
STEPS = {"flow_grpo": flow_grpo_steps, "cps": cps_steps}


def keys(count, *, iteration=0, group_size=1, seed=0):
    samples = tuple(range(count))
    groups = tuple(i // group_size for i in samples)
    return Keys(seed=seed, iteration=iteration, sample_B=samples, group_B=groups)


class Correlated:
    """x0 ~ N(m, S) in two dimensions, with its exact velocity v = A_t x + b_t."""

    mean = torch.tensor([0.8, -0.5], dtype=torch.float64)
    covariance = torch.tensor([[0.5, 0.2], [0.2, 0.3]], dtype=torch.float64)

    def marginal(self, t):
        eye = torch.eye(2, dtype=torch.float64)
        return (1 - t) * self.mean, (1 - t) ** 2 * self.covariance + t**2 * eye

    def affine(self, t):
        # v = E[ε − x0 | x_t] = (t − (1 − t) S) Σ_t^{-1} (x − (1 − t) m) − m
        eye = torch.eye(2, dtype=torch.float64)
        centre, total = self.marginal(t)
        matrix = (t * eye - (1 - t) * self.covariance) @ torch.linalg.inv(total)
        return matrix, -matrix @ centre - self.mean

    def velocity(self, x, t):
        matrix, offset = self.affine(t)
        flat = x.double().flatten(1) @ matrix.T + offset
        return flat.view(x.shape).to(x.dtype)

    def chain(self, levels, steps_K):
        """Exact mean and covariance before each step of the discretised chain, from N(0, 1) noise."""
        eye = torch.eye(2, dtype=torch.float64)
        mean, covariance, laws = torch.zeros(2, dtype=torch.float64), eye, []
        for step, t in enumerate(levels[:-1].tolist()):
            laws.append((mean, covariance))
            matrix, offset = self.affine(t)
            a, b, std = (getattr(steps_K, name)[step] for name in ("x_N", "velocity_N", "std_N"))
            linear = a * eye + b * matrix
            mean, covariance = linear @ mean + b * offset, linear @ covariance @ linear.T + std**2 * eye
        return laws


def evenly(steps):
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64)


# ---------------------------------------------------------------------- single steps


@pytest.mark.parametrize("number", [0, 1, 2])
def test_golden_flow_grpo_step(objective_golden, number):
    case = objective_golden["flow_grpo_step"][number]
    levels = torch.tensor([case["t"], case["t"] + case["dt"], -1.0], dtype=torch.float64)
    steps = flow_grpo_steps(levels, noise_level=case["a"])[:1]
    x, velocity, mean, next_x = (
        torch.tensor(case[name], dtype=torch.float64) for name in ("x", "velocity", "mean", "next_x")
    )
    torch.testing.assert_close(step_mean(steps, x, velocity), mean, atol=1e-12, rtol=0)
    assert steps.std_N.item() == pytest.approx(case["std"], abs=1e-12)
    log_prob = step_log_prob(steps, mean, next_x)
    assert log_prob.item() == pytest.approx(case["log_prob_mean_over_dimensions"], abs=1e-12)


def test_flow_grpo_at_pure_noise_takes_the_second_level():
    # σ² = .7² · 1 / (1 − .8) = 2.45; std = √(2.45 · .2) = .7; a = 1 − 2.45/2 · .2 = .755; b = −.2
    steps = flow_grpo_steps(torch.tensor([1.0, 0.8, 0.0], dtype=torch.float64))
    assert steps.std_N[0].item() == pytest.approx(0.7)
    assert steps.x_N[0].item() == pytest.approx(0.755)
    assert steps.velocity_N[0].item() == pytest.approx(-0.2)


def test_cps_step_is_the_paper_s_in_clean_and_noise_estimates():
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 1, 2, 2, 3, generator=generator, dtype=torch.float64)
    t, s, a = 0.6, 0.45, 0.8
    std = s * math.sin(a * math.pi / 2)
    expected = (1 - s) * (x - t * v) + math.sqrt(s**2 - std**2) * (x + (1 - t) * v)
    steps = cps_steps(torch.tensor([t, s, 0.0], dtype=torch.float64), noise_level=a)
    torch.testing.assert_close(step_mean(steps[:1], x, v), expected, atol=1e-12, rtol=0)
    assert steps.std_N.tolist() == [pytest.approx(std), 0.0]


@pytest.mark.parametrize("noise_level", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("count", [2, 10])
def test_cps_keeps_the_noise_level_by_its_algebra(noise_level, count):
    """x = (1 − t) c + t e and v = e − c give x_next = (1 − s) c + r e + std z with r² + std² = s²."""
    levels = evenly(count)
    t, s, steps = levels[:-1], levels[1:], cps_steps(levels, noise_level=noise_level)
    of_clean = steps.x_N * (1 - t) - steps.velocity_N
    of_noise = steps.x_N * t + steps.velocity_N
    torch.testing.assert_close(of_clean, 1 - s, atol=1e-14, rtol=0)
    torch.testing.assert_close(of_noise**2 + steps.std_N**2, s**2, atol=1e-14, rtol=0)


def test_flow_grpo_does_not_keep_it():
    levels = evenly(10)
    steps = flow_grpo_steps(levels)
    of_noise = steps.x_N * levels[:-1] + steps.velocity_N
    level = (of_noise**2 + steps.std_N**2).sqrt()
    assert (level[1:-1] > levels[2:-1]).all()  # the excess noise that CPS is about
    # at the first step √(1 + a⁴/4) for fine schedules
    fine = flow_grpo_steps(evenly(4000))
    level = ((fine.x_N[0] + fine.velocity_N[0]) ** 2 + fine.std_N[0] ** 2).sqrt().item()
    assert level == pytest.approx(math.sqrt(1 + 0.7**4 / 4), abs=1e-3)


@pytest.mark.parametrize("step", STEPS)
def test_log_prob_is_that_of_torch_distributions(step):
    generator = torch.Generator().manual_seed(1)
    steps = STEPS[step](evenly(6))[torch.tensor([0, 2, 4])]
    x, v, z = torch.randn(3, 3, 2, 4, 4, generator=generator, dtype=torch.float64)
    mean = step_mean(steps, x, v)
    drawn = step_draw(steps, mean, z)
    normal = torch.distributions.Normal(mean, steps.std_N[:, None, None, None])
    expected = normal.log_prob(drawn).mean(dim=(1, 2, 3))
    torch.testing.assert_close(step_log_prob(steps, mean, drawn), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close((drawn - mean) / normal.scale, z, atol=1e-9, rtol=0)


# ---------------------------------------------------------------------- laws of whole chains


@pytest.mark.parametrize("step", STEPS)
def test_samples_have_the_exact_law_of_the_discretised_chain(step):
    """Mean and covariance before each of 10 steps, within 3 standard errors of the chain's exact law."""
    model, levels, count = Correlated(), evenly(10), 4000
    rollout = SDERollout(num_steps=10, step=step, progress_bar=False)
    noise = torch.randn(count, 2, 1, 1, generator=torch.Generator().manual_seed(2))
    _, path = rollout.solve(
        model.velocity, noise, levels, keys=keys(count), record=True, on_step=lambda _: None
    )
    laws = model.chain(levels, rollout.gaussian_steps(levels))
    for place, (mean, covariance) in enumerate(laws):
        x = path.latents_BTCHW[:, place].double().flatten(1)
        error = (x.mean(0) - mean) / (covariance.diagonal() / count).sqrt()
        assert error.abs().max() < 3, place
        sample = torch.cov(x.T)
        variance = covariance.diagonal()
        spread = ((variance[:, None] * variance[None] + covariance**2) / count).sqrt()
        assert ((sample - covariance) / spread).abs().max() < 3, place


@pytest.mark.parametrize(("step", "tolerance"), [("flow_grpo", 0.01), ("cps", 0.01)])
def test_fine_chains_have_the_ode_s_marginals(step, tolerance):
    """No sampling: the chain's exact law at many small steps against the closed form (1 − t)² S + t²."""
    model, levels = Correlated(), evenly(4000)
    steps = flow_grpo_steps(levels) if step == "flow_grpo" else cps_steps(levels, noise_level=0.02)
    for t, (mean, covariance) in list(zip(levels.tolist(), model.chain(levels, steps), strict=False))[1::50]:
        true_mean, true_covariance = model.marginal(t)
        torch.testing.assert_close(mean, true_mean, atol=2 * tolerance, rtol=0)
        if t < 0.5:  # Flow-GRPO's first step has added noise, which the chain forgets on its way
            torch.testing.assert_close(covariance, true_covariance, atol=tolerance, rtol=0)


def test_cps_steps_of_any_size_are_exact_for_a_single_clean_sample():
    """v = (x − c)/t: x at every level is N((1 − t) c, t²), here after 3 coarse steps."""
    levels, c, mean, variance = evenly(4), 1.5, 0.0, 1.0
    steps = cps_steps(levels, noise_level=0.9)
    for step, (t, s) in enumerate(zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True)):
        linear = steps.x_N[step] + steps.velocity_N[step] / t
        mean = linear * mean - steps.velocity_N[step] / t * c
        variance = linear**2 * variance + steps.std_N[step] ** 2
        assert mean.item() == pytest.approx((1 - s) * c, abs=1e-12)
        assert variance.item() == pytest.approx(s**2, abs=1e-12)


# ---------------------------------------------------------------------- rollouts


def solved(rollout, count=6, *, iteration=0, group_size=1, record=True):
    noise = torch.randn(count, 2, 1, 1, generator=torch.Generator().manual_seed(4))
    return rollout.solve(
        Correlated().velocity,
        noise,
        evenly(rollout.num_steps),
        keys=keys(count, iteration=iteration, group_size=group_size),
        record=record,
        on_step=lambda _: None,
    )


@pytest.mark.parametrize("step", STEPS)
def test_a_window_of_all_steps_is_the_full_rollout_bit_for_bit(step):
    full, path = solved(SDERollout(num_steps=7, step=step))
    for placement in ("fixed", "keyed", "sliding"):
        window = StochasticWindow(length=6, placement=placement)
        x0, other = solved(SDERollout(num_steps=7, step=step, window=window))
        assert torch.equal(x0, full)
        assert torch.equal(other.latents_BTCHW, path.latents_BTCHW)
        assert torch.equal(other.log_prob_BS, path.log_prob_BS)
    assert path.log_prob_BS.shape == (6, 6)
    assert path.latents_BTCHW.shape == (6, 7, 2, 1, 1)


def test_outside_the_window_it_is_euler_s_bit_for_bit():
    levels, model = evenly(8), Correlated()
    noise = torch.randn(6, 2, 1, 1, generator=torch.Generator().manual_seed(4))
    window = StochasticWindow(length=2, first=3)
    x0, path = solved(SDERollout(num_steps=8, window=window))
    assert path.first_B.tolist() == [3] * 6
    before = euler(model.velocity, noise, levels[:4])  # three steps
    assert torch.equal(path.latents_BTCHW[:, 0], before)
    assert torch.equal(euler(model.velocity, path.latents_BTCHW[:, -1], levels[5:]), x0)
    assert not torch.equal(euler(model.velocity, before, levels[3:]), x0)


def test_recorded_log_probs_are_those_of_the_recorded_steps():
    rollout = SDERollout(num_steps=6, window=StochasticWindow(length=3, placement="keyed"))
    _, path = solved(rollout, group_size=2)
    levels, model, steps = evenly(6), Correlated(), flow_grpo_steps(evenly(6))
    for row in range(6):
        for place in range(3):
            step = int(path.first_B[row]) + place
            x, x_next = path.latents_BTCHW[row, place].double(), path.latents_BTCHW[row, place + 1].double()
            v = model.velocity(x[None], levels[step].item())[0]
            mean = steps.x_N[step] * x + steps.velocity_N[step] * v
            expected = torch.distributions.Normal(mean, steps.std_N[step]).log_prob(x_next).mean()
            assert path.log_prob_BS[row, place].item() == pytest.approx(expected.item(), abs=1e-5)


def test_keyed_windows_belong_to_groups_and_iterations():
    window = StochasticWindow(length=2, placement="keyed", first=1, last=8)

    def at(groups, **key):
        return window.starts(groups, num_steps=10, **{"seed": 0, "iteration": 0, **key})

    many = at(range(400))
    assert set(many) == {1, 2, 3, 4, 5, 6}  # 1 … 8 − 2, all of them
    assert at([7, 3, 7]) == [many[7], many[3], many[7]]
    assert at(range(400), iteration=1) != many
    assert at(range(400), seed=1) != many


def test_windows_of_one_group_do_not_depend_on_the_split_of_the_batch(policy):
    """Sample and group ids are the keys; micro-batches, order and company do not matter."""
    text, batch = policy.text(TEXTS), prompt_batch(TEXTS, group_size=2)
    window = StochasticWindow(length=2, placement="keyed")

    def drawn(size, batch=batch, text=text):
        rollout = SDERollout(num_steps=5, micro_batch_size=size, window=window, progress_bar=False)
        return rollout.draw(policy, batch, text, seed=1, record=True)

    whole = drawn(6)
    assert len(set(whole.trajectory.first_B.tolist())) > 1
    for size in (1, 4):
        parts = drawn(size)
        torch.testing.assert_close(parts.x0_BCHW, whole.x0_BCHW, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            parts.trajectory.latents_BTCHW, whole.trajectory.latents_BTCHW, atol=1e-5, rtol=1e-5
        )
        assert torch.equal(parts.trajectory.first_B, whole.trajectory.first_B)
    order = torch.tensor([5, 0, 3])
    some = prompt_batch([TEXTS[i] for i in order])
    object.__setattr__(some, "sample_B", order)
    object.__setattr__(some, "group_B", order // 2)
    torch.testing.assert_close(drawn(6, some, text[order]).x0_BCHW, whole.x0_BCHW[order], atol=1e-5, rtol=1e-5)


def test_trajectories_are_float32_hold_no_graph_and_only_come_when_asked_for(policy):
    text, batch = policy.text(TEXTS), prompt_batch(TEXTS)
    rollout = SDERollout(num_steps=3, progress_bar=False)
    drawn = rollout.draw(policy, batch, text, seed=0, record=True)
    for tensor in (drawn.trajectory.latents_BTCHW, drawn.trajectory.log_prob_BS):
        assert tensor.dtype == torch.float32
        assert not tensor.requires_grad
    plain = rollout.draw(policy, batch, text, seed=0)
    assert plain.trajectory is None
    assert torch.equal(plain.x0_BCHW, drawn.x0_BCHW)
    assert torch.equal(rollout.sample(policy, batch, text, seed=0), drawn.x0_BCHW)
    assert ODERollout(num_steps=3).draw(policy, batch, text, seed=0, record=True).trajectory is None


def test_held_out_prompts_are_sampled_along_the_ode_unless_asked_otherwise(policy):
    text, batch = policy.text(TEXTS), prompt_batch(TEXTS, iteration=-1)
    plain = ODERollout(num_steps=4, progress_bar=False).sample(policy, batch, text, seed=0)
    assert torch.equal(SDERollout(num_steps=4, progress_bar=False).sample(policy, batch, text, seed=0), plain)
    noisy = SDERollout(num_steps=4, progress_bar=False, stochastic_evaluation=True)
    assert not torch.equal(noisy.sample(policy, batch, text, seed=0), plain)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_steps": 1}, "init_args.num_steps"),
        ({"step": "ddim"}, "init_args.step"),
        ({"noise_level": 0.0}, "init_args.noise_level"),
        ({"noise_level": math.nan}, "init_args.noise_level"),
        ({"step": "cps", "noise_level": 1.5}, "at most 1"),
        ({"window": {"length": 0}}, "window.length"),
        ({"window": {"length": 10}}, "length 9 or less"),
        ({"window": {"length": 2, "last": 10}}, "always deterministic"),
        ({"window": {"length": 2, "first": 8}}, "does not fit before step 9"),
        ({"window": {"length": 2, "placement": "random"}}, "window.placement"),
        ({"window": {"length": 2, "every": 0}}, "window.every"),
    ],
)
def test_wrong_arguments_name_their_key(wrong, said):
    with pytest.raises(ValueError, match=said):
        SDERollout(**{k: StochasticWindow(**v) if k == "window" else v for k, v in wrong.items()})
