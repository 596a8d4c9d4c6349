"""What travels along the arrow: prompts → rollout → rewards → advantages → credit → objective.

The unit is the sample: it has its own noise levels, the iteration it was drawn in, and its own row of credit.

Shape suffixes, here and everywhere: R rewards, B samples, K denoising steps, T the levels around them (K + 1),
S stochastic ones among them, N trained (sample, step) pairs, C H W latent or picture. A latent may have any
number of dimensions (a video's: C F H W): nothing below counts them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recast_pl.path import noised
from recast_pl.schedule import shared_schedule
from recast_pl.shapes import check_shapes
from recast_pl.weights import Weights as Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a source."""

    text: str
    metadata: Mapping[str, Any]  # what rewards may need beside the text, e.g. GenEval's `include`


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """The samples that one process draws in one iteration, groups of k after one another."""

    iteration: int  # that draws these samples, from 0; −1 for evaluation
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

    def rows(self, rows_B: Tensor) -> "PromptBatch":
        """The samples at these rows, in this order; a row may come more than once."""
        return PromptBatch(
            iteration=self.iteration,
            prompts=tuple(self.prompts[row] for row in rows_B.tolist()),
            group_B=self.group_B[rows_B],
            sample_B=self.sample_B[rows_B],
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
    """Clean samples of the rollout policy, each with its own schedule. Holds no graph."""

    batch: PromptBatch
    text: TextEmbeddings  # B
    x0_BCHW: Tensor  # latents at t = 0
    images_B3HW: Tensor  # pictures in [0, 1], float32
    levels_BT: Tensor  # float64; noise levels from at most 1 down to 0, zeros after a row's own end
    steps_B: Tensor  # int64; how many denoising steps the sample has
    drawn_B: Tensor  # int64; the iteration that drew it, −1 for evaluation
    version_B: Tensor  # int64; how often the old policy had followed the trained one when it drew the sample
    trajectory: "Trajectory | None" = None  # of stochastic steps, where the objective trains on them

    def __post_init__(self) -> None:
        check_shapes(
            x0_BZ=self.x0_BCHW,
            levels_BT=self.levels_BT,
            steps_B=self.steps_B,
            drawn_B=self.drawn_B,
            version_B=self.version_B,
            sample_B=self.batch.sample_B,
        )

    @classmethod
    def on_schedule(
        cls,
        levels: Tensor,
        *,
        batch: PromptBatch,
        text: TextEmbeddings,
        x0_BCHW: Tensor,
        images_B3HW: Tensor,
        trajectory: "Trajectory | None" = None,
    ) -> "Rollout":
        """Samples that share one schedule of K + 1 levels, drawn in the batch's iteration by its old policy."""
        levels_BT, steps_B = shared_schedule(levels, len(batch))
        drawn_B = torch.full((len(batch),), batch.iteration)
        return cls(
            batch=batch,
            text=text,
            x0_BCHW=x0_BCHW,
            images_B3HW=images_B3HW,
            levels_BT=levels_BT,
            steps_B=steps_B,
            drawn_B=drawn_B,
            version_B=drawn_B.clamp_min(0),
            trajectory=trajectory,
        )

    def rows(self, rows_B: Tensor) -> "Rollout":
        """The samples at these rows, in this order; a row may come more than once."""
        here = rows_B.to(self.x0_BCHW.device)
        return Rollout(
            batch=self.batch.rows(rows_B),
            text=self.text[here],
            x0_BCHW=self.x0_BCHW[here],
            images_B3HW=self.images_B3HW[here.to(self.images_B3HW.device)],
            levels_BT=self.levels_BT[rows_B],
            steps_B=self.steps_B[rows_B],
            drawn_B=self.drawn_B[rows_B],
            version_B=self.version_B[rows_B],
            trajectory=None if self.trajectory is None else self.trajectory.rows(rows_B),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianSteps:
    """Denoising steps as Gaussians around an affine mean: x_next ~ N(a x + b v, std²); N of them, or B × S."""

    x_N: Tensor  # a, float64, on the CPU like the others
    velocity_N: Tensor  # b
    std_N: Tensor  # 0 where the step is deterministic

    def __getitem__(self, index: Any) -> "GaussianSteps":
        return GaussianSteps(x_N=self.x_N[index], velocity_N=self.velocity_N[index], std_N=self.std_N[index])

    @classmethod
    def joined(cls, parts: Sequence["GaussianSteps"]) -> "GaussianSteps":
        """Steps of several parts after one another."""
        return cls(
            x_N=torch.cat([part.x_N for part in parts]),
            velocity_N=torch.cat([part.velocity_N for part in parts]),
            std_N=torch.cat([part.std_N for part in parts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The stochastic steps of B samples: consecutive ones of each, up to S. Holds no graph."""

    first_B: Tensor  # int64, the sample's first stochastic step; the others follow
    count_B: Tensor  # int64, how many it has, at most S; what is stored beyond says nothing
    latents_BTCHW: Tensor  # T = S + 1 latents, before the first of these steps up to after the last; float32
    log_prob_BS: Tensor  # of each step under the policy that drew it, mean over dimensions; float32
    steps_BS: GaussianSteps  # what each of these steps is

    def rows(self, rows_B: Tensor) -> "Trajectory":
        """The samples at these rows, in this order."""
        here = rows_B.to(self.latents_BTCHW.device)
        return Trajectory(
            first_B=self.first_B[rows_B],
            count_B=self.count_B[rows_B],
            latents_BTCHW=self.latents_BTCHW[here],
            log_prob_BS=self.log_prob_BS[here],
            steps_BS=self.steps_BS[rows_B],
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
class Velocities:
    """Predictions at x_t, one row for each trained (sample, step) pair N."""

    current_NCHW: Tensor  # of the trained policy, with graph
    old_NCHW: Tensor | None  # of the rollout policy, where the objective asks for it
    reference_NCHW: Tensor | None  # of the base model, where the objective asks for it


class TrainingSamples(ABC):
    """What an objective is given at N trained pairs; each kind of objective has its own kind."""

    __slots__ = ()

    renoised: ClassVar[bool]  # whether x_t is a clean sample noised anew, whatever led to it
    t_N: Tensor  # noise level at which velocities are predicted, in (0, 1]
    advantage_N: Tensor

    @property
    @abstractmethod
    def x_t_NCHW(self) -> Tensor:
        """Where velocities are predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedSamples(TrainingSamples):
    """Clean samples brought to noise level t: x_t = (1 − t) x0 + t noise; one row for each pair N."""

    renoised = True
    x0_NCHW: Tensor
    noise_NCHW: Tensor
    t_N: Tensor  # in (0, 1]
    advantage_N: Tensor
    group_N: Tensor | None = None  # int64; which samples share a prompt, for objectives that compare groups

    def __post_init__(self) -> None:
        check_shapes(
            x0_NZ=self.x0_NCHW,
            noise_NZ=self.noise_NCHW,
            t_N=self.t_N,
            advantage_N=self.advantage_N,
            group_N=self.group_N,
        )

    @property
    def x_t_NCHW(self) -> Tensor:
        """Where velocities are predicted: (1 − t) x0 + t noise."""
        return noised(self.x0_NCHW, self.noise_NCHW, self.t_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions(TrainingSamples):
    """Stochastic steps that the rollout policy has taken; one row for each trained pair N."""

    renoised = False
    before_NCHW: Tensor  # x_t, where the step began
    x_next_NCHW: Tensor  # after it
    t_N: Tensor  # noise level before it, in (0, 1]
    t_next_N: Tensor  # … and after it
    steps_N: GaussianSteps
    log_prob_old_N: Tensor  # as the rollout recorded it
    advantage_N: Tensor

    def __post_init__(self) -> None:
        check_shapes(
            before_NZ=self.before_NCHW,
            next_NZ=self.x_next_NCHW,
            t_N=self.t_N,
            t_next_N=self.t_next_N,
            std_N=self.steps_N.std_N,
            log_prob_old_N=self.log_prob_old_N,
            advantage_N=self.advantage_N,
        )

    @property
    def x_t_NCHW(self) -> Tensor:
        """The latent before the step."""
        return self.before_NCHW


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePart:
    """What one micro-batch of the policy update has computed, for those who learn from it: N pairs."""

    experience: Experience
    row_N: Tensor  # int64, of this process's rollout
    column_N: Tensor  # int64, the column of W that the pair's step belongs to …
    columns: int  # … of K
    samples: TrainingSamples
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
