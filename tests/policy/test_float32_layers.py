"""The faster ways through adapted layers and GELUs, against peft's and torch's own."""

import pytest
import torch
from conftest import prompt_batch
from peft.tuners.lora.layer import Linear
from torch.nn.functional import gelu

from recast_pl.policy import SD3Policy
from recast_pl.policy.float32_layers import adapted_linear, small, tanh_gelu


def layers_of(policy):
    return [module for module in policy.denoiser.modules() if isinstance(module, Linear)]


def work(policy):
    """Velocities of old and default, and the gradients of a loss on the latter."""
    text = policy.text(prompt_batch(["a cat", "a dog"]).texts)
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(1))
    t = torch.tensor([0.3, 0.8])
    with torch.no_grad(), policy.using("old"):
        old = policy.velocity(x, t, text)
    current = policy.velocity(x, t, text)
    (current - x).square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return old, current.detach(), gradients


def plain(policy):
    """Takes the faster ways away again: what is left is peft's and diffusers' own code."""
    removed = 0
    for module in policy.denoiser.modules():
        removed += (module.__dict__.pop("forward", None) is not None) and isinstance(module, Linear)
        module.__dict__.pop("gelu", None)
    return removed


def test_velocities_and_gradients_are_as_near_to_the_truth_as_peft_s(disturbed):
    """Two orders of float32 sums cannot agree to the last digit; float64 says what either is off by."""
    ours = work(disturbed)
    assert plain(disturbed) == len(layers_of(disturbed)) > 0  # they all were in use
    theirs = work(disturbed)
    disturbed.double()
    truth = work(disturbed)
    assert ours[2].keys() == theirs[2].keys() == truth[2].keys()
    as_one = [torch.cat([gradient.flatten() for gradient in one[2].values()]) for one in (ours, theirs, truth)]
    for mine, peft_s, exact in zip([*ours[:2], as_one[0]], [*theirs[:2], as_one[1]], [*truth[:2], as_one[2]],
                                   strict=True):  # fmt: skip
        assert not torch.equal(mine, peft_s)
        rounding = (peft_s - exact).square().mean().sqrt()  # single largest ones differ by chance and by CPU
        assert rounding > 0
        assert (mine - exact).square().mean().sqrt() <= 6 * rounding  # measured: 1.2 to 3.5, by CPU
        torch.testing.assert_close(mine, exact.float(), atol=3e-5 * float(exact.abs().max()), rtol=0)


def test_equal_roles_are_equal_bit_for_bit_with_and_without_gradients(disturbed):
    disturbed.update_old(0.0)
    old, current, _ = work(disturbed)
    assert torch.equal(old, current)


def test_derivatives_of_an_adapted_layer_in_float64():
    # the formulas themselves: finite differences need float64, which the layer leaves to peft
    from recast_pl.policy.float32_layers import _AdaptedLinear

    torch.manual_seed(0)
    x, down, up = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (2, 4), (5, 2))
    )
    weight, bias = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)

    def layer(x, down, up):
        return _AdaptedLinear.apply(x, weight, bias, down, up, 0.5)

    assert torch.autograd.gradcheck(layer, (x, down, up))
    expected = x @ (weight + 0.5 * up @ down).T + bias
    torch.testing.assert_close(layer(x, down, up), expected)


@pytest.mark.parametrize("bias", [True, False])
def test_inputs_with_gaps_between_rows(bias):
    base = torch.nn.Linear(6, 4, bias=bias)
    from peft import LoraConfig

    layer = Linear(base, "default", LoraConfig(), r=2, lora_alpha=4)
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    x = torch.randn(3, 9, 6)[:, 2:7]
    torch.testing.assert_close(adapted_linear(layer, layer.forward, x), layer(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("width", "rank", "expected"), [(128, 16, True), (128, 15, False), (1536, 32, False)])
def test_which_layers_are_small(width, rank, expected):
    from peft import LoraConfig

    with torch.device("meta"):
        layer = Linear(torch.nn.Linear(width, width), "default", LoraConfig(), r=rank, lora_alpha=1)
    assert small(layer) is expected


def test_half_precision_and_autocast_go_peft_s_way(pipeline_folder):
    velocities = []
    for way in (lambda policy: 0, plain):
        policy = SD3Policy(
            pretrained=str(pipeline_folder), lora_rank=4, max_sequence_length=1, weights_dtype="bfloat16"
        )
        policy.load(seed=0)
        way(policy)
        velocities.append(work(policy)[1])
    assert torch.equal(*velocities)
    velocities = []
    for way in (lambda policy: 0, plain):
        policy = SD3Policy(pretrained=str(pipeline_folder), lora_rank=4, max_sequence_length=1)
        policy.load(seed=0)
        way(policy)
        with torch.autocast("cpu", torch.bfloat16):
            velocities.append(work(policy)[1])
    assert torch.equal(*velocities)


def test_gelu_and_its_derivative():
    x = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([0.0, -100.0, 100.0])]).requires_grad_()
    ours, theirs = tanh_gelu(x), gelu(x, approximate="tanh")
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    assert torch.equal(ours, tanh_gelu(x.detach()))
    (one,), (other,) = (torch.autograd.grad(y.sum(), x) for y in (ours, theirs))
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    half = x.detach().bfloat16()
    assert torch.equal(tanh_gelu(half), gelu(half, approximate="tanh"))
