"""What a run shows: sample grids and the table of rewards before and after."""

from recast_pl.callbacks.report import EvaluationReport
from recast_pl.callbacks.sample_grid import SampleGrid

__all__ = ["EvaluationReport", "SampleGrid"]
