"""Two ways of computing the same numbers, up to float32 rounding, in less time: adapted layers and GELUs.

Which way is taken follows from shapes, dtypes and devices alone, never from the role that is in use or from
whether gradients are kept: roles of equal weights stay equal bit for bit.
"""

from collections.abc import Callable
from functools import partial
from math import pi, sqrt
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.nn.functional import gelu

SLOPE = 2 * sqrt(2 / pi)
CUBIC = 0.044715 * SLOPE


def use_lean_layers(denoiser: nn.Module) -> None:
    """Lets a diffusers model's LoRA layers and GELUs go by `adapted_linear` and `tanh_gelu`, where these pay.

    Names and weights stay what they are.
    """
    from diffusers.models.activations import GELU

    for module in denoiser.modules():
        if isinstance(module, Linear) and small(module):
            module.forward = partial(adapted_linear, module, module.forward)
        if isinstance(module, GELU) and module.approximate == "tanh":
            module.gelu = tanh_gelu


def small(layer: Linear) -> bool:
    """Whether adding the low-rank update to the weight takes no more arithmetic than passing tokens through it.

    The gradient of the sum W + s B A costs inputs × outputs for each token, that of the two factors and what
    passes through them 4 × rank × (inputs + outputs).
    """
    (rank,) = set(layer.r.values())
    return bool(layer.in_features * layer.out_features <= 4 * rank * (layer.in_features + layer.out_features))


class _AdaptedLinear(torch.autograd.Function):
    """y = x (W + s B A)ᵀ + b. With G = s Σ gᵀ x over tokens: dA = Bᵀ G, dB = G Aᵀ.

    The sum of weights is made again in the backward pass, so that nothing is kept but x and the factors.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, down, up)
        ctx.scale = scale
        return _by_sum(x, weight, bias, down, up, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, down, up = ctx.saved_tensors
        for_x = for_down = for_up = None
        if ctx.needs_input_grad[0]:
            for_x = gradient @ torch.addmm(weight, up, down, alpha=ctx.scale)
        if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
            for_sum = (gradient.flatten(0, -2).T @ x.flatten(0, -2)).mul_(ctx.scale)
            for_down, for_up = up.T @ for_sum, for_sum @ down.T
        return for_x, None, None, for_down, for_up, None


def _by_sum(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float) -> Tensor:
    combined, tokens = torch.addmm(weight, up, down, alpha=scale).T, x.flatten(0, -2)
    product = tokens @ combined if bias is None else torch.addmm(bias, tokens, combined)
    result: Tensor = product.unflatten(0, x.shape[:-1])
    return result


def adapted_linear(
    layer: Linear, forward: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """The layer's x (W + s B A)ᵀ + b in one product, in place of x Wᵀ + b + s (x Aᵀ) Bᵀ.

    The two differ by rounding. Only in float32: in half precision the sum would lose digits of the update.

    Args:
        layer: peft's, with one active adapter and without dropout.
        forward: its own way, for all that is not plain float32.
        x: [..., inputs].
        args: for `forward`.
        kwargs: for `forward`.

    Returns:
        [..., outputs].
    """
    base, (role, *others) = layer.base_layer, layer.active_adapters
    plain = x.dtype == base.weight.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type)
    if args or kwargs or others or layer.disable_adapters or layer.merged or not plain:
        return forward(x, *args, **kwargs)
    down, up = layer.lora_A[role].weight, layer.lora_B[role].weight
    way = _AdaptedLinear.apply if torch.is_grad_enabled() else _by_sum
    result: Tensor = way(x, base.weight, base.bias, down, up, layer.scaling[role])
    return result


class _GELU(torch.autograd.Function):
    """Forward by a sigmoid, backward torch's own; x alone is kept, as by torch's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _by_sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        slope: Tensor = torch.ops.aten.gelu_backward(gradient, x, approximate="tanh")
        return slope


def _by_sigmoid(x: Tensor) -> Tensor:
    return (x * x).mul_(CUBIC).add_(SLOPE).mul_(x).sigmoid_().mul_(x)


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form; by a sigmoid where x is plain float32 on a CPU, which takes long for a tanh.

    As ½ (1 + tanh z) = σ(2z), x ½ (1 + tanh(√(2/π) (x + c x³))) = x σ(x (a + a c x²)) with a = 2 √(2/π) and
    c = 0.044715.

    >>> x = torch.tensor([-1.0, 0.5, 3.0])
    >>> bool(torch.allclose(tanh_gelu(x), gelu(x, approximate="tanh")))
    True
    """
    if type(x) is not Tensor or x.dtype != torch.float32 or x.device.type != "cpu":
        return gelu(x, approximate="tanh")
    result: Tensor = _GELU.apply(x) if torch.is_grad_enabled() else _by_sigmoid(x)
    return result
