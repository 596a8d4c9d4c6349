"""Policies: text-to-image flow models with a trained, an old and a reference set of weights."""

from recast_pl.policy.base import Policy, Role
from recast_pl.policy.full_parameters import FullFineTuning
from recast_pl.policy.sd3 import SD3Policy

__all__ = ["FullFineTuning", "Policy", "Role", "SD3Policy"]
