"""Credit: the reward-by-timestep matrix W, how it is estimated, and the callback that keeps it."""

from recast_pl.credit import released
from recast_pl.credit.assigner import CreditAssigner
from recast_pl.credit.base import CreditStrategy, Uniform
from recast_pl.credit.divergence import gains, monotone, renyi_divergence
from recast_pl.credit.estimators import FromFile, PairedCompletions, Preview, ProfileEstimator, ValueHead
from recast_pl.credit.evidence import Evidence
from recast_pl.credit.fixed import Fixed
from recast_pl.credit.noise_level import NoiseLevel
from recast_pl.credit.plots import history_figure, profile_figure, weights_figure
from recast_pl.credit.probe import Probe
from recast_pl.credit.profile import Profile
from recast_pl.credit.recast import ReCAST
from recast_pl.credit.separable import Separable
from recast_pl.credit.snr import SNR
from recast_pl.credit.stage import Stage
from recast_pl.credit.stepwise_gain import StepwiseGain
from recast_pl.credit.transport import NotConverged, transport_weights
from recast_pl.credit.window import Window

__all__ = [
    "SNR",
    "CreditAssigner",
    "CreditStrategy",
    "Evidence",
    "Fixed",
    "FromFile",
    "NoiseLevel",
    "NotConverged",
    "PairedCompletions",
    "Preview",
    "Probe",
    "Profile",
    "ProfileEstimator",
    "ReCAST",
    "Separable",
    "Stage",
    "StepwiseGain",
    "Uniform",
    "ValueHead",
    "Window",
    "gains",
    "history_figure",
    "monotone",
    "profile_figure",
    "released",
    "renyi_divergence",
    "transport_weights",
    "weights_figure",
]
