"""What travels along the arrow: prompts → rollout → rewards → advantages → credit → objective.

Shape suffixes, here and everywhere: R rewards, B samples, K denoising steps, S stochastic ones among them,
C H W latent or picture.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recast_pl.path import noised


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a source."""

    text: str
    metadata: Mapping[str, Any]  # what rewards may need beside the text, e.g. GenEval's `include`


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """The samples that one process draws in one iteration, groups of k after one another."""

    iteration: int  # of the run, from 0; −1 for evaluation
    prompts: tuple[Prompt, ...]  # B, repeated within a group
    group_B: Tensor  # int64; equal for samples of one group, different for all others, whatever their text
    sample_B: Tensor  # int64; the sample's index in the whole iteration, over all processes
    padding: int = 0  # last rows, drawn only so that all processes take as many steps; they do not count

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def texts(self) -> list[str]:
        """The prompts' texts, B."""
        return [prompt.text for prompt in self.prompts]

    def first(self, count: int) -> "PromptBatch":
        """The first `count` samples."""
        return PromptBatch(
            iteration=self.iteration,
            prompts=self.prompts[:count],
            group_B=self.group_B[:count],
            sample_B=self.sample_B[:count],
        )


class TextEmbeddings:
    """What the denoiser sees of B prompts: tensors by name, each with a row for every prompt.

    A name ends in its tensor's shape. `sequence_BLD` holds tokens, `pooled_BD` a vector for each prompt,
    `mask_BL` says which tokens count where not all do; the rest is between a policy and its network.

    >>> text = TextEmbeddings(sequence_BLD=torch.ones(3, 4, 2), pooled_BD=torch.zeros(3, 2))
    >>> len(text[1:]), text[1:]["sequence_BLD"].shape
    (2, torch.Size([2, 4, 2]))
    """

    __slots__ = ("tensors",)

    def __init__(self, **tensors: Tensor) -> None:
        if len({len(tensor) for tensor in tensors.values()}) != 1:
            shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
            raise ValueError(f"text embeddings: expected tensors with a row for each prompt, got {shapes}")
        self.tensors: Mapping[str, Tensor] = tensors

    @classmethod
    def padded(cls, prompts: Sequence[Mapping[str, Tensor]]) -> "TextEmbeddings":
        """Of single prompts, whose tensors have no axis B yet: zeros fill up what is shorter along L.

        Where something is, and no mask came along, there is one.

        >>> TextEmbeddings.padded([{"sequence_BLD": torch.ones(n, 1)} for n in (1, 2)])["mask_BL"].tolist()
        [[True, False], [True, True]]
        """
        columns = {name: [prompt[name] for prompt in prompts] for name in prompts[0]}
        ragged = {
            name: column
            for name, column in columns.items()
            if name.rsplit("_", 1)[-1].startswith("BL") and len({len(tensor) for tensor in column}) > 1
        }
        for column in list(ragged.values())[:1]:
            masks = [torch.ones(len(tensor), dtype=torch.bool, device=tensor.device) for tensor in column]
            ragged.setdefault("mask_BL", masks)
        return cls(
            **{name: torch.stack(column) for name, column in columns.items() if name not in ragged},
            **{name: pad_sequence(column, batch_first=True) for name, column in ragged.items()},
        )

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    @overload
    def __getitem__(self, index: str) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice | Tensor) -> "TextEmbeddings": ...

    def __getitem__(self, index: str | slice | Tensor) -> "Tensor | TextEmbeddings":
        """The tensor of a name, or the rows of a slice or an index."""
        if isinstance(index, str):
            return self.tensors[index]
        return TextEmbeddings(**{name: tensor[index] for name, tensor in self.tensors.items()})

    def to(self, device: torch.device) -> "TextEmbeddings":
        """The same on a device."""
        return TextEmbeddings(**{name: tensor.to(device) for name, tensor in self.tensors.items()})

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(iter(self.tensors.values())).device

    @property
    def mask_BL(self) -> Tensor | None:
        """Which tokens count; None: all."""
        return self.tensors.get("mask_BL")

    @property
    def pooled_BD(self) -> Tensor:
        """One vector for each prompt: the model's own, or else the mean of the tokens that count."""
        if "pooled_BD" in self.tensors:
            return self.tensors["pooled_BD"]
        sequence_BLD, mask_BL = self.tensors["sequence_BLD"], self.mask_BL
        if mask_BL is None:
            return sequence_BLD.mean(1)
        counts_BL1 = mask_BL[..., None].to(sequence_BLD)
        return (sequence_BLD * counts_BL1).sum(1) / counts_BL1.sum(1).clamp_min(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Clean samples of the rollout policy. Holds no graph."""

    batch: PromptBatch
    text: TextEmbeddings  # B
    x0_BCHW: Tensor  # latents at t = 0
    images_B3HW: Tensor  # pictures in [0, 1], float32
    levels: Tensor  # K + 1 noise levels t, from 1 (noise) down to 0 (clean); float64, on the CPU
    trajectory: "Trajectory | None" = None  # of stochastic steps, where the objective trains on them

    def first(self, count: int) -> "Rollout":
        """The first `count` samples."""
        return Rollout(
            batch=self.batch.first(count),
            text=self.text[:count],
            x0_BCHW=self.x0_BCHW[:count],
            images_B3HW=self.images_B3HW[:count],
            levels=self.levels,
            trajectory=None if self.trajectory is None else self.trajectory.first(count),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianSteps:
    """Denoising steps as Gaussians around an affine mean: x_next ~ N(a x + b v, std²), a row for each of N."""

    x_N: Tensor  # a, float64, on the CPU like the others
    velocity_N: Tensor  # b
    std_N: Tensor  # 0 where the step is deterministic

    def __getitem__(self, index: Any) -> "GaussianSteps":
        return GaussianSteps(x_N=self.x_N[index], velocity_N=self.velocity_N[index], std_N=self.std_N[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The stochastic steps of B samples: S consecutive ones of each. Holds no graph."""

    first_B: Tensor  # int64, the sample's first stochastic step; the others follow
    latents_BTCHW: Tensor  # T = S + 1 latents, before the first of these steps up to after the last; float32
    log_prob_BS: Tensor  # of each step under the policy that drew it, mean over dimensions; float32
    steps_K: GaussianSteps  # what each of the K denoising steps is where it is stochastic

    def first(self, count: int) -> "Trajectory":
        """The first `count` samples."""
        return Trajectory(
            first_B=self.first_B[:count],
            latents_BTCHW=self.latents_BTCHW[:count],
            log_prob_BS=self.log_prob_BS[:count],
            steps_K=self.steps_K,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What R rewards say of B samples."""

    names: tuple[str, ...]  # R
    values_RB: Tensor  # float32, NaN where not valid: a failed reward is never a number
    valid_RB: Tensor  # bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """One iteration's rollout, and what all rewards said of it."""

    rollout: Rollout  # this process's samples
    scores: Scores  # of all processes' samples
    group_B: Tensor  # int64, of all processes' samples
    own: slice  # this process's samples among them


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """W as it is used in training: K·W, so that its columns sum to 1 for column-balanced strategies."""

    names: tuple[str, ...]  # R
    levels: Tensor  # K + 1 noise levels; column j belongs to the step that leaves levels[j]
    values_RK: Tensor  # float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Velocities:
    """Predictions at x_t, one row for each trained (sample, step) pair N."""

    current_NCHW: Tensor  # of the trained policy, with graph
    old_NCHW: Tensor | None  # of the rollout policy, where the objective asks for it
    reference_NCHW: Tensor | None  # of the base model, where the objective asks for it


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedSamples:
    """Clean samples brought to noise level t: x_t = (1 − t) x0 + t noise; one row for each pair N."""

    x0_NCHW: Tensor
    noise_NCHW: Tensor
    t_N: Tensor  # in (0, 1]
    advantage_N: Tensor
    group_N: Tensor | None = None  # int64; which samples share a prompt, for objectives that compare groups

    @property
    def x_t_NCHW(self) -> Tensor:
        """Where velocities are predicted: (1 − t) x0 + t noise."""
        return noised(self.x0_NCHW, self.noise_NCHW, self.t_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """Stochastic steps that the rollout policy has taken; one row for each trained pair N."""

    x_t_NCHW: Tensor  # before the step
    x_next_NCHW: Tensor  # after it
    t_N: Tensor  # noise level before it, in (0, 1]
    t_next_N: Tensor  # … and after it
    steps_N: GaussianSteps
    log_prob_old_N: Tensor  # as the rollout recorded it
    advantage_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePart:
    """What one micro-batch of the policy update has computed, for those who learn from it: N pairs."""

    experience: Experience
    row_N: Tensor  # int64, of this process's rollout
    step_N: Tensor  # int64, denoising step
    samples: NoisedSamples | Transitions
    velocities: Velocities


class UpdateObserver(Protocol):
    """Who learns from the policy update, without a part in it."""

    def watch(self, part: UpdatePart) -> None:
        """Sees a micro-batch; keeps no graph of it."""

    def learn(self, total: Callable[[Tensor], Tensor]) -> None:
        """After an iteration's update, once on every process; `total` sums a tensor over processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """An objective's value over N pairs: what is differentiated, and the parts worth a curve."""

    total: Tensor  # scalar, mean over pairs
    parts: Mapping[str, Tensor]  # detached scalars, the same keys in every iteration


class Evaluated:
    """Pictures and their scores, as an evaluation step hands them to callbacks.

    A plain class, because Lightning walks into dataclasses, copies what it finds and keeps it to the end.
    """

    __slots__ = ("rollout", "scores")

    def __init__(self, rollout: Rollout, scores: Scores) -> None:
        self.rollout: Rollout | None = rollout
        self.scores: Scores | None = scores

    def release(self) -> None:
        """Forgets the pictures, where a callback has done with them and Lightning would keep them."""
        self.rollout = self.scores = None
