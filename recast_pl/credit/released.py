"""The NPZ format of ReCAST's released code: profiles as density ratios, and a table of W.

`sigmas` holds the K + 1 noise levels from 1 to 0; `ratio__NAME` density ratios N × K at the steps'
destinations, in the scheduler's order. Beside them this package writes `rewards` and `table`: W, stored from
clean to noise as the released code stores its tables, so turned round against everything else here.

Reference: the released code of "ReCAST", 2026 (arXiv 2609.13425).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recast_pl.credit.evidence import Profile

PREFIX = "ratio__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """What a file holds, in the scheduler's order."""

    names: tuple[str, ...]  # R
    levels: Tensor  # K + 1, float64
    ratios: Mapping[str, Tensor]  # by name, N × K, float64; may be empty
    table_RK: Tensor | None  # W, rows λ/Σλ; in the order of `names`


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
    np.savez(path, allow_pickle=False, **arrays)
    back = read(path)
    assert back.table_RK is not None
    same = back.names == names and torch.equal(back.table_RK, table_RK.double())
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
    if steps < 1 or not (levels.diff() < 0).all() or levels[-1] != 0:
        raise ValueError(f"{path}: `sigmas` must fall from noise to 0, got {levels.tolist()}")
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
        if table.shape != (len(names), steps):
            raise ValueError(
                f"{path}: `table` must be {len(names)} × {steps} (rewards × steps), got {tuple(table.shape)}"
            )
    return Released(names=names, levels=levels, ratios=ratios, table_RK=table)
