"""The NPZ format of ReCAST's released code: profiles as density ratios, and a table of W.

`sigmas` holds the K + 1 noise levels from 1 to 0; `ratio__NAME` density ratios N × K at the steps'
destinations, in the scheduler's order. Beside them this package writes `rewards` and `table`: W, stored from
clean to noise as the released code stores its tables, so turned round against everything else here; and
`evidence_…`, the moments with their errors and the divergence that they are of, so that W can be made again.

Reference: the released code of "ReCAST", 2026 (arXiv 2609.13425).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recast_pl.credit.evidence import Evidence
from recast_pl.credit.profile import Profile

PREFIX = "ratio__"
TILT = ("alpha", "normalisation", "clip")
TABLES = ("moments", "errors", "samples", "units")  # of the evidence, R × K


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Evidence, and which divergence it is of."""

    evidence: Evidence
    alpha: float
    normalisation: str
    clip: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """What a file holds, in the scheduler's order."""

    names: tuple[str, ...]  # R
    levels: Tensor  # K + 1, float64
    ratios: Mapping[str, Tensor]  # by name, N × K, float64; may be empty
    table_RK: Tensor | None  # W, rows λ/Σλ; in the order of `names`
    measured: Measured | None  # what the ratios stand for, where this package wrote the file


def equivalent_ratios(moments_K: Tensor, alpha: float, *, rows: int = 64) -> Tensor:
    """Density ratios [rows, K] of mean 1 whose plug-in E[g^α] is the given moment.

    Estimators measure moments, not ratios; the format wants ratios. One row of each column is high and the
    others equal and low, which any moment from 1 to rows^(α−1) can be met with.

    Raises:
        ValueError: for a moment outside that range.

    >>> ratios = equivalent_ratios(torch.tensor([1.0, 1.25]), alpha=2.0)
    >>> [round(x, 12) for x in ratios.pow(2).mean(0).tolist()]
    [1.0, 1.25]
    """
    moments = moments_K.double().clamp_min(1.0)
    if not (moments < rows ** (alpha - 1)).all():
        raise ValueError(f"a moment of {float(moments.max()):g} needs more than {rows} rows at alpha {alpha:g}")
    low, high = torch.ones_like(moments), torch.full_like(moments, float(rows))
    for _ in range(200):
        top = (low + high) / 2
        rest = (rows - top) / (rows - 1)
        too_large = (top.pow(alpha) + (rows - 1) * rest.pow(alpha)) / rows > moments
        low, high = torch.where(too_large, low, top), torch.where(too_large, top, high)
    ratios = ((rows - low) / (rows - 1)).expand(rows, -1).clone()
    ratios[0] = low
    return ratios


def equivalent_profile(profile: Profile, alpha: float) -> dict[str, Tensor]:
    """Density ratios by reward whose plug-in divergences are the profile's monotone curves."""
    return {
        name: equivalent_ratios(((alpha - 1) * row_K).exp(), alpha)
        for name, row_K in zip(profile.names, profile.monotone_RK, strict=True)
    }


def write(
    path: Path,
    *,
    names: tuple[str, ...],
    levels: Tensor,
    ratios: Mapping[str, Tensor],
    table_RK: Tensor,
    measured: Measured | None = None,
) -> None:
    """Writes a file and reads it back.

    Raises:
        OSError: where what is read is not what was written.
    """
    arrays = {PREFIX + name: ratios[name].double().numpy() for name in names if name in ratios}
    arrays |= {
        "sigmas": levels.double().numpy(),
        "rewards": np.asarray(names),
        "table": table_RK.flip(1).double().numpy(),
    }
    if measured is not None:
        arrays |= {f"evidence_{key}": np.asarray(getattr(measured, key)) for key in TILT}
        arrays |= {f"evidence_{key}": getattr(measured.evidence, f"{key}_RK").numpy() for key in TABLES}
    np.savez(path, allow_pickle=False, **arrays)
    back = read(path)
    assert back.table_RK is not None
    same = back.names == names and torch.equal(back.table_RK, table_RK.double())
    same = same and torch.equal(back.levels, levels.double())
    if not (same and all(torch.equal(back.ratios[key], value.double()) for key, value in ratios.items())):
        raise OSError(f"{path}: what was read back is not what was written")


def read(path: Path) -> Released:
    """Reads and checks a file.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: for a file of another format, naming what is wrong.
    """
    with np.load(path, allow_pickle=False) as stored:
        arrays = dict(stored)
    if "sigmas" not in arrays:
        raise ValueError(f"{path}: no `sigmas`; it holds {', '.join(arrays) or 'nothing'}")
    levels = torch.from_numpy(arrays["sigmas"].astype(np.float64))
    steps = len(levels) - 1
    falls = steps >= 1 and bool((levels.diff() < 0).all())
    if not falls or levels[-1] != 0 or not 0 < levels[0] <= 1 + 1e-6:
        raise ValueError(f"{path}: `sigmas` must fall from noise (at most 1) to 0, got {levels.tolist()}")
    ratios = {
        key.removeprefix(PREFIX): torch.from_numpy(value.astype(np.float64))
        for key, value in arrays.items()
        if key.startswith(PREFIX)
    }
    for name, ratio in ratios.items():
        if ratio.ndim != 2 or ratio.shape[1] != steps or not (ratio.isfinite().all() and (ratio >= 0).all()):
            raise ValueError(
                f"{path}: `{PREFIX}{name}` must be finite, at least 0 and N × {steps}, got {tuple(ratio.shape)}"
            )
    names = tuple(str(name) for name in arrays["rewards"]) if "rewards" in arrays else tuple(ratios)
    table = None
    if "table" in arrays:
        table = torch.from_numpy(arrays["table"].astype(np.float64)).flip(1)
        if table.shape != (len(names), steps) or not (table.isfinite().all() and (table >= 0).all()):
            raise ValueError(
                f"{path}: `table` must be finite, at least 0 and {len(names)} × {steps} (rewards × steps), "
                f"got {tuple(table.shape)}"
            )
    measured = _measured(arrays, names, levels) if "evidence_alpha" in arrays else None
    return Released(names=names, levels=levels, ratios=ratios, table_RK=table, measured=measured)


def _measured(arrays: Mapping[str, Any], names: tuple[str, ...], levels: Tensor) -> Measured:
    tables = {f"{key}_RK": torch.from_numpy(arrays[f"evidence_{key}"].astype(np.float64)) for key in TABLES}
    return Measured(
        evidence=Evidence(names=names, levels=levels, reward_calls=0, seconds=0.0, **tables),
        alpha=float(arrays["evidence_alpha"]),
        normalisation=str(arrays["evidence_normalisation"]),
        clip=float(arrays["evidence_clip"]),
    )
