"""How the averaged weights, which evaluation may use, follow the trained ones."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WeightAverage:
    """decay_i = min(decay, (1 + i) / (10 + i)) in θ_averaged ← decay_i θ_averaged + (1 − decay_i) θ.

    After iteration i, counted from 0; the ramp lets early averages forget the weights that training began with.
    Before the first update the average is those weights.

    Args:
        decay: in [0, 1); DiffusionNFT evaluates with 0.9.

    Reference: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992, in the
    exponential form; the ramp is TensorFlow's `ExponentialMovingAverage`.
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"model.average.decay: expected 0 to below 1, got {self.decay}")

    def at(self, iteration: int) -> float:
        """The decay after iteration i, counted from 0.

        >>> [WeightAverage(decay=0.5).at(i) for i in (0, 8, 100)]
        [0.1, 0.5, 0.5]
        """
        return min(self.decay, (1 + iteration) / (10 + iteration))
