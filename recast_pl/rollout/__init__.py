"""Rollouts: clean samples of the rollout policy, from keyed noise."""

from recast_pl.rollout.ode import ODERollout, RolloutSampler
from recast_pl.rollout.solvers import ancestral, clean_estimate, euler

__all__ = ["ODERollout", "RolloutSampler", "ancestral", "clean_estimate", "euler"]
