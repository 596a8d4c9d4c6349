"""Rollouts: clean samples of the rollout policy, from keyed noise."""

from recast_pl.rollout.base import Drawn, Keys, RolloutSampler
from recast_pl.rollout.ode import ODERollout
from recast_pl.rollout.sde import SDERollout
from recast_pl.rollout.solvers import ancestral, clean_estimate, euler, multistep
from recast_pl.rollout.window import StochasticWindow

__all__ = [
    "Drawn",
    "Keys",
    "ODERollout",
    "RolloutSampler",
    "SDERollout",
    "StochasticWindow",
    "ancestral",
    "clean_estimate",
    "euler",
    "multistep",
]
