"""StepwiseGain: a reward counts at the steps where its preview moves."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from recast_pl.credit.base import CreditStrategy
from recast_pl.credit.estimators.preview_gains import GainMeter
from recast_pl.credit.probe import Probe


class StepwiseGain(CreditStrategy):
    """W_mj = λ_m/Σλ · s_mj / Σ_j s_mj, with s_mj² = E[Var(r_m(x̂0(t_{j+1})) − r_m(x̂0(t_j)) | prompt)].

    s is the root mean square, within prompts, of what step j adds to the reward of the one-step clean estimate
    x̂0(t) = x_t − t v(x_t, t), along stochastic trajectories (`preview_gains.noising_path`); at clean the
    sample's own score. Rows are the budgets; columns are not equal, by design. A reward without any gain, or
    all masked, has an even row.

    What differs from the paper: there the gain of a sample's own trajectory is the reward of that sample's
    step, and its sign counts. Advantages here are mixed from scores of the finished sample by a W of rewards
    and steps, so what is kept of the gains is their size: a step whose gains tell samples of a prompt apart
    counts much, and the sample's final advantage says in which direction. That one spread is taken over all
    steps of a reward, so that sizes survive the normalisation, is our reading. The paper's own sampler is not
    in here.

    Where x̂0's reward is its posterior mean, gains are uncorrelated and s² is the step's part of the reward's
    variance: the gain in R², which ReCAST's Δ is for small signals. A reward whose previews are noise counts
    noise as gains; ReCAST's does not.

    Costs K network calls and K reward calls for each sample that is looked at.

    Args:
        samples: of an iteration and process, how many are looked at (a multiple of the group size keeps groups
            whole); None: all.
        memory: factor on the weight of older evidence at each recomputation, in [0, 1].

    Reference: Savani et al., "Stepwise credit assignment for GRPO on flow-matching models", 2026 (arXiv
    2603.28718).
    """

    needs_evidence = True

    def __init__(self, *, samples: int | None = None, memory: float = 0.9) -> None:
        self.meter = GainMeter(samples=samples, memory=memory)

    @property
    def ready(self) -> bool:
        """Whether gains are known."""
        return self.meter.sizes_RK is not None

    def observe(self, probe: Probe) -> None:
        """Measures, and averages with what was measured before."""
        self.meter.observe(probe)

    def table(self, names: Sequence[str], budgets_R: Tensor, levels: Tensor) -> Tensor:
        """See the class.

        Raises:
            RuntimeError: before any evidence.
        """
        sizes_RK = self.meter.sizes_RK
        if sizes_RK is None:
            raise RuntimeError("StepwiseGain's W is asked for before any evidence: call observe() first")
        rows = budgets_R.double() / budgets_R.double().sum()
        return rows[:, None] * sizes_RK

    def state_dict(self) -> Mapping[str, Any]:
        """The averaged gains."""
        return self.meter.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts `state_dict` back."""
        self.meter.load_state_dict(state)
