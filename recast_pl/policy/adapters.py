"""LoRA adapters on one set of base weights: trained (`default`), `old`, and by option `averaged`.

peft's own switches also flip `requires_grad`; here that is an invariant instead: at any time exactly the
default adapter's parameters require a gradient, whatever is in use.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from recast_pl.parallel.sharded import saved_copy, whole, whole_as
from recast_pl.policy.base import Role


class Adapters:
    """Adds an adapter for each role to `denoiser` (a diffusers model) and switches between them.

    Args:
        denoiser: the model; its own parameters are frozen.
        rank: of the low-rank update.
        alpha: its scale is alpha / rank.
        targets: names of the linear layers, as peft matches them.
        seed: of the update's first factor (the second starts at 0, so all policies start equal).
        averaged: whether there is a third adapter, for the average of the trained one.

    Raises:
        ValueError: where no layer carries a name of `targets`.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        *,
        rank: int,
        alpha: float,
        targets: Sequence[str],
        seed: int,
        averaged: bool = False,
    ) -> None:
        denoiser.requires_grad_(False)
        config = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=list(targets), init_lora_weights="gaussian"
        )
        self._roles: tuple[Role, ...] = ("default", "old", "averaged") if averaged else ("default", "old")
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several are meant
            torch.manual_seed(seed)
            for role in self._roles:
                try:
                    denoiser.add_adapter(config, adapter_name=role)  # type: ignore[operator]
                except ValueError as error:
                    raise ValueError(f"model.policy.init_args.lora_targets: {error}") from error
        self._layers = [module for module in denoiser.modules() if isinstance(module, BaseTunerLayer)]
        own = dict(denoiser.named_parameters())
        self._names = [name for name in own if ".default." in name and "lora_" in name]
        for name in self._names:
            own[name].data = own[name].data.float()
            for role in self._roles[1:]:
                own[_of(role, name)].data = own[name].data.clone()
        self.follow(denoiser)

    def follow(self, denoiser: nn.Module) -> None:
        """Takes up the parameters that stand in `denoiser` by now, where something has replaced them."""
        own = dict(denoiser.named_parameters())
        self._sets = {role: [own[_of(role, name)] for name in self._names] for role in self._roles}
        self._use("default")

    @property
    def trained(self) -> list[nn.Parameter]:
        """The default adapter's parameters."""
        return self._sets["default"]

    @property
    def old(self) -> list[nn.Parameter]:
        """The old adapter's parameters, in the same order."""
        return self._sets["old"]

    @property
    def copies(self) -> list[nn.Parameter]:
        """Everything beside the trained parameters that a role needs."""
        return [parameter for role in self._roles[1:] for parameter in self._sets[role]]

    @contextmanager
    def using(self, role: Role) -> Iterator[None]:
        """Puts `role` in use; afterwards, also after an exception, `default` is."""
        self._use(role)
        try:
            yield
        finally:
            self._use("default")

    def _use(self, role: Role) -> None:
        if role != "reference" and role not in self._sets:
            raise ValueError(f"expected one of reference, {', '.join(self._roles)}, got the role {role!r}")
        for layer in self._layers:
            layer.enable_adapters(role != "reference")
            if role != "reference":
                layer.set_adapter(role)
        for owner, parameters in self._sets.items():
            for parameter in parameters:
                parameter.requires_grad_(owner == "default")

    @torch.no_grad()
    def trail(self, role: Role, decay: float) -> None:
        """θ_role ← decay · θ_role + (1 − decay) · θ, exact at 0 and 1."""
        torch._foreach_lerp_(
            [theirs.data for theirs in self._sets[role]], [trained.data for trained in self.trained], 1 - decay
        )

    @torch.no_grad()
    def distance(self) -> Tensor:
        """‖θ − θ_old‖₂; a scalar."""
        differences = torch._foreach_sub(
            [trained.data for trained in self.trained], [old.data for old in self.old]
        )
        return whole(torch.nn.utils.get_total_norm(differences))

    def state(self) -> dict[str, Tensor]:
        """Copies of all adapters' whole tensors on the CPU, by parameter name; on every process."""
        return {name: saved_copy(parameter) for name, parameter in self._by_name().items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Puts `state` back; see `Policy.load_saved_state`."""
        own = self._by_name()
        missing, foreign = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or foreign:
            raise ValueError(
                "the checkpoint's adapters are not this policy's (model.policy.init_args.lora_targets, or "
                "model.average where names say `averaged`): "
                f"it lacks {missing[:3] or 'nothing'} and holds {foreign[:3] or 'nothing'} beside"
            )
        for name, parameter in own.items():
            if state[name].shape != parameter.shape:
                raise ValueError(
                    f"the checkpoint's {name} has shape {tuple(state[name].shape)}, this policy's "
                    f"{tuple(parameter.shape)}: set model.policy.init_args.lora_rank to the checkpoint's"
                )
        for name, parameter in own.items():
            parameter.copy_(whole_as(state[name], parameter))

    def _by_name(self) -> dict[str, nn.Parameter]:
        return {
            _of(role, name): parameter
            for role, parameters in self._sets.items()
            for name, parameter in zip(self._names, parameters, strict=True)
        }


def _of(role: Role, name: str) -> str:
    """The name of a role's parameter, from the default adapter's."""
    return name.replace(".default.", f".{role}.")
