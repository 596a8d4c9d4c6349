import math
from dataclasses import replace

import pytest
import torch

from recast_pl.objectives import DiffusionNFT, diffusion_nft_terms
from recast_pl.types import NoisedSamples, Velocities


def tensors(case):
    def get(name):
        return torch.tensor(case[name], dtype=torch.float64)

    velocities = Velocities(
        current_NCHW=get("velocity").requires_grad_(),
        old_NCHW=get("velocity_old"),
        reference_NCHW=get("velocity_reference"),
    )
    samples = NoisedSamples(
        x0_NCHW=get("x0"), noise_NCHW=get("noise"), t_N=get("t"), advantage_N=get("advantages")
    )
    return velocities, samples


def objective(case):
    return DiffusionNFT(
        beta=case["beta"],
        advantage_clip=case["advantage_clip"],
        reference_coefficient=case["reference_coefficient"],
    )


@pytest.mark.parametrize("number", [0, 1, 2])
def test_golden_loss_and_gradient(objective_golden, number):
    case = objective_golden["diffusion_nft"][number]
    velocities, samples = tensors(case)
    loss = objective(case).loss(velocities, samples)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(case["loss"], abs=1e-9)
    assert loss.parts["policy"].item() == pytest.approx(case["policy_loss"], abs=1e-9)
    assert loss.parts["distance_to_reference"].item() == pytest.approx(case["reference_loss"], abs=1e-9)
    expected = torch.tensor(case["grad_velocity"], dtype=torch.float64)
    torch.testing.assert_close(velocities.current_NCHW.grad, expected, atol=1e-9, rtol=0)


def one_number(*, current, old, x0, noise, t, advantage):
    def cell(value):
        return torch.full((1, 1, 1, 1), value, dtype=torch.float64)

    return (
        Velocities(current_NCHW=cell(current), old_NCHW=cell(old), reference_NCHW=None),
        NoisedSamples(
            x0_NCHW=cell(x0),
            noise_NCHW=cell(noise),
            t_N=torch.tensor([t], dtype=torch.float64),
            advantage_N=torch.tensor([advantage], dtype=torch.float64),
        ),
    )


def test_by_hand():
    # x_t = .5·1 + .5·3 = 2; v+ = .5·1 + .5·2 = 1.5, v− = 1.5·1 − .5·2 = .5; x̂0: 1.25 and 1.75;
    # errors .25 and .75, each squared over itself; r = ½ + ½·(2/4) = .75; × A_max/β = 4/.5 = 8
    velocities, samples = one_number(current=2.0, old=1.0, x0=1.0, noise=3.0, t=0.5, advantage=2.0)
    terms = diffusion_nft_terms(velocities, samples, beta=0.5, advantage_clip=4.0)
    assert terms.policy_N.item() == pytest.approx(8 * (0.75 * 0.25 + 0.25 * 0.75))
    assert terms.old_N.item() == pytest.approx(1.0)


def test_gradcheck_without_the_adaptive_weights_moving(objective_golden):
    """The weights are detached, so only their product with a fixed weight is differentiable: check that."""
    case = objective_golden["diffusion_nft"][1]
    velocities, samples = tensors(case)
    current = velocities.current_NCHW
    loss = objective(case).loss(velocities, samples).total
    (gradient,) = torch.autograd.grad(loss, current)

    beta, clip = case["beta"], case["advantage_clip"]
    t = samples.t_N[:, None, None, None]
    x_t = (1 - t) * samples.x0_NCHW + t * samples.noise_NCHW
    r_N = 0.5 + 0.5 * (samples.advantage_N / clip).clamp(-1, 1)

    def estimate(v, sign):
        mixed = (1 - sign * beta) * velocities.old_NCHW + sign * beta * v
        return x_t - t * mixed - samples.x0_NCHW

    frozen = {s: estimate(current.detach(), s).abs().mean((1, 2, 3)) for s in (1, -1)}

    def plain(v):
        positive = estimate(v, 1).square().mean((1, 2, 3)) / frozen[1]
        negative = estimate(v, -1).square().mean((1, 2, 3)) / frozen[-1]
        policy = (r_N * positive + (1 - r_N) * negative).mean() * clip / beta
        return policy + case["reference_coefficient"] * (v - velocities.reference_NCHW).square().mean()

    assert torch.autograd.gradcheck(plain, (current,))
    (expected,) = torch.autograd.grad(plain(current), current)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-10)


def test_permuting_pairs_permutes_terms(objective_golden):
    velocities, samples = tensors(objective_golden["diffusion_nft"][1])
    order = torch.tensor([2, 0, 3, 1])
    shuffled_v = Velocities(
        **{n: getattr(velocities, n)[order] for n in ("current_NCHW", "old_NCHW", "reference_NCHW")}
    )
    shuffled_s = NoisedSamples(
        **{n: getattr(samples, n)[order] for n in ("x0_NCHW", "noise_NCHW", "t_N", "advantage_N")}
    )
    straight = diffusion_nft_terms(velocities, samples, beta=0.1, advantage_clip=5.0)
    shuffled = diffusion_nft_terms(shuffled_v, shuffled_s, beta=0.1, advantage_clip=5.0)
    assert torch.equal(straight.policy_N[order], shuffled.policy_N)


def test_advantage_beyond_the_clip_changes_nothing():
    velocities, samples = one_number(current=2.0, old=1.0, x0=1.0, noise=3.0, t=0.5, advantage=5.0)
    far = replace(samples, advantage_N=samples.advantage_N * 100)
    at, beyond = (
        diffusion_nft_terms(velocities, s, beta=0.1, advantage_clip=5.0).policy_N for s in (samples, far)
    )
    assert torch.equal(at, beyond)


def test_reference_is_not_asked_for_at_coefficient_zero():
    assert not DiffusionNFT(reference_coefficient=0.0).needs_reference
    assert DiffusionNFT(reference_coefficient=1e-4).needs_reference


@pytest.mark.parametrize(
    ("wrong", "key"),
    [({"beta": 0.0}, "beta"), ({"advantage_clip": -1.0}, "advantage_clip"),
     ({"reference_coefficient": -1.0}, "reference_coefficient"), ({"beta": math.nan}, "beta")],
)  # fmt: skip
def test_wrong_coefficients_name_their_key(wrong, key):
    with pytest.raises(ValueError, match=f"model.objective.init_args.{key}"):
        DiffusionNFT(**wrong)
