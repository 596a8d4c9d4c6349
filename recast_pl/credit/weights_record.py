"""W as plain types and tensors: what checkpoints hold, and what everything else reads of them."""

from collections.abc import Mapping
from typing import Any

from recast_pl.credit.base import shares_and_step_weights
from recast_pl.types import Weights


def weights_record(weights: Weights) -> dict[str, Any]:
    """Names, levels, K·W (`values`), and what it is made of where that is known apart."""
    return {
        "names": list(weights.names),
        "levels": weights.levels,
        "values": weights.values_RK,
        "shares": weights.shares_RBK,
        "step_weights": weights.step_weights_BK,
    }


def weights_from_record(record: Mapping[str, Any]) -> Weights:
    """The inverse; records of before shares stood apart have `values` alone, and every step was trained."""
    names, levels = tuple(record["names"]), record["levels"]
    if "shares" in record:
        return Weights(
            names=names,
            levels=levels,
            shares_RBK=record["shares"],
            step_weights_BK=record["step_weights"],
            made_RK=record["values"],
        )
    values_RK = record["values"]
    shares_RK, step_weights_K = shares_and_step_weights(values_RK / values_RK.shape[1], values_RK.sum(1))
    return Weights.of_table(names, levels, shares_RK, step_weights_K, made_RK=values_RK)


def plain_record(weights: Weights) -> dict[str, Any]:
    """W itself in lists, for files of text."""
    table_RK = weights.values_RK / weights.values_RK.shape[1]
    return {"names": list(weights.names), "levels": weights.levels.tolist(), "W": table_RK.tolist()}
