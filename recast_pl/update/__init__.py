"""What an iteration's update trains on: which pairs of sample and step, and what is known at each."""

from recast_pl.update.geometry import check_even_updates, check_whole_groups, trained_steps
from recast_pl.update.pairs import Pairs, trainable_steps, training_pairs
from recast_pl.update.samples import renoise, training_samples, transitions

__all__ = [
    "Pairs",
    "check_even_updates",
    "check_whole_groups",
    "renoise",
    "trainable_steps",
    "trained_steps",
    "training_pairs",
    "training_samples",
    "transitions",
]
