"""The verb `memory`: what a configuration would take on each device, before a GPU is rented."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from recast_pl.module import ReCASTModule
from recast_pl.policy import SD3Policy
from recast_pl.policy.full_weights import FullWeights
from recast_pl.policy.memory import Sketch, module_bytes, stored_bytes
from recast_pl.prompts import PromptData
from recast_pl.types import NoisedSamples
from recast_pl.update import trainable_steps

MIXED = {"16-mixed": torch.float16, "16": torch.float16, "bf16-mixed": torch.bfloat16, "bf16": torch.bfloat16}
HALF = {"16-true": torch.float16, "bf16-true": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a configuration's `trainer` block asks for, whether this machine has it or not."""

    processes: int | None  # None: `devices` leaves it to the machine
    precision: str
    gpu: bool
    shards: bool  # whether the strategy is one that shares weights out

    @classmethod
    def planned(cls, trainer: Mapping[str, Any]) -> "Hardware":
        """Reads a `trainer` block.

        >>> block = {"devices": 4, "num_nodes": 2, "accelerator": "gpu", "precision": "bf16-mixed"}
        >>> Hardware.planned(block).processes
        8
        """
        devices = trainer.get("devices", "auto")
        if isinstance(devices, str) and devices.lstrip("-").isdigit():
            devices = int(devices)
        if isinstance(devices, list):
            devices = len(devices)
        known = isinstance(devices, int) and devices > 0
        strategy = trainer.get("strategy", "auto")
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        return cls(
            processes=devices * trainer.get("num_nodes", 1) if known else None,
            precision=str(trainer.get("precision") or "32-true"),
            gpu=trainer.get("accelerator", "auto") != "cpu",
            shards=any(mark in name.lower() for mark in ("fsdp", "modelparallel", "deepspeed")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How much of an iteration one device has in hand."""

    processes: int
    samples: int  # of an iteration, on this device
    rollout_batch: int  # samples that pass through the denoiser, and then the VAE, at a time
    update_batch: int  # (sample, step) pairs in one backward pass
    pairs: int  # of one optimiser step, on this device: no micro-batch is larger


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One micro-batch of the update."""

    kept: int  # bytes that wait for the backward pass, inputs and velocities included
    peak: int  # bytes at the worst moment of forward and backward; gradients of the weights stand elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What does not depend on batches: weights and their state, by their shapes."""

    parameters: int  # of the denoiser, without what is trained
    trained: int  # parameters that are trained
    full: bool  # whether they are the denoiser's own, not an adapter's
    offload: bool  # whether text encoders wait on the CPU
    denoiser: int  # what is frozen of it
    adapters: int  # what is trained, and its copies for other roles
    waiting: int  # copies that are kept on the CPU instead; each visits the device while it is in use
    optimizer: int
    step: int  # what an optimiser step takes for a time
    gradients: int
    text_encoders: int
    vae: int

    @property
    def standing(self) -> int:
        """What is there all the time."""
        encoders = 0 if self.offload else self.text_encoders
        return self.denoiser + self.adapters + self.optimizer + encoders + self.vae


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What an iteration's rollout leaves for rewards and update, by its shapes."""

    latents: int  # the rollout's starting noise takes as much once more
    pictures: int
    late_pictures: int  # those of the rollout's last part, which come after its last step
    text: int

    @property
    def total(self) -> int:
        """All of it, once the rollout is over."""
        return self.latents + self.pictures + self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """What is there for a time, counted."""

    rollout: int
    decode: int
    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes on one device."""

    hardware: Hardware
    geometry: Geometry
    resolution: tuple[int, int]
    fixed: Fixed
    stored: Stored
    checkpointing: bool
    passing: Passing
    doubled: Passing  # with both micro-batches twice as large, or as large as they get
    other_update: Update  # with gradient checkpointing where it is not configured, and the reverse

    @property
    def moments(self) -> dict[str, int]:
        """The total at each of the moments that could be the worst."""
        fixed, stored, passing = self.fixed, self.stored, self.passing
        before_last = fixed.standing + stored.total + stored.latents - stored.late_pictures
        return {
            "text": fixed.standing + (fixed.text_encoders if fixed.offload else 0),
            "rollout": before_last + passing.rollout,
            "decode": before_last + passing.decode,
            "rewards": fixed.standing + stored.total + stored.pictures,  # while parts are joined
            "update": fixed.standing + stored.total + fixed.gradients + passing.update.peak,
            "step": fixed.standing + stored.total + fixed.gradients + fixed.step,
        }

    @property
    def peak(self) -> int:
        """The largest of the moments."""
        return max(self.moments.values())


def memory_budget(module: ReCASTModule, data: PromptData, hardware: Hardware) -> Budget:
    """Counts what `module` would hold on one device; fills its policy with tensors that have no storage.

    Raises:
        ValueError: for a policy whose shapes cannot be read without its weights, or samples that processes
            cannot share.
    """
    policy = module.policy
    if not isinstance(policy, SD3Policy):
        raise ValueError(f"model.policy: `memory` knows the shapes of SD3Policy, got {type(policy).__name__}")
    half, autocast = HALF.get(hardware.precision), MIXED.get(hardware.precision)
    sketch = Sketch(policy, half=half, autocast=autocast, gpu=hardware.gpu)
    geometry = geometry_of(module, data, processes=hardware.processes or 1)
    checkpointing = policy.gradient_checkpointing

    def passing(rollout_batch: int, update_batch: int) -> Passing:
        return Passing(
            rollout=rollout_memory(module, sketch, rollout_batch),
            decode=sketch.decode_peak(rollout_batch),
            update=update_memory(module, sketch, update_batch, checkpointing=checkpointing),
        )

    factor = policy.pipeline.vae_scale_factor
    _, height, width = policy.latent_shape
    return Budget(
        hardware=hardware,
        geometry=geometry,
        resolution=(height * factor, width * factor),
        fixed=fixed_memory(module, sketch, processes=geometry.processes),
        stored=stored_memory(sketch, geometry, picture=3 * height * factor * width * factor * 4),
        checkpointing=checkpointing,
        passing=passing(geometry.rollout_batch, geometry.update_batch),
        doubled=passing(
            min(2 * geometry.rollout_batch, geometry.samples), min(2 * geometry.update_batch, geometry.pairs)
        ),
        other_update=update_memory(module, sketch, geometry.update_batch, checkpointing=not checkpointing),
    )


def fixed_memory(module: ReCASTModule, sketch: Sketch, *, processes: int) -> Fixed:
    """Weights, gradients and the optimiser's state."""
    policy = sketch.policy
    trained, pipeline = policy.trainable_parameters(), policy.pipeline
    weights, inside = policy.adapters, {id(parameter) for parameter in policy.denoiser.parameters()}
    count = sum(parameter.numel() for parameter in trained)
    waiting = 0
    if isinstance(weights, FullWeights) and weights.keep_copies == "cpu":
        waiting = stored_bytes(weights.copies)
    optimizer, step = optimizer_memory(module, sketch)
    own = [tensor for tensor in (*trained, *weights.copies) if id(tensor) in inside]
    return Fixed(
        parameters=sum(p.numel() for p in policy.denoiser.parameters()) - sum(p.numel() for p in own),
        trained=count,
        full=isinstance(weights, FullWeights),
        offload=policy.offload_text_encoders,
        denoiser=module_bytes(policy.denoiser) - stored_bytes(own),
        adapters=stored_bytes((*trained, *weights.copies)) - waiting,
        waiting=waiting,
        optimizer=optimizer,
        step=step,
        gradients=stored_bytes(trained) * (1 if processes == 1 else 2),  # DDP reduces them in buckets
        text_encoders=sum(module_bytes(encoder) for encoder in policy.text_encoders),
        vae=module_bytes(pipeline.vae),
    )


def stored_memory(sketch: Sketch, geometry: Geometry, *, picture: int) -> Stored:
    """One device's share of an iteration's rollout; `picture` is the bytes of one."""
    samples, late = geometry.samples, (geometry.samples - 1) % geometry.rollout_batch + 1
    with sketch.running():
        text, latents = sketch.text(samples), sketch.latents(samples)
        return Stored(
            latents=stored_bytes([latents]),
            pictures=samples * picture,
            late_pictures=late * picture,
            text=stored_bytes((text.sequence_BLD, text.pooled_BD)),
        )


def geometry_of(module: ReCASTModule, data: PromptData, *, processes: int) -> Geometry:
    """One device's share; micro-batches that are larger than all there is are cut to it."""
    data.check_shares(processes)
    samples = data.num_groups * data.group_size // processes
    steps = len(trainable_steps(module.levels, min_noise_level=module.min_noise_level))
    pairs = samples * min(module.timesteps_per_sample or steps, steps)
    share = -(-pairs // module.updates_per_iteration)
    return Geometry(
        processes=processes,
        samples=samples,
        rollout_batch=min(module.rollout.micro_batch_size, samples),
        update_batch=min(module.micro_batch_size, share),
        pairs=share,
    )


def update_memory(module: ReCASTModule, sketch: Sketch, count: int, *, checkpointing: bool) -> Update:
    """The module's own velocities, loss and backward pass for `count` pairs, on tensors without storage."""
    denoiser = sketch.policy.denoiser
    (denoiser.enable_gradient_checkpointing if checkpointing else denoiser.disable_gradient_checkpointing)()
    with sketch.running():
        for parameter in module.policy.trainable_parameters():
            parameter.grad = torch.zeros_like(parameter)
    with sketch.running() as memory:
        samples = NoisedSamples(
            x0_NCHW=sketch.latents(count),
            noise_NCHW=sketch.latents(count),
            t_N=torch.empty(count),
            advantage_N=torch.empty(count),
            group_N=torch.empty(count, dtype=torch.int64),
        )
        velocities = module.velocities(samples, sketch.text(count))
        loss = module.objective.loss(velocities, samples).total
        kept = memory.live
        loss.backward()
        return Update(kept=kept, peak=memory.peak)


def rollout_memory(module: ReCASTModule, sketch: Sketch, count: int) -> int:
    """One step of `count` samples; guidance holds a second text and a second velocity."""
    step = sketch.rollout_peak(count)
    if module.rollout.guidance_scale == 1:
        return step
    with sketch.running():
        text = sketch.text(count)
        return step + stored_bytes((text.sequence_BLD, text.pooled_BD, sketch.latents(count)))


def optimizer_memory(module: ReCASTModule, sketch: Sketch) -> tuple[int, int]:
    """What the configured optimiser keeps after a step, and the most that a later step takes beside."""
    with sketch.running() as memory:
        for parameter in module.policy.trainable_parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer = module.optimizer(module.policy.trainable_parameters())
        for group in optimizer.param_groups:
            if sketch.gpu and group.get("foreach", False) is None:  # a GPU's default: all parameters at once
                group["foreach"] = not group.get("fused")
        optimizer.step()
        state = [v for kept in optimizer.state.values() for v in kept.values() if isinstance(v, torch.Tensor)]
        before = memory.peak = memory.live
        optimizer.step()
        return stored_bytes(state), memory.peak - before


def memory_table(budget: Budget) -> str:
    """The budget in words and numbers."""
    unit = 2**30 if budget.peak >= 2**30 else 2**20
    g, hardware, moments = budget.geometry, budget.hardware, budget.moments
    height, width = budget.resolution
    lines = [
        f"\nMemory of each device: {g.processes} process{'es' if g.processes > 1 else ''}, precision "
        f"{hardware.precision}, {height} × {width} pixels, {g.samples} samples an iteration on each",
        *_constant_lines(budget, unit),
        *_passing_lines(budget, unit),
        "Totals",
        *(_line(f"while in: {moment}", size, unit) for moment, size in moments.items()),
        _line("peak", budget.peak, unit, f"while in: {max(moments, key=lambda moment: moments[moment])}"),
        *_doublings(budget, unit),
        "Not counted: reward networks, a GPU's context, kernels' workspaces, and what the allocator wastes.",
    ]
    if hardware.processes is None:
        lines.append("trainer.devices leaves the number of processes open: counted for 1; say --processes N.")
    if hardware.shards:
        lines.append("The strategy may share weights out: here every device has all of them.")
    return "\n".join(lines)


def _size(size: int, unit: int) -> str:
    return f"{size / unit:.3f} {'GiB' if unit == 2**30 else 'MiB'}"


def _line(what: str, size: int, unit: int, note: str = "") -> str:
    return f"  {what:50} {_size(size, unit):>14}  {note}".rstrip()


def _constant_lines(budget: Budget, unit: int) -> list[str]:
    fixed, stored = budget.fixed, budget.stored
    encoders = (
        f"{_size(fixed.text_encoders, unit)} visit for new prompts"
        if fixed.offload
        else "none of it with offload_text_encoders, but while new prompts are encoded"
    )
    return [
        "Stands through the run",
        _line("frozen denoiser", fixed.denoiser, unit, f"{fixed.parameters / 1e6:,.1f} M parameters"),
        _line(_trained_name(fixed), fixed.adapters, unit, f"{fixed.trained / 1e6:,.2f} M parameters each"),
        _line("optimiser state", fixed.optimizer, unit),
        _line("text encoders", 0 if fixed.offload else fixed.text_encoders, unit, encoders),
        _line("VAE", fixed.vae, unit),
        "Stored rollout",
        _line("latents", stored.latents, unit),
        _line("pictures", stored.pictures, unit),
        _line("text embeddings", stored.text, unit),
    ]


def _trained_name(fixed: Fixed) -> str:
    if not fixed.full:
        return "adapters, trained and old"
    return "trained weights, copies on the CPU" if fixed.waiting else "weights, trained, old and reference"


def _passing_lines(budget: Budget, unit: int) -> list[str]:
    g, passing = budget.geometry, budget.passing

    def update(checkpointing: bool, counted: Update, note: str) -> str:
        way = "with" if checkpointing else "without"
        kept = f"{_size(counted.kept, unit)} wait for the backward pass{note}"
        what = f"update of {g.update_batch} pairs, {way} gradient checkpointing"
        return _line(what, counted.peak, unit, kept)

    return [
        "For a time",
        _line(f"rollout step of {g.rollout_batch} samples", passing.rollout, unit),
        _line(f"VAE decoding {g.rollout_batch} pictures", passing.decode, unit),
        _line("optimiser step", budget.fixed.step, unit),
        _line("gradients", budget.fixed.gradients, unit, "with DDP's buckets" if g.processes > 1 else ""),
        update(budget.checkpointing, passing.update, ""),
        update(not budget.checkpointing, budget.other_update, "; not configured"),
    ]


def _doublings(budget: Budget, unit: int) -> list[str]:
    g, now, doubled = budget.geometry, budget.passing, budget.doubled
    update = f"update +{_size(doubled.update.peak - now.update.peak, unit)}"
    if g.update_batch == g.pairs:
        update = f"nothing, all {g.pairs} pairs of an optimiser step are in one already"
    rollout = (
        f"rollout step +{_size(doubled.rollout - now.rollout, unit)}, "
        f"VAE decoding +{_size(doubled.decode - now.decode, unit)}"
    )
    if g.rollout_batch == g.samples:
        rollout = f"nothing, all {g.samples} samples are in one already"
    return [
        f"Doubling model.micro_batch_size: {update}.",
        f"Doubling model.rollout.init_args.micro_batch_size: {rollout}.",
    ]
