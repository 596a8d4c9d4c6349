"""What a run shows: sample grids, the table of rewards before and after, and the record that studies read."""

from recast_pl.callbacks.report import EvaluationReport
from recast_pl.callbacks.run_record import RunRecord
from recast_pl.callbacks.sample_grid import SampleGrid

__all__ = ["EvaluationReport", "RunRecord", "SampleGrid"]
