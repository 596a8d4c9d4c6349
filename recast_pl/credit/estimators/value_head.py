"""ValueHead: a small network that learns to tell rewards from noisy latents while the policy trains.

Shape suffixes: N pairs, R rewards, K denoising steps, G groups, B samples.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recast_pl.credit.estimators.base import ProfileEstimator, Tilt, attempted, evidence_of, own_scores
from recast_pl.credit.evidence import Evidence
from recast_pl.credit.mathematics.divergence import divergence_of_moments
from recast_pl.credit.mathematics.moments import UNKNOWN, Moment
from recast_pl.credit.mathematics.regression import predicted_moment, standardised, tangent_terms
from recast_pl.credit.probe import Probe
from recast_pl.credit.profile import detected
from recast_pl.noise import keyed_generator
from recast_pl.rollout.solvers import clean_estimate
from recast_pl.types import Experience, UpdatePart

SUMS = 6  # of a cell's clusters: their number, Σ n, Σ s, Σ s², Σ s n, Σ n²


class Head(nn.Module):
    """R standardised rewards from x_t, the clean estimate, the level and the pooled prompt.

    Args:
        channels: C of the latents, C H W or C F H W.
        pooled: width of the pooled prompt embedding.
        rewards: R.
        width: of the hidden layers.
    """

    def __init__(self, *, channels: int, pooled: int, rewards: int, width: int) -> None:
        super().__init__()
        self.picture = nn.Sequential(
            nn.Conv2d(2 * channels, width, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.prompt = nn.Linear(pooled, width)
        self.joint = nn.Sequential(
            nn.Linear(5 * width + 2, 2 * width), nn.SiLU(), nn.Linear(2 * width, rewards)
        )

    def forward(self, x_t: Tensor, clean: Tensor, t_N: Tensor, pooled: Tensor) -> Tensor:
        """Predictions [N, R]."""
        both = torch.cat([x_t, clean], dim=1)
        frames = (
            both.flatten(2, -3).movedim(2, 1) if both.ndim > 4 else both[:, None]
        )  # a video's mean over them
        seen = self.picture(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]).mean(1)
        level = torch.stack([t_N, t_N.square()], dim=1)
        predicted: Tensor = self.joint(torch.cat([seen, self.prompt(pooled), level], dim=1))
        return predicted

    def predict(self, seen: "Seen") -> Tensor:
        """Predictions [N, R] for what was kept, in float32."""
        predicted: Tensor = self(seen.x_t.float(), seen.clean.float(), seen.t_N, seen.pooled)
        return predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the head keeps of a micro-batch of the update until the iteration ends."""

    x_t: Tensor  # N C H W, half precision
    clean: Tensor  # x̂0, likewise
    t_N: Tensor
    pooled: Tensor
    target_NR: Tensor  # standardised scores; NaN where masked
    column_N: Tensor  # of W's K …
    columns: int  # … columns
    group_N: Tensor  # index among the iteration's groups


