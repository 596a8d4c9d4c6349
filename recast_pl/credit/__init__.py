"""Credit: the reward-by-timestep matrix W, and the callback that keeps it."""

from recast_pl.credit.assigner import CreditAssigner
from recast_pl.credit.base import CreditStrategy, Uniform
from recast_pl.credit.plots import weights_figure

__all__ = ["CreditAssigner", "CreditStrategy", "Uniform", "weights_figure"]
