"""GenEval: a detector's boxes and masks, and rules that read them."""

from recast_pl.rewards.geneval.reward import GenEval

__all__ = ["GenEval"]
