"""What one iteration says about itself, as curves. The same keys on every process and in every iteration."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from recast_pl.types import Scores, Weights


def reward_values(scores: Scores) -> dict[str, Any]:
    """Mean, spread and number of masked scores of each reward, over all processes' samples."""
    values: dict[str, Any] = {}
    for row, (name, valid) in enumerate(zip(scores.names, scores.valid_RB, strict=True)):
        good = scores.values_RB[row][valid].double()
        values[f"train/{name}"] = good.mean()
        values[f"train_spread/{name}"] = good.std(correction=0)
        values[f"train_masked/{name}"] = float((~valid).sum())
    return values


def update_values(advantages_BK: Tensor, weights: Weights, parts: Mapping[str, Tensor]) -> dict[str, Any]:
    """How large advantages were at the steps that count, and the parts of the loss."""
    advantages_BK = advantages_BK[:, weights.step_weights_BK.any(0).to(advantages_BK.device)]
    return {
        "advantages/spread": advantages_BK.std(),
        "advantages/largest": advantages_BK.abs().max(),
        **{f"loss/{key}": value for key, value in parts.items()},
    }


def time_values(seconds: Mapping[str, float], *, samples: int) -> dict[str, Any]:
    """Seconds by stage and in all, and samples per second."""
    total = sum(seconds.values())
    return {
        "time/iteration": total,
        "time/images_per_second": samples / total,
        **{f"time/{stage}": spent for stage, spent in seconds.items()},
    }