class ValueHead(ProfileEstimator):
    """E[z | x_t, c] by regression on the pairs that the policy update draws anyway.

    At the end of an iteration all its pairs are predicted first and learnt from afterwards, so predictions are
    out of sample as the tangent bound asks (`recast_pl.credit.mathematics.regression`). The head sees detached
    tensors and has an optimiser of its own: the policy's gradients are what they are without it. Its gradients
    are summed over processes, so that every process has the same head and the same W.

    Evidence at a step's source level t_j belongs to column j − 1. At the clean end the pictures are scored once
    more, one reward call for each sample and recomputation: a reward that is noise then shows as one. That
    column counts only for rewards which the head can tell at an earlier level: one that has learnt nothing
    knows nothing of the shape of a profile, and the row stays even.

    Holds x_t and x̂0 of an iteration's pairs until its end: 4 bytes for each pair and latent entry.

    Args:
        width: of the head's hidden layers.
        learning_rate: of its AdamW.
        steps: of its optimiser in one iteration, each over all pairs.
        seed: of its initialisation.

    Reference: after prefix values as in "Latent Reward Registers" (arXiv 2608.03929).
    """

    def __init__(self, *, width: int = 32, learning_rate: float = 3e-3, steps: int = 4, seed: int = 0) -> None:
        for name, value in (("width", width), ("learning_rate", learning_rate), ("steps", steps)):
            if not value > 0:
                raise ValueError(
                    f"credit.strategy.init_args.estimator.init_args.{name}: expected above 0, got {value}"
                )
        self.width, self.learning_rate, self.steps, self.seed = width, learning_rate, steps, seed
        self.head: Head | None = None
        self._optimiser: torch.optim.Optimizer | None = None
        self._saved: Mapping[str, Any] = {}
        self._tilt: Tilt | None = None
        self._seconds = 0.0
        self._seen: list[Seen] = []
        self._targets: tuple[Experience, Tensor] | None = None
        self._sums = torch.zeros(0)  # [SUMS, R, K], by source step

    def check(self, tilt: Tilt) -> None:
        """Keeps the divergence that terms are made for; refuses `ratio`, which a head cannot pool."""
        if tilt.normalisation != "optimality":
            raise ValueError(
                "credit.strategy.init_args.normalisation: ValueHead measures 'optimality', got "
                f"{tilt.normalisation!r}; take PairedCompletions or Preview for 'ratio'"
            )
        self._tilt = tilt

    @torch.no_grad()
    def watch(self, part: UpdatePart) -> None:
        """Keeps what the head will look at; refuses steps of a trajectory, which are no re-noised samples.

        Raises:
            ValueError: naming the key.
        """
        began = time.perf_counter()
        samples, velocities, experience = part.samples, part.velocities, part.experience
        if not samples.renoised:
            raise ValueError(
                "credit.strategy.init_args.estimator: ValueHead learns from clean samples that the update "
                "noises anew, and this objective trains on the rollout's own steps, whose x_t say more of the "
                "picture than noised ones do; take Preview or PairedCompletions"
            )
        known = velocities.old_NCHW if velocities.old_NCHW is not None else velocities.current_NCHW
        x_t = samples.x_t_NCHW
        t = samples.t_N.view(-1, *[1] * (x_t.ndim - 1))
        target_BR = self._targets_of(experience)
        _, group_B = experience.group_B.cpu().unique(return_inverse=True)
        self._seen.append(
            Seen(
                x_t=x_t.half(),
                clean=clean_estimate(x_t, known.detach().float(), t).half(),
                t_N=samples.t_N,
                pooled=experience.rollout.text.pooled_BD[part.row_N.to(t.device)].detach().float(),
                target_NR=target_BR[experience.own][part.row_N].to(t.device),
                column_N=part.column_N,
                columns=part.columns,
                group_N=group_B[experience.own][part.row_N],
            )
        )
        self._seconds += time.perf_counter() - began

    def _targets_of(self, experience: Experience) -> Tensor:
        """Standardised scores of all processes' samples, B × R; made once for an iteration."""
        if self._targets is None or self._targets[0] is not experience:
            scores_RB, group_B = experience.scores.values_RB.double().cpu(), experience.group_B.cpu()
            target_RB = torch.full_like(scores_RB, torch.nan)
            for row_B, target_B in zip(scores_RB, target_RB, strict=True):
                valid = row_B.isfinite()
                target_B[valid] = standardised(row_B[valid], group_B[valid])
            self._targets = experience, target_RB.T.contiguous()
        return self._targets[1]

    def learn(self, total: Callable[[Tensor], Tensor]) -> None:
        """Predicts the iteration's pairs, keeps the terms, then learns from them; in float32."""
        if self._seen:
            began = time.perf_counter()
            with torch.autocast(self._seen[0].t_N.device.type, enabled=False), torch.enable_grad():
                self._learn(total)
            self._seen, self._targets = [], None
            self._seconds += time.perf_counter() - began

    def _learn(self, total: Callable[[Tensor], Tensor]) -> None:
        assert self._targets is not None
        experience = self._targets[0]
        head, optimiser = self._ready(self._seen[0])
        self._keep(head, experience, total)
        weights = [parameter for parameter in head.parameters() if parameter.requires_grad]
        count = total(sum((seen.target_NR.isfinite().sum() for seen in self._seen), torch.zeros(())))
        for _ in range(self.steps):
            optimiser.zero_grad()
            for seen in self._seen:
                (_squared_errors(head, seen) / count.clamp_min(1)).backward()
            gradient = total(
                torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])
            )
            for weight, part in zip(weights, gradient.split([w.numel() for w in weights]), strict=True):
                weight.grad = part.view_as(weight).clone()
            optimiser.step()

    def _ready(self, seen: Seen) -> tuple[Head, torch.optim.Optimizer]:
        rewards = seen.target_NR.shape[1]
        if self.head is None or self._optimiser is None:
            with torch.random.fork_rng(devices=[]):
                # torch.manual_seed would seed accelerators too
                torch.default_generator.manual_seed(keyed_generator(self.seed, rewards).initial_seed())
                head = Head(
                    channels=seen.x_t.shape[1],
                    pooled=seen.pooled.shape[1],
                    rewards=rewards,
                    width=self.width,
                ).to(seen.x_t.device)
            self.head = head
            self._optimiser = torch.optim.AdamW(head.parameters(), lr=self.learning_rate)
            if self._saved:
                head.load_state_dict(self._saved["head"])
                self._optimiser.load_state_dict(self._saved["optimiser"])
                self._saved = {}
        return self.head, self._optimiser

    @torch.no_grad()
    def _keep(self, head: Head, experience: Experience, total: Callable[[Tensor], Tensor]) -> None:
        """Adds the iteration's terms, summed within groups, to what the next measurement rests on."""
        assert self._tilt is not None
        groups, columns = len(experience.group_B.unique()), self._seen[0].columns
        rewards, clip = len(experience.scores.names), self._tilt.clip
        sums_GRK2 = torch.zeros(groups, rewards, columns, 2, dtype=torch.float64)
        for seen in self._seen:
            predicted_NR, target_NR = head.predict(seen).cpu().double(), seen.target_NR.cpu()
            term_NR = tangent_terms(1 + target_NR / clip, 1 + predicted_NR / clip, self._tilt.alpha) - 1
            valid_NR = target_NR.isfinite()
            both_NR2 = torch.stack([valid_NR.double(), term_NR.where(valid_NR, 0.0)], dim=-1)
            for row in range(rewards):
                sums_GRK2[:, row].index_put_((seen.group_N, seen.column_N), both_NR2[:, row], accumulate=True)
        n, s = total(sums_GRK2.to(experience.group_B.device)).cpu().unbind(-1)
        sums = torch.stack([(n > 0).double(), n, s, s * s, s * n, n * n]).sum(1)
        self._sums = self._sums + sums if self._sums.shape == sums.shape else sums

    @torch.no_grad()
    def measure(self, probe: Probe, tilt: Tilt) -> Evidence:
        """The mean terms since the last call."""
        began, experience = time.perf_counter(), probe.experience
        rewards, steps = len(experience.scores.names), len(probe.levels) - 1
        calls, moments = 0, [[UNKNOWN] * steps for _ in range(rewards)]
        if self._sums.numel():
            again_RB = probe.score(experience.rollout.images_B3HW, experience.rollout.batch.prompts)
            calls = again_RB.values_RB.numel()
            clean = self._clean_moments(again_RB.values_RB.double().cpu(), own_scores(probe), probe, tilt)
            for row, last in enumerate(clean):
                moments[row] = [_moment(self._sums[:, row, k + 1].tolist()) for k in range(steps - 1)]
                moments[row].append(last if _told(moments[row], tilt.alpha) else UNKNOWN)
        seconds, self._seconds = self._seconds + time.perf_counter() - began, 0.0
        self._sums = torch.zeros(0)
        return evidence_of(probe, moments, reward_calls=calls, seconds=seconds)

    def _clean_moments(self, again_RB: Tensor, score_RB: Tensor, probe: Probe, tilt: Tilt) -> list[Moment]:
        """E[ρ^α] of each reward at t = 0, from scoring the same pictures twice."""
        return [
            attempted(
                partial(
                    predicted_moment,
                    again_B,
                    score_B,
                    probe.experience.group_B.cpu(),
                    alpha=tilt.alpha,
                    normalisation=tilt.normalisation,
                    clip=tilt.clip,
                    regression="linear",
                )
            )
            for again_B, score_B in zip(again_RB, score_RB, strict=True)
        ]

    def state_dict(self) -> Mapping[str, Any]:
        """The head, its optimiser, and the terms since the last recomputation."""
        if self.head is None or self._optimiser is None:
            return {"sums": self._sums, **self._saved}
        return {
            "head": self.head.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "sums": self._sums,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keeps the state until the latents' shape is known."""
        self._sums = state["sums"]
        self._saved = {key: state[key] for key in ("head", "optimiser") if key in state}


def _squared_errors(head: Head, seen: Seen) -> Tensor:
    """Sum over pairs and rewards that are not masked."""
    target_NR = seen.target_NR.float()
    error_NR = (head.predict(seen) - target_NR.nan_to_num()).square()
    return error_NR.where(target_NR.isfinite(), 0.0).sum()


def _moment(sums: list[float]) -> Moment:
    """1 + Σ s / Σ n, with the standard error of a ratio over clusters."""
    clusters, n, s, ss, sn, nn_ = sums
    if clusters < 2:
        return UNKNOWN
    mean = s / n
    squares = max(ss - 2 * mean * sn + mean * mean * nn_, 0.0) * clusters / (clusters - 1)
    return Moment(value=1 + mean, error=squares**0.5 / n, samples=int(n), units=int(clusters))


def _told(moments: list[Moment], alpha: float) -> bool:
    """Whether the head can tell a reward at one of the levels."""

    def row(field: str) -> Tensor:
        return torch.tensor([[getattr(moment, field) for moment in moments]], dtype=torch.float64)

    value = row("value")
    errors = row("error") / value / (alpha - 1)
    return bool(detected(divergence_of_moments(value, alpha), errors, row("units")))
