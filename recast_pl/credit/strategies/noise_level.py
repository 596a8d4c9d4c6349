"""NoiseLevel: one time weight for all rewards, from the noise that a stochastic step puts in."""

from collections.abc import Sequence

from torch import Tensor

from recast_pl.credit.base import CreditStrategy
from recast_pl.rollout.transition import flow_grpo_steps


class NoiseLevel(CreditStrategy):
    """W = λ/Σλ ⊗ w/Σw with w_j = σ(t_j) √(t_j − t_{j+1}), the noise that step j puts in.

    σ(t) = a √(t / (1 − t)) is Flow-GRPO's, as `SDERollout` draws it; its factor a falls out. A step that
    explores much counts much. K·W has columns of mean 1. Budgets are kept; columns differ, by design.

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
        injected_K = flow_grpo_steps(levels, noise_level=1.0).std_N
        return rows[:, None] * (injected_K / injected_K.sum())
