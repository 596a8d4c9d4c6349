"""SNR: one time weight for all rewards, from the signal-to-noise ratio alone."""

from collections.abc import Sequence

from torch import Tensor

from recast_pl.credit.base import CreditStrategy
from recast_pl.path import signal_to_noise


class SNR(CreditStrategy):
    """W = λ/Σλ ⊗ w/Σw with w_j = min(SNR(t_j), maximum) and SNR(t) = ((1 − t)/t)².

    Budgets are kept, but by design its columns are not equal: steps near the clean end count more, those from
    pure noise not at all. Objectives take any W; only the total weight of a step then differs between steps.
    A last step that starts below `model.min_noise_level` is not trained, and has the largest weight here: .42
    of the whole in the embedded pipeline's 10 steps.

    Args:
        maximum: where the ratio is clipped, above 0.

    Reference: after Hang et al., "Efficient diffusion training via min-SNR weighting strategy", 2023.
    """

    def __init__(self, *, maximum: float = 5.0) -> None:
        if not maximum > 0:
            raise ValueError(f"credit.strategy.init_args.maximum: expected above 0, got {maximum}")
        self.maximum = maximum

    def table(self, names: Sequence[str], budgets_R: Tensor, levels: Tensor) -> Tensor:
        """See the class.

        >>> import torch
        >>> SNR(maximum=3.0).table(("a",), torch.tensor([1.0]), torch.tensor([1.0, 0.5, 0.25, 0.0])).tolist()
        [[0.0, 0.25, 0.75]]
        """
        t_K = levels[:-1].double()
        ratio_K = signal_to_noise(t_K).clamp_max(self.maximum)
        rows = budgets_R.double() / budgets_R.double().sum()
        share_K = ratio_K / ratio_K.sum() if ratio_K.sum() > 0 else ratio_K + 1 / len(ratio_K)
        return rows[:, None] * share_K
