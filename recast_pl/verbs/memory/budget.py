"""What is counted, in bytes on one device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

MIXED = {"16-mixed": torch.float16, "16": torch.float16, "bf16-mixed": torch.bfloat16, "bf16": torch.bfloat16}


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
    averaged: bool  # whether there is an average of them
    offload: bool  # whether text encoders wait on the CPU
    offload_vae: bool  # whether the VAE does
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
        vae = 0 if self.offload_vae else self.vae
        return self.denoiser + self.adapters + self.optimizer + encoders + vae


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What an iteration's rollout leaves for rewards and update, by its shapes."""

    latents: int  # the rollout's starting noise takes as much once more
    pictures: int
    late_pictures: int  # those of the rollout's last part, which come after its last step
    text: int
    trajectories: int  # latents before and after stochastic steps, where the objective trains on them

    @property
    def total(self) -> int:
        """All of it, once the rollout is over."""
        return self.latents + self.pictures + self.text + self.trajectories


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
            "decode": before_last + passing.decode + (fixed.vae if fixed.offload_vae else 0),
            "rewards": fixed.standing + stored.total + stored.pictures,  # while parts are joined
            "update": fixed.standing + stored.total + fixed.gradients + passing.update.peak,
            "step": fixed.standing + stored.total + fixed.gradients + fixed.step,
        }

    @property
    def peak(self) -> int:
        """The largest of the moments."""
        return max(self.moments.values())
