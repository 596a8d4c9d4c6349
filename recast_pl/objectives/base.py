"""What every objective is: a loss over noised samples, their velocities and per-step advantages."""

from abc import ABC, abstractmethod

from recast_pl.types import Loss, NoisedSamples, Velocities


class Objective(ABC):
    """Turns velocities at noised samples into a loss; holds its coefficients and no state."""

    needs_old: bool  # whether `velocities.old_NCHW` is read

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether `velocities.reference_NCHW` is read."""

    @abstractmethod
    def loss(self, velocities: Velocities, samples: NoisedSamples) -> Loss:
        """The loss over N pairs; gradients flow through `velocities.current_NCHW` alone."""
