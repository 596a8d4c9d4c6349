"""What an update trains on: which pairs of sample and step, what is known at each, and in which passes."""

from recast_pl.update.geometry import check_whole_groups, noised_steps, stochastic_steps, trainable_steps
from recast_pl.update.pairs import Pairs, spare_pairs, training_pairs
from recast_pl.update.passes import Pass, planned_passes
from recast_pl.update.samples import renoise, transitions

__all__ = [
    "Pairs",
    "Pass",
    "check_whole_groups",
    "noised_steps",
    "planned_passes",
    "renoise",
    "spare_pairs",
    "stochastic_steps",
    "trainable_steps",
    "training_pairs",
    "transitions",
]
