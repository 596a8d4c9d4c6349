"""Full fine-tuning: the denoiser's own weights are trained, and `old` and `reference` are copies of them.

What is in use is a matter of which tensors stand in the modules. Two ways lead there:

- Plain parameters are exchanged by reference, as `torch.func.functional_call` does for one call: a role's
  tensors take the parameters' place in their modules. The trained parameters stay objects of their own, so a
  graph that waits for its backward pass keeps what it has seen; and autocast, which keeps half-precision copies
  of leaves that require a gradient, keeps none of another role's weights.
- Parameters that `fully_shard` has taken over (DTensors) are exchanged by value, one after another: FSDP2
  gathers from storages of its own and would not see other tensors. Modules whose gathered weights still stand
  are resharded, and autocast's copies are dropped, for the gathered tensors are the same objects for all roles.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from recast_pl.parallel.sharded import saved_copy, whole, whole_as
from recast_pl.policy.base import Role

KEY = "model.policy.init_args.full_fine_tuning"


@dataclass(frozen=True, kw_only=True)
class FullFineTuning:
    """Which of the denoiser's own weights are trained, and where their copies wait.

    Args:
        modules: names of modules whose weights are trained, the rest stays frozen; a name means every module
            that has it as the end of its path, and `*` stands for anything: `attn`, `transformer_blocks.1*`.
            None: all.
        keep_copies: `device` keeps the old and the reference weights beside the trained ones, which takes three
            times their float32 size; `cpu` keeps them off the device, and each visits it while it is in use.
    """

    modules: list[str] | None = None
    keep_copies: Literal["device", "cpu"] = "device"

    def __post_init__(self) -> None:
        if self.modules is not None and not self.modules:
            raise ValueError(f"{KEY}.modules: expected at least one name, or null for all, got []")


class FullWeights:
    """Trains weights of `denoiser` in float32 and keeps an old and a reference copy of them.

    Same contract as `Adapters`. At any time exactly the trained parameters require a gradient.

    Memory: with P for the trained weights in float32, the copies take 2 P beside them, AdamW 2 P and gradients
    P. With `keep_copies: cpu` the copies leave the device, and P more is there while one of them is in use.
    (Sharded: a share of each, and one parameter more during an exchange.)

    Time of entering and leaving `using("old")`, for the 2.3 M parameters in 138 tensors of the embedded
    pipeline's denoiser on one core, where a forward pass of one sample takes 17 ms: by reference 0.12 ms (by
    swapping `data` 0.6 ms, by `functional_call` 0.7 ms, two LoRA adapters 3.9 ms), with copies that visit from
    the CPU 2.6 ms, by value 9.9 ms.

    Args:
        denoiser: the model; what is not trained of it is frozen.
        modules: see `FullFineTuning`.
        keep_copies: see `FullFineTuning`.
        averaged: whether a third copy is kept, for the average of the trained weights.

    Raises:
        ValueError: where a name of `modules` fits no module.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        *,
        modules: Sequence[str] | None = None,
        keep_copies: Literal["device", "cpu"] = "device",
        averaged: bool = False,
    ) -> None:
        self.keep_copies = keep_copies
        roles: tuple[Role, ...] = ("old", "averaged", "reference") if averaged else ("old", "reference")
        self._names = trained_names(denoiser, modules)
        denoiser.requires_grad_(False)
        own = dict(denoiser.named_parameters())
        for name in self._names:
            own[name].data = own[name].data.float()
        self._in_use: Role = "default"
        self._copies = {role: [self._kept(own[name]) for name in self._names] for role in roles}
        self.follow(denoiser)

    def follow(self, denoiser: nn.Module) -> None:
        """Takes up the parameters that stand in `denoiser` by now, where something has replaced them.

        Copies keep their values and become sharded where the parameters are. (Copies without values, of a model
        that had none yet, take the parameters'.)
        """
        assert self._in_use == "default"
        own = dict(denoiser.named_parameters())
        self._parameters = [own[name] for name in self._names]
        for parameter in self._parameters:
            parameter.requires_grad_(True)
        for copies in self._copies.values():
            for index, (parameter, copy) in enumerate(zip(self._parameters, copies, strict=True)):
                if copy.is_meta and not parameter.is_meta:
                    copies[index] = self._kept(parameter)
                elif isinstance(parameter, DTensor) and not isinstance(copy, DTensor):
                    copies[index] = self._kept(whole_as(copy, parameter))
        number = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._places = [
            (module, key, number[id(parameter)])
            for module in denoiser.modules()
            for key, parameter in module._parameters.items()
            if id(parameter) in number
        ]
        self._sharded = [module for module in denoiser.modules() if isinstance(module, FSDPModule)]

    @property
    def trained(self) -> list[nn.Parameter]:
        """The trained parameters, float32."""
        return self._parameters

    @property
    def old(self) -> list[Tensor]:
        """The old weights, in the same order."""
        return self._beside("old")

    @property
    def reference(self) -> list[Tensor]:
        """The base model's weights, in the same order."""
        return self._beside("reference")

    @property
    def copies(self) -> list[Tensor]:
        """Everything beside the trained parameters that a role needs."""
        return [copy for role in self._copies for copy in self._beside(role)]

    @contextmanager
    def using(self, role: Role) -> Iterator[None]:
        """Puts `role` in use; afterwards, also after an exception, what was in use before is.

        Within the context of a copy, what the denoiser computes has no gradient to the trained weights.
        """
        before = self._in_use
        self._use(role)
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not (self._sharded and role != "default")):
                yield
        finally:
            self._use(before)

    def _use(self, role: Role) -> None:
        if role not in ("default", *self._copies):
            raise ValueError(f"expected one of default, {', '.join(self._copies)}, got the role {role!r}")
        if role == self._in_use:
            return
        if self._sharded:
            for other in (self._in_use, role):  # first home, then out
                if other != "default":
                    self._exchange(self._copies[other])
            for gathered in self._sharded:
                gathered.reshard()
            torch.clear_autocast_cache()
        else:
            tensors = self._parameters if role == "default" else self._visiting(role)
            for module, key, index in self._places:
                module._parameters[key] = tensors[index]  # type: ignore[assignment]  # copies need no wrapper
        self._in_use = role

    @torch.no_grad()
    def _exchange(self, copies: list[Tensor]) -> None:
        """Swaps the values of parameters and copies; `data` leaves the version counters of graphs alone."""
        for parameter, copy in zip(self._parameters, copies, strict=True):
            held = parameter.data.clone()
            parameter.data.copy_(copy)
            copy.copy_(held)

    def _visiting(self, role: Role) -> list[Tensor]:
        """The role's weights on the parameters' device."""
        copies = self._beside(role)
        if self.keep_copies == "cpu":
            return [
                copy.to(parameter.device, copy=True)
                for copy, parameter in zip(copies, self._parameters, strict=True)
            ]
        return copies

    def _beside(self, role: Role) -> list[Tensor]:
        """The role's copies, moved once to where the parameters have been moved to."""
        copies = self._copies[role]
        if self.keep_copies == "device":
            for index, parameter in enumerate(self._parameters):
                if copies[index].device != parameter.device:
                    copies[index] = copies[index].to(parameter.device)
        return copies

    def _kept(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, where copies are kept."""
        if self.keep_copies == "cpu" and not tensor.is_meta:
            return tensor.detach().to("cpu", copy=True)
        return tensor.detach().clone()

    @torch.no_grad()
    def trail(self, role: Role, decay: float) -> None:
        """θ_role ← decay · θ_role + (1 − decay) · θ, exact at 0 and 1."""
        assert self._in_use == "default"
        copies = self._beside(role)
        if self.keep_copies == "device":
            torch._foreach_lerp_(copies, [parameter.data for parameter in self._parameters], 1 - decay)
        else:
            for copy, parameter in zip(copies, self._parameters, strict=True):
                copy.lerp_(parameter.data.to(copy.device), 1 - decay)

    @torch.no_grad()
    def distance(self) -> Tensor:
        """‖θ − θ_old‖₂; a scalar."""
        assert self._in_use == "default"
        squares = [
            whole((parameter.data - old.to(parameter.device)).square().sum())
            for parameter, old in zip(self._parameters, self.old, strict=True)
        ]
        return torch.stack(squares).sum().sqrt()

    def state(self) -> dict[str, Tensor]:
        """Whole copies on the CPU of the trained weights and those that trail them, by role and parameter name.

        The base model's are not in it. Every process must ask; see `saved_copy`.
        """
        assert self._in_use == "default"
        return {name: saved_copy(tensor) for name, tensor in self._by_name().items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Puts `state` back; see `Policy.load_saved_state`."""
        assert self._in_use == "default"
        own = self._by_name()
        missing, foreign = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or foreign:
            raise ValueError(
                f"the checkpoint's weights are not those that this policy trains ({KEY}, or model.average "
                f"where names say `averaged`): it lacks {missing[:3] or 'nothing'} and holds "
                f"{foreign[:3] or 'nothing'} beside"
            )
        for name, tensor in own.items():
            if state[name].shape != tensor.shape:
                raise ValueError(
                    f"the checkpoint's {name} has shape {tuple(state[name].shape)}, this policy's "
                    f"{tuple(tensor.shape)}: it is of another model than model.policy.init_args.pretrained"
                )
        for name, tensor in own.items():
            tensor.data.copy_(whole_as(state[name], tensor))

    def _by_name(self) -> dict[str, Tensor]:
        saved: dict[Role, Sequence[Tensor]] = {"default": self._parameters}
        saved |= {role: self._beside(role) for role in self._copies if role != "reference"}
        return {
            f"{role}.{name}": tensor
            for role, tensors in saved.items()
            for name, tensor in zip(self._names, tensors, strict=True)
        }


def trained_names(denoiser: nn.Module, modules: Sequence[str] | None) -> list[str]:
    """Names of the parameters that `modules` means; see `FullFineTuning`.

    >>> trained_names(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1, bias=False)), ["2"])
    ['2.weight']
    """
    names = [name for name, parameter in denoiser.named_parameters() if parameter.is_floating_point()]
    if modules is None:
        return names
    chosen: set[str] = set()
    for pattern in modules:
        inside = [
            f"{path}."
            for path, _ in denoiser.named_modules()
            if fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")
        ]
        found = {name for name in names if name.startswith(tuple(inside))}
        if not found:
            raise ValueError(f"{KEY}.modules: no weights stand in a module named {pattern!r}")
        chosen |= found
    return [name for name in names if name in chosen]
