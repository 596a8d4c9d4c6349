"""Runs the module's own code on tensors without storage, and counts."""

from functools import partial

import torch

from recast_pl.module import ReCASTModule
from recast_pl.policy import SD3Policy
from recast_pl.policy.full_parameters import FullWeights
from recast_pl.prompts import PromptData
from recast_pl.trainer_limits import check_precision
from recast_pl.update import trainable_steps
from recast_pl.verbs.memory.budget import MIXED, Budget, Fixed, Geometry, Hardware, Passing, Stored, Update
from recast_pl.verbs.memory.sketch import Sketch, module_bytes, stored_bytes


def memory_budget(module: ReCASTModule, data: PromptData, hardware: Hardware) -> Budget:
    """Counts what `module` would hold on one device; fills its policy with tensors that have no storage.

    Raises:
        ValueError: for a policy whose shapes cannot be read without its weights, or samples that processes
            cannot share, or a precision that nothing is trained in.
    """
    policy = module.policy
    if not isinstance(policy, SD3Policy):
        raise ValueError(f"model.policy: `memory` knows the shapes of SD3Policy, got {type(policy).__name__}")
    check_precision(hardware.precision)
    sketch = Sketch(policy, autocast=MIXED.get(hardware.precision), gpu=hardware.gpu)
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
        stored=stored_memory(module, sketch, geometry, picture=3 * height * factor * width * factor * 4),
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
        averaged=policy.averaged,
        offload=policy.offload_text_encoders,
        offload_vae=policy.offload_vae,
        denoiser=module_bytes(policy.denoiser) - stored_bytes(own),
        adapters=stored_bytes((*trained, *weights.copies)) - waiting,
        waiting=waiting,
        optimizer=optimizer,
        step=step,
        gradients=stored_bytes(trained) * (1 if processes == 1 else 2),  # DDP reduces them in buckets
        text_encoders=sum(module_bytes(encoder) for encoder in policy.text_encoders),
        vae=module_bytes(pipeline.vae),
    )


def stored_memory(module: ReCASTModule, sketch: Sketch, geometry: Geometry, *, picture: int) -> Stored:
    """One device's share of an iteration's rollout; `picture` is the bytes of one."""
    samples, late = geometry.samples, (geometry.samples - 1) % geometry.rollout_batch + 1
    kept = module.rollout.stochastic_steps + 1 if module.objective.records else 0
    with sketch.running():
        text, latents = sketch.text(samples), sketch.latents(samples)
        return Stored(
            latents=stored_bytes([latents]),
            pictures=samples * picture,
            late_pictures=late * picture,
            text=stored_bytes(text.tensors.values()),
            trajectories=kept * stored_bytes([latents]),
        )


def geometry_of(module: ReCASTModule, data: PromptData, *, processes: int) -> Geometry:
    """One device's share; micro-batches that are larger than all there is are cut to it."""
    data.check_shares(processes)
    samples = data.num_groups * data.group_size // processes
    steps = int(trainable_steps(module.levels, min_noise_level=module.min_noise_level).sum())
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
        samples = module.objective.blank(partial(sketch.latents, count), count)
        velocities = module.objective.predict(module.policy, module.rollout, samples, sketch.text(count))
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
        return step + stored_bytes((*text.tensors.values(), sketch.latents(count)))


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
