"""Tensors that FSDP2 has shared out over processes, and their whole values. Plain tensors pass through."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole value; all processes must ask, for the parts are gathered."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def saved_copy(tensor: Tensor) -> Tensor:
    """A copy of the whole value on the CPU, for a checkpoint."""
    return whole(tensor).detach().to("cpu", copy=True)


def whole_as(value: Tensor, like: Tensor) -> Tensor:
    """`value`, which every process has whole, shared out as `like` is."""
    value = value.to(like.device, like.dtype)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
