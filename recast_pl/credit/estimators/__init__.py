"""Estimators of discriminability profiles: clean samples to E[g^α] at every noise level."""

from recast_pl.credit.estimators.base import ProfileEstimator
from recast_pl.credit.estimators.from_file import FromFile
from recast_pl.credit.estimators.paired import PairedCompletions
from recast_pl.credit.estimators.preview import Preview
from recast_pl.credit.estimators.value_head import ValueHead

__all__ = ["FromFile", "PairedCompletions", "Preview", "ProfileEstimator", "ValueHead"]
