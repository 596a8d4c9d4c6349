"""NoiseLevel: one time weight for all rewards, from the noise that a stochastic step puts in."""

from collections.abc import Sequence

from torch import Tensor

from recast_pl.credit.base import CreditStrategy


class NoiseLevel(CreditStrategy):
    """W = λ/Σλ ⊗ w/Σw with w_j = σ(t_j) √(t_j − t_{j+1}), the noise that step j puts in.

    σ(t) = a √(t / (1 − t)) is Flow-GRPO's; its factor a falls out. A step that explores much counts much. K·W
    has columns of mean 1. Budgets are kept; the columns are not equal, by design.

    Reference: He et al., "TempFlow-GRPO: When timing matters for GRPO in flow models", 2025 (arXiv 2508.04324),
    for the weight; Liu et al., "Flow-GRPO", 2025 (arXiv 2505.05470), for σ. The paper's other parts, branching
    at one stochastic step and groups of one seed, are no weights and not in here. Its text is not at hand: the
    formula is from its abstract and third-party notes, the mean of 1 is our reading of its normalisation.
    """

    def table(self, names: Sequence[str], budgets_R: Tensor, levels: Tensor) -> Tensor:
        """See the class.

        >>> import torch
        >>> table = NoiseLevel().table(("a",), torch.ones(1), torch.tensor([1.0, 0.5, 0.25, 0.0]))
        >>> [round(weight, 4) for weight in table[0].tolist()]
        [0.5591, 0.2795, 0.1614]
        """
        rows = budgets_R.double() / budgets_R.double().sum()
        injected_K = injected_noise(levels)
        return rows[:, None] * (injected_K / injected_K.sum())


def injected_noise(levels: Tensor) -> Tensor:
    """σ(t_j) √(t_j − t_{j+1}) of each step, σ(t) = √(t / (1 − t)): K + 1 descending levels → K, float64.

    At t = 1, where σ is infinite, the denominator is 1 − t_1, of the next level: Flow-GRPO's own way out.

    >>> import torch
    >>> [round(noise, 4) for noise in injected_noise(torch.tensor([1.0, 0.5, 0.25, 0.0])).tolist()]
    [1.0, 0.5, 0.2887]
    """
    t = levels.double()
    below_one_K = t[:-1].where(t[:-1] < 1, t[1])
    return (t[:-1] / (1 - below_one_K) * (t[:-1] - t[1:])).sqrt()
