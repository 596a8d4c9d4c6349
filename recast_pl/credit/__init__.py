"""Credit: the reward-by-timestep matrix W, how it is estimated, and the callback that keeps it."""

from typing import TYPE_CHECKING, Any

from recast_pl.credit import npz
from recast_pl.credit.base import CreditStrategy, Uniform
from recast_pl.credit.estimators import FromFile, PairedCompletions, Preview, ProfileEstimator, ValueHead
from recast_pl.credit.evidence import Evidence
from recast_pl.credit.mathematics.divergence import gains, monotone, renyi_divergence
from recast_pl.credit.mathematics.transport import NotConverged, transport_weights
from recast_pl.credit.plots import history_figure, profile_figure, weights_figure
from recast_pl.credit.probe import Probe
from recast_pl.credit.profile import Profile
from recast_pl.credit.strategies import SNR, Fixed, NoiseLevel, ReCAST, Separable, Stage, StepwiseGain, Window

if TYPE_CHECKING:
    from recast_pl.callbacks.credit_assigner import CreditAssigner

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
    "npz",
    "profile_figure",
    "renyi_divergence",
    "transport_weights",
    "weights_figure",
]


def __getattr__(name: str) -> Any:
    """`recast_pl.credit.CreditAssigner`, the class path of the block `credit`; Lightning waits until then."""
    if name == "CreditAssigner":
        from recast_pl.callbacks.credit_assigner import CreditAssigner

        return CreditAssigner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
