"""What several processes of one run tell each other; with a single process nothing is sent.

Shape suffixes: P processes.
"""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, distributed


def several() -> bool:
    """Whether this process is one of several."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def warn(message: str) -> None:
    """A warning, on the first process alone."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0:
        warnings.warn(message, stacklevel=3)


def gathered(tensor: Tensor) -> Tensor:
    """All processes' tensors, which must have the same shape, in the order of their ranks: [P, *shape]."""
    if not several():
        return tensor[None]
    parts = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)


def summed(tensor: Tensor) -> Tensor:
    """The sum of all processes' tensors, the same bits on each."""
    if not several():
        return tensor
    total = tensor.clone()
    distributed.all_reduce(total)
    return total


def averaged(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The means over processes of scalars by name; the names must be the same everywhere."""
    if not several():
        return dict(values)
    names = list(values)
    means = summed(torch.stack([values[name].float() for name in names])) / distributed.get_world_size()
    return dict(zip(names, means.unbind(), strict=True))
