"""Shapes, checked where tensors meet: a [N, 1] in the place of a [N] broadcasts in silence and changes a loss.

The suffix of an argument's name is its shape, as everywhere in this package.
"""

import re
from collections.abc import Iterator

from torch import Tensor

_AXES = re.compile(r"[A-Za-z]|\d")
_REST = "Z"  # any number of trailing dimensions: a latent's, C H W or C F H W


def check_shapes(**tensors: Tensor | None) -> None:
    """Refuses tensors whose shapes are not what their names say: one letter, one size, over all of them.

    Args:
        tensors: by name; the letters after the last underscore are the axes, a digit is a literal size, a final
            `Z` stands for all that follows (the same in all that end so). None is passed over.

    Raises:
        ValueError: naming the argument, what its name asks for and what came.

    >>> import torch
    >>> check_shapes(x_t_NZ=torch.zeros(4, 8, 2, 2), advantage_N=torch.zeros(4))
    >>> check_shapes(x_t_NZ=torch.zeros(4, 8, 2, 2), advantage_N=torch.zeros(4, 1))
    Traceback (most recent call last):
    ValueError: advantage_N: expected the shape [N=4], got [4, 1]
    """
    sizes: dict[str, int | tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        axes = _AXES.findall(name.rsplit("_", 1)[-1])
        open_ended = bool(axes) and axes[-1] == _REST
        plain = axes[:-1] if open_ended else axes
        shape = tuple(tensor.shape)
        fits = len(shape) >= len(plain) if open_ended else len(shape) == len(plain)
        for axis, size in zip(plain, shape, strict=False):
            fits &= (int(axis) if axis.isdigit() else sizes.setdefault(axis, size)) == size
        if open_ended and fits:
            fits = sizes.setdefault(_REST, shape[len(plain) :]) == shape[len(plain) :]
        if not fits:
            expected = ", ".join(_described(axes, sizes))
            raise ValueError(f"{name}: expected the shape [{expected}], got {list(shape)}")


def _described(axes: list[str], sizes: dict[str, int | tuple[int, ...]]) -> Iterator[str]:
    for axis in axes:
        known = sizes.get(axis)
        if isinstance(known, tuple):
            yield from map(str, known)
        elif axis == _REST:
            yield "…"
        else:
            yield axis if known is None else f"{axis}={known}"
