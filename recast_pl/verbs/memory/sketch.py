"""A policy without its weights: what it would take, counted on tensors that have a shape and no storage.

Only configuration files are read. The policy's own code then runs on such tensors, and every storage that it
would allocate or free is counted: bytes come from the operations that really run, not from a formula.

Shape suffixes: N rows of a batch, L tokens, D width, C H W latent.
"""

import json
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recast_pl.policy.sd3 import SD3Policy
from recast_pl.types import TextEmbeddings

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' elements.

    >>> stored_bytes([torch.zeros(3, 2), torch.zeros(4, dtype=torch.bfloat16)])
    32
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def module_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers."""
    return stored_bytes((*module.parameters(), *module.buffers()))


class LiveMemory(TorchDispatchMode):
    """Within the context, counts the bytes of storages that operations allocate, until they are freed.

    Storages that were there before do not count. `live` is what stands now, `peak` the most that ever stood.

    >>> with LiveMemory() as memory:
    ...     kept = torch.zeros(4) + torch.zeros(4)
    >>> memory.live, memory.peak
    (16, 48)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()  # storages seen and not freed, by their address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and looks at what came out of it."""
        if func is torch.ops.prim.device.default:  # what `tensor.device` asks, thousands of times
            return func(*args)
        for tensor in tree_leaves((args, kwargs)):
            self._see(tensor, counts=False)  # not made within the context: it would be known
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self._see(tensor, counts=True)
        return result

    def _see(self, tensor: object, *, counts: bool) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known:
            return
        size = storage.nbytes() if counts else 0
        self._known.add(address)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.live -= size


class Sketch:
    """A policy filled with modules of its configuration's shapes.

    Args:
        policy: a policy that is not loaded; it is filled, and is good for counting only.
        autocast: the dtype of mixed precision; None: off.
        gpu: whether autocast and the optimiser follow the rules of a GPU.
    """

    def __init__(self, policy: SD3Policy, *, autocast: torch.dtype | None = None, gpu: bool = True) -> None:
        self.policy, self.autocast, self.gpu = policy, autocast, gpu
        with torch.device("meta"):
            policy.adopt(_pipeline_of_shapes(policy), seed=0)
        self._mode = FakeTensorMode()
        with self._mode:  # these say "CPU" where meta tensors say "meta", so that autocast knows them
            for network in (policy.denoiser, policy.pipeline.vae):
                _replace_tensors(network)
            empty = self.text(1)  # which guidance asks for; there is no tokenizer here
            policy._text_cache[""] = (empty["sequence_BLD"][0], empty.pooled_BD[0])
        policy.adapters.follow(policy.denoiser)
        if gpu and autocast is not None:
            for module in policy.denoiser.modules():
                if isinstance(module, nn.LayerNorm):
                    module.register_forward_pre_hook(_in_float32)

    @contextmanager
    def running(self, *, autocast: bool = True) -> Iterator[LiveMemory]:
        """Within the context the policy's code can run; what is allocated is counted."""
        with ExitStack() as stack:
            stack.enter_context(self._mode)
            if autocast and self.autocast is not None:
                stack.enter_context(torch.autocast("cpu", self.autocast))
            yield stack.enter_context(LiveMemory())

    def latents(self, count: int) -> Tensor:
        """Latents of `count` samples, float32 as the rollout keeps them. Call within `running`."""
        return torch.empty(count, *self.policy.latent_shape)

    def text(self, count: int) -> TextEmbeddings:
        """Embeddings of `count` prompts. Call within `running`."""
        pipeline, dtype = self.policy.pipeline, self.policy.weights_dtype
        tokens = pipeline.tokenizer_max_length + self.policy.max_sequence_length
        config = pipeline.transformer.config
        return TextEmbeddings(
            sequence_BLD=torch.empty(count, tokens, config.joint_attention_dim, dtype=dtype),
            pooled_BD=torch.empty(count, config.pooled_projection_dim, dtype=dtype),
        )

    def rollout_peak(self, count: int) -> int:
        """The most that one step of `count` samples holds beside latents and text, the velocity included."""
        with self.running() as memory, torch.no_grad():
            x_NCHW, t_N, text = self.latents(count), torch.empty(count), self.text(count)
            before = memory.live
            with self.policy.using("old"):  # weights may come to the device for it
                self.policy.velocity(x_NCHW, t_N, text)
            return memory.peak - before

    def decode_peak(self, count: int) -> int:
        """The most that the VAE holds while it decodes `count` latents at once, their pictures included."""
        with self.running(autocast=False) as memory, torch.no_grad():
            x_NCHW = self.latents(count)
            before = memory.live
            decoded = self.policy.pipeline.vae.decode(x_NCHW / 1, return_dict=False)[0]
            (decoded / 2 + 0.5).clamp(0, 1)
            return memory.peak - before


def _pipeline_of_shapes(policy: SD3Policy) -> "StableDiffusion3Pipeline":
    """The pipeline's modules from their configuration files, in the dtypes that `SD3Policy.load` gives them."""
    import diffusers
    import transformers

    def part(kind: Any, folder: str) -> Any:
        return kind.from_config(kind.load_config(policy.source, subfolder=folder))

    def encoder(kind: Any, folder: str) -> nn.Module:
        config = kind.config_class.from_pretrained(policy.source, subfolder=folder)
        network: nn.Module = nn.Module.to(kind(config), policy.weights_dtype)
        if policy.weights_dtype == torch.float16:  # transformers leaves these in float32 then
            for name in kind._keep_in_fp32_modules or ():
                for path, module in network.named_modules():
                    if path.rsplit(".", 1)[-1] == name:
                        module.float()
        return network

    clip = transformers.CLIPTextModelWithProjection
    third = encoder(transformers.T5EncoderModel, "text_encoder_3") if policy.third_text_encoder else None
    transformer = part(diffusers.SD3Transformer2DModel, "transformer")
    pipeline = diffusers.StableDiffusion3Pipeline(
        # diffusers' own `to` warns of modules to be kept in float32, and of SD3's there are none
        transformer=nn.Module.to(transformer, policy.weights_dtype),
        vae=part(diffusers.AutoencoderKL, "vae"),
        scheduler=part(diffusers.FlowMatchEulerDiscreteScheduler, "scheduler"),
        text_encoder=encoder(clip, "text_encoder"),
        text_encoder_2=encoder(clip, "text_encoder_2"),
        text_encoder_3=third,
        tokenizer=None,
        tokenizer_2=None,
        tokenizer_3=None,
    )
    settings = Path(
        transformers.utils.cached_file(policy.source, "tokenizer_config.json", subfolder="tokenizer")
    )
    longest = pipeline.text_encoder.config.max_position_embeddings  # a tokenizer without a limit says 1e30
    pipeline.tokenizer_max_length = min(json.loads(settings.read_text())["model_max_length"], longest)
    return pipeline


def _in_float32(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A GPU's autocast computes layer norms in float32; a CPU's, under which the counting runs, does not."""
    return (inputs[0].float(), *inputs[1:])


def _replace_tensors(network: nn.Module) -> None:
    """Puts new tensors of the same shape and dtype in the place of a module's own, on the device in use."""
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = nn.Parameter(new, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
