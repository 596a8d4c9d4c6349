"""Two LoRA adapters on one set of base weights: `default` (trained) and `old` (collects rollouts).

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

from recast_pl.policy.base import Role
from recast_pl.policy.sharded import saved_copy, whole, whole_as

TRAINED, OLD = "default", "old"


class AdapterPair:
    """Adds both adapters to `denoiser` (a diffusers model) and switches between them.

    Args:
        denoiser: the model; its own parameters are frozen.
        rank: of the low-rank update.
        alpha: its scale is alpha / rank.
        targets: names of the linear layers, as peft matches them.
        seed: of the update's first factor (the second starts at 0, so all policies start equal).

    Raises:
        ValueError: where no layer carries a name of `targets`.
    """

    def __init__(
        self, denoiser: nn.Module, *, rank: int, alpha: float, targets: Sequence[str], seed: int
    ) -> None:
        denoiser.requires_grad_(False)
        config = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=list(targets), init_lora_weights="gaussian"
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # two are meant
            torch.manual_seed(seed)
            for name in (TRAINED, OLD):
                try:
                    denoiser.add_adapter(config, adapter_name=name)  # type: ignore[operator]
                except ValueError as error:
                    raise ValueError(f"model.policy.init_args.lora_targets: {error}") from error
        self._layers = [module for module in denoiser.modules() if isinstance(module, BaseTunerLayer)]
        self._names: list[str] = []
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        own = dict(denoiser.named_parameters())
        for name, parameter in own.items():
            if f".{TRAINED}." in name and "lora_" in name:
                parameter.data = parameter.data.float()
                old = own[name.replace(f".{TRAINED}.", f".{OLD}.")]
                old.data = parameter.data.clone()
                self._names.append(name)
                self._pairs.append((parameter, old))
        self._use("default")

    def follow(self, denoiser: nn.Module) -> None:
        """Takes up the parameters that stand in `denoiser` by now, where something has replaced them."""
        own = dict(denoiser.named_parameters())
        self._pairs = [(own[name], own[name.replace(f".{TRAINED}.", f".{OLD}.")]) for name in self._names]
        self._use("default")

    @property
    def trained(self) -> list[nn.Parameter]:
        """The default adapter's parameters."""
        return [trained for trained, _ in self._pairs]

    @property
    def old(self) -> list[nn.Parameter]:
        """The old adapter's parameters, in the same order."""
        return [old for _, old in self._pairs]

    @property
    def copies(self) -> list[nn.Parameter]:
        """Everything beside the trained parameters that a role needs."""
        return self.old

    @contextmanager
    def using(self, role: Role) -> Iterator[None]:
        """Puts `role` in use; afterwards, also after an exception, `default` is."""
        self._use(role)
        try:
            yield
        finally:
            self._use("default")

    def _use(self, role: Role) -> None:
        for layer in self._layers:
            layer.enable_adapters(role != "reference")
            if role != "reference":
                layer.set_adapter(OLD if role == "old" else TRAINED)
        for trained, old in self._pairs:
            trained.requires_grad_(True)
            old.requires_grad_(False)

    @torch.no_grad()
    def update_old(self, decay: float) -> None:
        """θ_old ← decay · θ_old + (1 − decay) · θ, exact at 0 and 1."""
        torch._foreach_lerp_(
            [old.data for old in self.old], [trained.data for trained in self.trained], 1 - decay
        )

    @torch.no_grad()
    def distance(self) -> Tensor:
        """‖θ − θ_old‖₂; a scalar."""
        differences = torch._foreach_sub(
            [trained.data for trained in self.trained], [old.data for old in self.old]
        )
        return whole(torch.nn.utils.get_total_norm(differences))

    def state(self) -> dict[str, Tensor]:
        """Copies of both adapters' whole tensors on the CPU, by parameter name; on every process."""
        saved = {}
        for name, (trained, old) in zip(self._names, self._pairs, strict=True):
            saved[name] = saved_copy(trained)
            saved[name.replace(f".{TRAINED}.", f".{OLD}.")] = saved_copy(old)
        return saved

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Puts `state` back; see `Policy.load_saved_state`."""
        own = {*self._names, *(name.replace(f".{TRAINED}.", f".{OLD}.") for name in self._names)}
        missing, foreign = sorted(own - state.keys()), sorted(state.keys() - own)
        if missing or foreign:
            raise ValueError(
                "the checkpoint's adapters are not this policy's (model.policy.init_args.lora_targets): "
                f"it lacks {missing[:3] or 'nothing'} and holds {foreign[:3] or 'nothing'} beside"
            )
        for name, (trained, old) in zip(self._names, self._pairs, strict=True):
            if state[name].shape != trained.shape:
                raise ValueError(
                    f"the checkpoint's {name} has shape {tuple(state[name].shape)}, this policy's "
                    f"{tuple(trained.shape)}: set model.policy.init_args.lora_rank to the checkpoint's"
                )
            trained.copy_(whole_as(state[name], trained))
            old.copy_(whole_as(state[name.replace(f".{TRAINED}.", f".{OLD}.")], old))
