"""FSDP2 for weights that one device should not hold whole; the other strategies are Lightning's own."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from recast_pl.parallel.sharded import saved_copy, whole_as


class FullyShard(ModelParallelStrategy):
    """FSDP2: each process keeps a part of every weight, and has a block whole only while it computes with it.

    All processes roll out and train on their own samples, as under DDP. Checkpoints are one plain file with
    whole tensors, the same that a single process or DDP writes and reads.

    Args:
        shard_size: processes that share one copy of the weights. None: all. Fewer make the sharding hybrid:
            copies are kept by groups of so many neighbouring processes (a node's, say), and gradients averaged
            over groups. Must divide the number of processes.
        reshard_after_forward: frees a block's whole weights after its forward pass; False keeps them for the
            backward pass, which is faster and takes memory.
        process_group_backend: as of Lightning's strategies; None: nccl on GPUs, gloo on CPUs.
        timeout: after which a process that waits for another gives up.

    Reference: Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", 2023, in the
    per-parameter form of `torch.distributed.fsdp.fully_shard`.
    """

    def __init__(
        self,
        *,
        shard_size: int | None = None,
        reshard_after_forward: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        if shard_size is not None and shard_size < 1:
            raise ValueError(
                f"trainer.strategy.init_args.shard_size: expected 1 or more, or null for all processes, "
                f"got {shard_size}"
            )
        super().__init__(
            save_distributed_checkpoint=False, process_group_backend=process_group_backend, timeout=timeout
        )
        self.shard_size, self.reshard_after_forward = shard_size, reshard_after_forward

    def setup_environment(self) -> None:
        """Lays the processes out as copies × parts."""
        processes = self.num_nodes * self.num_processes
        parts = self.shard_size or processes
        if processes % parts:
            raise ValueError(
                f"trainer.strategy.init_args.shard_size: {parts} does not divide the {processes} processes"
            )
        # Lightning's second dimension holds neighbouring processes; nothing here is tensor-parallel
        self._data_parallel_size, self._tensor_parallel_size = processes // parts, parts
        super().setup_environment()

    @property
    def mesh(self) -> DeviceMesh:
        """Copies × parts, or parts alone where there is one copy."""
        mesh: DeviceMesh = self.device_mesh
        return mesh["tensor_parallel"] if mesh.size(0) == 1 else mesh

    def shard(self, module: nn.Module) -> None:
        """Shards the parameters of `module` that none of its parts has sharded yet."""
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=self.reshard_after_forward,
        )

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning hands the optimisers' states back, as to the strategies without sharding."""
        return True

    # ------------------------------------------------------------------ one plain file, whole tensors

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's own, which gathers; on every process."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimiser's own state with whole tensors on the CPU, for which every process must ask."""
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state = plain.state_dict()
        state["state"] = {
            index: {
                key: saved_copy(value) if isinstance(value, Tensor) else value for key, value in entry.items()
            }
            for index, entry in state["state"].items()
        }
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """As the strategies without sharding do."""
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """As the strategies without sharding do: every process reads the file, and keeps its parts."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Hands the state to the module, which shares it out."""
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Shares the optimisers' states out like the parameters that they belong to."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            shared = {
                index: {
                    key: whole_as(value, parameters[index])
                    if isinstance(value, Tensor) and value.shape == parameters[index].shape
                    else value
                    for key, value in entry.items()
                }
                for index, entry in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": shared})


def without_gradient_exchange(strategy: Strategy) -> AbstractContextManager[None]:
    """A context in which backward passes leave the gradients of processes apart, where a strategy can.

    DDP can, so that it exchanges an update's gradients once. FSDP2 frees whole gradients only by exchanging
    them, so there each backward pass does.
    """
    return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()
