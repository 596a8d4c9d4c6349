"""What figures share: colours, and how they reach a logger."""

from recast_pl.figures.logging import log_figure

__all__ = ["log_figure"]
