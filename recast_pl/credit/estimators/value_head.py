"""ValueHead: a small network that learns to tell rewards from noisy latents while the policy trains."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast_pl.credit.estimators.base import ProfileEstimator, Tilt
from recast_pl.credit.evidence import Evidence, Probe
from recast_pl.credit.moments import Normalisation
from recast_pl.credit.regression import density_ratio, tangent_terms
from recast_pl.noise import keyed_generator
from recast_pl.rollout.solvers import clean_estimate
from recast_pl.types import Experience, UpdatePart


class Head(nn.Module):
    """R standardised rewards from x_t, the clean estimate, the level and the pooled prompt.

    Args:
        channels: C of the latents.
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
        seen = self.picture(torch.cat([x_t, clean], dim=1))
        level = torch.stack([t_N, t_N.square()], dim=1)
        predicted: Tensor = self.joint(torch.cat([seen, self.prompt(pooled), level], dim=1))
        return predicted


class ValueHead(ProfileEstimator):
    """E[ρ | x_t, c] by regression on the pairs that the policy update draws anyway.

    No further reward or denoiser calls. Every pair is predicted before the head learns from it, so predictions
    are out of sample as the tangent bound asks (`recast_pl.credit.regression`): a head that has learnt nothing
    reports no discriminability, not a wrong one. The head sees detached tensors and has an optimiser of its
    own: the policy's gradients are what they are without it.

    Evidence at a step's source level t_j belongs to column j − 1; the clean end is ρ itself, taken as a
    function of the picture. Levels that are not trained take the moment of the noisier neighbour.

    Args:
        width: of the head's hidden layers.
        learning_rate: of its AdamW.
        seed: of its initialisation.

    Reference: after prefix values as in "Latent Reward Registers" (arXiv 2608.03929).
    """

    def __init__(self, *, width: int = 32, learning_rate: float = 1e-3, seed: int = 0) -> None:
        for name, value in (("width", width), ("learning_rate", learning_rate)):
            if not value > 0:
                raise ValueError(
                    f"credit.strategy.init_args.estimator.init_args.{name}: expected above 0, got {value}"
                )
        self.width, self.learning_rate, self.seed = width, learning_rate, seed
        self.head: Head | None = None
        self._optimiser: torch.optim.Optimizer | None = None
        self._saved: Mapping[str, Any] = {}
        self._tilt: Tilt | None = None
        self._seconds = 0.0
        self._sums_3RK = torch.zeros(0)  # count, Σ terms, Σ terms²; by source step

    def check(self, tilt: Tilt) -> None:
        """Keeps the order and the normalisation that the terms are made for."""
        self._tilt = tilt

    def watch(self, part: UpdatePart) -> None:
        """Predicts, keeps the terms, learns."""
        assert self._tilt is not None
        began = time.perf_counter()
        samples, velocities = part.samples, part.velocities
        known = velocities.old_NCHW if velocities.old_NCHW is not None else velocities.current_NCHW
        t = samples.t_N.view(-1, *[1] * (samples.x0_NCHW.ndim - 1))
        x_t = (1 - t) * samples.x0_NCHW + t * samples.noise_NCHW
        clean = clean_estimate(x_t, known.detach().float(), t)
        pooled = part.experience.rollout.text.pooled_BD[part.row_N.to(known.device)].detach()
        targets_NR = self._targets(part.experience)[part.row_N].to(known.device)
        with torch.enable_grad():
            head, optimiser = self._ready(x_t, pooled, rewards=targets_NR.shape[1])
            predicted_NR = head(x_t.detach(), clean.detach(), samples.t_N.detach(), pooled)
            valid_NR = targets_NR.isfinite()
            errors = F.mse_loss(predicted_NR, targets_NR.nan_to_num().float(), reduction="none").where(
                valid_NR, 0.0
            )
            optimiser.zero_grad()
            (errors.sum() / valid_NR.sum().clamp_min(1)).backward()
            optimiser.step()
        self._keep(predicted_NR.detach().cpu().double(), targets_NR.cpu(), part)
        self._seconds += time.perf_counter() - began

    def _targets(self, experience: Experience) -> Tensor:
        """A (ρ − 1), this process's samples: [B, R], of the size of a standardised reward."""
        assert self._tilt is not None
        scores_RB, group_B = experience.scores.values_RB.double().cpu(), experience.group_B.cpu()
        rows = []
        for row_B in scores_RB:
            valid = row_B.isfinite()
            target_B = torch.full_like(row_B, torch.nan)
            normalisation: Normalisation = self._tilt.normalisation
            rho = density_ratio(row_B[valid], group_B[valid], normalisation=normalisation, clip=self._tilt.clip)
            target_B[valid] = (rho - 1) * self._tilt.clip
            rows.append(target_B)
        return torch.stack(rows, dim=1)[experience.own]

    def _ready(self, x_t: Tensor, pooled: Tensor, *, rewards: int) -> tuple[Head, torch.optim.Optimizer]:
        if self.head is None or self._optimiser is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(keyed_generator(self.seed, rewards).initial_seed())
                head = Head(
                    channels=x_t.shape[1], pooled=pooled.shape[1], rewards=rewards, width=self.width
                ).to(x_t.device)
            self.head = head
            self._optimiser = torch.optim.AdamW(head.parameters(), lr=self.learning_rate)
            if self._saved:
                head.load_state_dict(self._saved["head"])
                self._optimiser.load_state_dict(self._saved["optimiser"])
                self._saved = {}
        return self.head, self._optimiser

    def _keep(self, predicted_NR: Tensor, targets_NR: Tensor, part: UpdatePart) -> None:
        assert self._tilt is not None
        count = len(part.experience.rollout.levels) - 1
        rewards = targets_NR.shape[1]
        if self._sums_3RK.shape != (3, rewards, count):
            self._sums_3RK = torch.zeros(3, rewards, count, dtype=torch.float64)
        clip = self._tilt.clip
        for r in range(rewards):
            valid = targets_NR[:, r].isfinite()
            terms = tangent_terms(
                1 + targets_NR[valid, r] / clip, 1 + predicted_NR[valid, r] / clip, self._tilt.alpha
            )
            for row, value in enumerate((torch.ones_like(terms), terms, terms.square())):
                self._sums_3RK[row, r].index_add_(0, part.step_N[valid], value)

    @torch.no_grad()
    def measure(self, probe: Probe, tilt: Tilt) -> Evidence:
        """The mean terms since the last call; where there are none 1, with an error as large as D can be."""
        experience = probe.experience
        names, levels = experience.scores.names, experience.rollout.levels
        steps, unknown = len(levels) - 1, 1 / tilt.clip**2
        moments_RK = torch.ones(len(names), steps, dtype=torch.float64)
        errors_RK = torch.full_like(moments_RK, unknown)
        sums = self._sums_3RK if self._sums_3RK.numel() else torch.zeros(3, len(names), steps)
        samples = int(sums[0].max())
        if samples:
            for r in range(len(names)):
                for k in range(steps - 1):
                    n, total, squares = (float(sums[row, r, k + 1]) for row in range(3))
                    if n > 1:
                        mean = total / n
                        moments_RK[r, k] = mean
                        errors_RK[r, k] = (max(squares / n - mean * mean, 0.0) / (n - 1)) ** 0.5
                    elif k:
                        moments_RK[r, k], errors_RK[r, k] = moments_RK[r, k - 1], unknown
            clean = self._clean_moment(experience, tilt)
            moments_RK[:, -1], errors_RK[:, -1] = clean, 0.0
        seconds, self._seconds = self._seconds, 0.0
        self._sums_3RK = torch.zeros(0)
        return Evidence(
            names=names,
            levels=levels,
            moments_RK=moments_RK,
            errors_RK=errors_RK,
            samples=max(samples, 1),
            reward_calls=0,
            seconds=seconds,
        )

    def _clean_moment(self, experience: Experience, tilt: Tilt) -> Tensor:
        """E[ρ^α] of each reward at t = 0."""
        rows = []
        for row_B in experience.scores.values_RB.double().cpu():
            valid = row_B.isfinite()
            rho = density_ratio(
                row_B[valid],
                experience.group_B.cpu()[valid],
                normalisation=tilt.normalisation,
                clip=tilt.clip,
            )
            rows.append(rho.clamp_min(0).pow(tilt.alpha).mean())
        return torch.stack(rows)

    def state_dict(self) -> Mapping[str, Any]:
        """The head, its optimiser, and the terms since the last recomputation."""
        if self.head is None or self._optimiser is None:
            return {"sums": self._sums_3RK, **self._saved}
        return {
            "head": self.head.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "sums": self._sums_3RK,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keeps the state until the latents' shape is known."""
        self._sums_3RK = state["sums"]
        self._saved = {key: state[key] for key in ("head", "optimiser") if key in state}
