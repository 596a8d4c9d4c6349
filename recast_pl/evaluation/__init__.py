"""Evaluation: statistics of scores, and pictures written to a folder."""

from recast_pl.evaluation.pictures import PictureWriter
from recast_pl.evaluation.statistics import ScoreStatistics

__all__ = ["PictureWriter", "ScoreStatistics"]
