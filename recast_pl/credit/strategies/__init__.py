"""Credit strategies, one file each: budgets and noise levels (and evidence) to W."""

from recast_pl.credit.strategies.fixed import Fixed
from recast_pl.credit.strategies.noise_level import NoiseLevel
from recast_pl.credit.strategies.recast import ReCAST
from recast_pl.credit.strategies.separable import Separable
from recast_pl.credit.strategies.snr import SNR
from recast_pl.credit.strategies.stage import Stage
from recast_pl.credit.strategies.stepwise_gain import StepwiseGain
from recast_pl.credit.strategies.window import Window

__all__ = ["SNR", "Fixed", "NoiseLevel", "ReCAST", "Separable", "Stage", "StepwiseGain", "Window"]
