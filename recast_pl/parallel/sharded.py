"""Tensors that FSDP2 has shared out over processes, and their whole values. Plain tensors pass through."""

from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole value; all processes must ask, for the parts are gathered."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def saved_copy(tensor: Tensor) -> Tensor:
    """A copy of the whole value on the CPU, for a checkpoint; on all processes but the first, nothing.

    Every process must ask, for the parts are gathered, but one writes: a node's processes would otherwise hold
    the whole state as often as there are devices.
    """
    value = whole(tensor).detach()
    first = not distributed.is_initialized() or distributed.get_rank() == 0
    return value.to("cpu", copy=True) if first else value.new_empty(0, device="cpu")


def whole_as(value: Tensor, like: Tensor) -> Tensor:
    """`value`, which every process has whole, shared out as `like` is."""
    value = value.to(like.device, like.dtype)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
