"""Stable Diffusion 3 pipelines (SD3.5-Medium, or any folder of the same layout) as a policy."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from recast_pl.assets import resolve
from recast_pl.policy.base import Policy, Role
from recast_pl.policy.full_parameters import FullFineTuning, FullWeights
from recast_pl.types import TextEmbeddings

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline

    from recast_pl.policy.adapters import Adapters

ATTENTION_PROJECTIONS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)


class SD3Policy(Policy):
    """A `StableDiffusion3Pipeline` with two LoRA adapters on its denoiser, or with all its weights trained.

    Text encoders and VAE are frozen and stand outside the module tree: they reach neither checkpoints nor
    gradients nor sharding.

    Args:
        pretrained: a folder in diffusers' layout, a hub id, or `recast_pl://tiny` for the embedded pipeline.
        lora_rank: rank of the adapters.
        lora_alpha: their scale is lora_alpha / lora_rank; None is twice the rank.
        lora_targets: linear layers of the denoiser that are adapted.
        full_fine_tuning: train the denoiser's own weights, and leave the three `lora_` settings unused; None:
            train adapters.
        third_text_encoder: load the T5 too; without it the pipeline puts zeros in its place.
        max_sequence_length: tokens in the T5's place, 1 to 512.
        resolution: height and width of the pictures in pixels; None is the pipeline's own.
        weights_dtype: of frozen weights of denoiser and text encoders; all that is trained, and the VAE, is
            float32.
        gradient_checkpointing: recompute activations in the backward pass.
        compile: a backend of `torch.compile` for each of the denoiser's blocks, such as `inductor` (fused), or
            `cudagraphs` (replayed as they are); None: not compiled. The first iterations are slow: every role,
            with and without gradients, is compiled for itself.
        offload_text_encoders: text encoders wait on the CPU and visit the device for new prompts only.
        offload_vae: the VAE waits on the CPU and visits the device to decode.
        text_cache_size: prompts whose embeddings are kept.
    """

    def __init__(
        self,
        *,
        pretrained: str,
        lora_rank: int = 32,
        lora_alpha: float | None = None,
        lora_targets: Sequence[str] = ATTENTION_PROJECTIONS,
        full_fine_tuning: FullFineTuning | None = None,
        third_text_encoder: bool = False,
        max_sequence_length: int = 128,
        resolution: int | None = None,
        weights_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        gradient_checkpointing: bool = False,
        compile: str | None = None,
        offload_text_encoders: bool = False,
        offload_vae: bool = False,
        text_cache_size: int = 2048,
    ) -> None:
        super().__init__()
        for name, value, low in (
            ("lora_rank", lora_rank, 1),
            ("max_sequence_length", max_sequence_length, 1),
            ("text_cache_size", text_cache_size, 1),
        ):
            if value < low:
                raise ValueError(f"model.policy.init_args.{name}: expected {low} or more, got {value}")
        if max_sequence_length > 512:
            raise ValueError(
                "model.policy.init_args.max_sequence_length: SD3's T5 reads at most 512 tokens, "
                f"got {max_sequence_length}"
            )
        self.source = resolve(pretrained, key="model.policy.init_args.pretrained")
        self.lora_rank = lora_rank
        self.lora_alpha = 2.0 * lora_rank if lora_alpha is None else lora_alpha
        self.lora_targets = tuple(lora_targets)
        self.full_fine_tuning = full_fine_tuning
        self.third_text_encoder = third_text_encoder
        self.max_sequence_length = max_sequence_length
        self.resolution = resolution
        self.weights_dtype: torch.dtype = getattr(torch, weights_dtype)
        self.gradient_checkpointing, self.compile_backend = gradient_checkpointing, compile
        self.offload_text_encoders, self.offload_vae = offload_text_encoders, offload_vae
        self.text_cache_size = text_cache_size
        self._pipeline: StableDiffusion3Pipeline | None = None
        self._adapters: Adapters | FullWeights | None = None
        self._sharded = False
        self._text_cache: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()

    def load(self, *, seed: int) -> None:
        """Loads the pipeline by diffusers' own `from_pretrained` and adds what is trained."""
        if self._pipeline is not None:
            return
        from diffusers import StableDiffusion3Pipeline

        absent = {} if self.third_text_encoder else {"text_encoder_3": None, "tokenizer_3": None}
        pipeline = StableDiffusion3Pipeline.from_pretrained(
            self.source, dtype={"default": self.weights_dtype, "vae": torch.float32}, **absent
        )
        self.adopt(pipeline, seed=seed)

    def adopt(self, pipeline: "StableDiffusion3Pipeline", *, seed: int) -> None:
        """Takes a pipeline as its own: freezes it and adds what is trained; adapters are drawn by `seed`."""
        from recast_pl.policy.float32_layers import use_lean_layers

        pipeline.set_progress_bar_config(disable=True)
        for frozen in (pipeline.vae, *self._encoders_of(pipeline)):
            frozen.eval().requires_grad_(False)
        factor = pipeline.vae_scale_factor * pipeline.transformer.config.patch_size
        if self.resolution is not None and self.resolution % factor:
            raise ValueError(
                f"model.policy.init_args.resolution: expected a multiple of {factor} "
                f"(VAE factor × patch size), got {self.resolution}"
            )
        self.denoiser = pipeline.transformer.eval()
        if self.gradient_checkpointing:
            self.denoiser.enable_gradient_checkpointing()
        self._adapters = self._trained_weights(seed)
        use_lean_layers(self.denoiser)
        if self.compile_backend is not None:
            self._compile(self.compile_backend)
        self._pipeline = pipeline

    def _compile(self, backend: str) -> None:
        """Block by block: they share one compilation, and FSDP2 needs its seams between them."""
        known = torch.compiler.list_backends(exclude_tags=None)
        if backend not in known:
            raise ValueError(
                f"model.policy.init_args.compile: expected one of {', '.join(known)}, or null, got {backend!r}"
            )
        # roles × with and without gradients × batch sizes, all of one block's code; beyond this limit dynamo
        # would go on uncompiled without a word
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for block in self.denoiser.transformer_blocks:
            block.compile(backend=backend)

    def _trained_weights(self, seed: int) -> "Adapters | FullWeights":
        full = self.full_fine_tuning
        if full is not None:
            return FullWeights(
                self.denoiser, modules=full.modules, keep_copies=full.keep_copies, averaged=self.averaged
            )
        from recast_pl.policy.adapters import Adapters

        return Adapters(
            self.denoiser,
            rank=self.lora_rank,
            alpha=self.lora_alpha,
            targets=self.lora_targets,
            seed=seed,
            averaged=self.averaged,
        )

    def shard(self, shard: Callable[[nn.Module], None]) -> None:
        """Block by block, then what is left of the denoiser; adapters go with the layers they belong to."""
        if self._sharded:
            return
        for block in self.denoiser.transformer_blocks:
            shard(block)
        shard(self.denoiser)
        self.adapters.follow(self.denoiser)
        self._sharded = True

    @property
    def pipeline(self) -> "StableDiffusion3Pipeline":
        """The plain diffusers pipeline; its transformer is this policy's denoiser."""
        if self._pipeline is None:
            raise RuntimeError("the policy's weights are not loaded yet: call load()")
        return self._pipeline

    @property
    def adapters(self) -> "Adapters | FullWeights":
        """The trained and the old adapter, or the trained weights and their copies."""
        if self._adapters is None:
            raise RuntimeError("the policy's weights are not loaded yet: call load()")
        return self._adapters

    @property
    def text_encoders(self) -> list[nn.Module]:
        """The encoders that are loaded."""
        return self._encoders_of(self.pipeline)

    @property
    def device(self) -> torch.device:
        """Where the denoiser is."""
        device: torch.device = next(self.denoiser.parameters()).device
        return device

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """C, H, W of one latent."""
        config = self.pipeline.transformer.config
        side = (
            config.sample_size if self.resolution is None else self.resolution // self.pipeline.vae_scale_factor
        )
        return (config.in_channels, side, side)

    def levels(self, num_steps: int) -> Tensor:
        """The scheduler's own sigmas, from a fresh copy of it (the pipeline's keeps its state)."""
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        keywords = {}
        if scheduler.config.get("use_dynamic_shifting", False):
            from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

            _, height, width = self.latent_shape
            patch = self.pipeline.transformer.config.patch_size
            names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
            keywords["mu"] = calculate_shift(
                (height // patch) * (width // patch), *(scheduler.config[name] for name in names)
            )
        scheduler.set_timesteps(num_steps, device="cpu", **keywords)
        levels: Tensor = scheduler.sigmas.double()
        return levels

    @torch.no_grad()
    def text(self, texts: Sequence[str]) -> TextEmbeddings:
        """Encodes prompts that are not cached, one by one, so that no result depends on its neighbours."""
        wanted = dict.fromkeys(texts)
        new = [text for text in wanted if text not in self._text_cache]
        if new:
            encoders = self._encoders_of(self.pipeline)
            for encoder in encoders:
                encoder.to(self.device)
            with torch.autocast(self.device.type, enabled=False):
                for text in new:
                    sequence, _, pooled, _ = self.pipeline.encode_prompt(
                        text,
                        None,
                        None,
                        device=self.device,
                        do_classifier_free_guidance=False,
                        max_sequence_length=self.max_sequence_length,
                    )
                    self._text_cache[text] = (sequence[0].cpu(), pooled[0].cpu())
            if self.offload_text_encoders:
                for encoder in encoders:
                    encoder.to("cpu")
        sequences = [self._text_cache[text][0] for text in texts]
        pooled = [self._text_cache[text][1] for text in texts]
        for text in wanted:
            self._text_cache.move_to_end(text)
        while len(self._text_cache) > self.text_cache_size:
            self._text_cache.popitem(last=False)
        return TextEmbeddings(
            sequence_BLD=torch.stack(sequences).to(self.device),
            pooled_BD=torch.stack(pooled).to(self.device),
        )

    def velocity(self, x_NCHW: Tensor, t_N: Tensor, text: TextEmbeddings) -> Tensor:
        """One call of the denoiser; the timestep is 1000 t, never cut to an integer."""
        dtype = self.denoiser.dtype
        with self._one_precision():
            output: Tensor = self.denoiser(
                hidden_states=x_NCHW.to(dtype),
                timestep=(t_N * self.pipeline.scheduler.config.num_train_timesteps).to(torch.float32),
                encoder_hidden_states=text["sequence_BLD"].to(dtype),
                pooled_projections=text.pooled_BD.to(dtype),
                return_dict=False,
            )[0]
        return output.float()

    def _one_precision(self) -> AbstractContextManager[object]:
        """Frozen half-precision weights beside trained ones need autocast, where the trainer brings none."""
        full, kind = self.full_fine_tuning, self.device.type
        mixed = full is not None and full.modules is not None and self.weights_dtype != torch.float32
        if not mixed or torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(kind, self.weights_dtype)

    @torch.no_grad()
    def decode(self, x0_BCHW: Tensor) -> Tensor:
        """The VAE in float32, whatever precision the rest runs in (half precision has given black images)."""
        vae = self.pipeline.vae.to(self.device)
        with torch.autocast(self.device.type, enabled=False):
            latents = x0_BCHW.float() / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
            decoded: Tensor = vae.decode(latents, return_dict=False)[0]
        if self.offload_vae:
            vae.to("cpu")
        return (decoded / 2 + 0.5).clamp(0, 1)

    @contextmanager
    def using(self, role: Role) -> Iterator[None]:
        """Switches adapters or weights; see `Adapters.using` and `FullWeights.using`."""
        with self.adapters.using(role):
            yield

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The default adapter's parameters, or the denoiser's own; float32."""
        return self.adapters.trained

    def update_old(self, decay: float) -> None:
        """Moves the old weights; see `Adapters.trail`."""
        self.adapters.trail("old", decay)

    def update_average(self, decay: float) -> None:
        """Moves the averaged weights; see `Adapters.trail`."""
        self.adapters.trail("averaged", decay)

    def distance_to_old(self) -> Tensor:
        """Between the two adapters' factors, or the weights themselves."""
        return self.adapters.distance()

    @property
    def settings(self) -> Mapping[str, Any]:
        """The adapters' alpha, which their tensors do not show."""
        return {"lora_alpha": self.lora_alpha} if self.full_fine_tuning is None else {}

    def saved_state(self) -> dict[str, Tensor]:
        """Both adapters, or the trained and the old weights."""
        return self.adapters.state()

    def load_saved_state(self, state: dict[str, Tensor]) -> None:
        """Puts both back."""
        self.adapters.load_state(state)

    @staticmethod
    def _encoders_of(pipeline: "StableDiffusion3Pipeline") -> list[nn.Module]:
        encoders = (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3)
        return [encoder for encoder in encoders if encoder is not None]
