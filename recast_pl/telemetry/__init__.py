"""What a run tells of itself: seconds by stage, and an iteration's curves."""

from recast_pl.telemetry.clock import StageClock

__all__ = ["StageClock"]
