"""Statistics of pairwise judgements: win rate, its interval, and how much the places count.

Every pair of pictures is judged twice, once in each order. A win is worth 1, a tie ½, a loss 0; a pair's result
is the mean over its two orders, so that a judge who always prefers the first place says ½ of every pair.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Order = Literal["AB", "BA"]  # whose picture comes first
Verdict = Literal["first", "second", "tie"]
ORDERS: tuple[Order, Order] = ("AB", "BA")
Z95 = 1.959963984540054  # of the normal distribution, two-sided 95 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the judge said of one pair in one order."""

    sample: int  # of the pair
    order: Order
    verdict: Verdict | None  # None: an answer that could not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """The outcome for A, over the pairs that were judged in both orders."""

    pairs: int  # all that there are
    judged: int  # in both orders
    prompts: int  # different ones among the judged pairs
    wins: int  # pairs with a result above ½
    ties: int
    losses: int
    win_rate: float | None  # mean result; None where no pair is judged
    low: float | None  # 95 % interval
    high: float | None
    first_place: float | None  # share of the first place in all verdicts that are no ties; ½ without bias
    consistent: float | None  # share of judged pairs where both orders say the same
    unparsable: int  # answers
    missing: int  # answers that never came


def points(verdict: Verdict, order: Order) -> float:
    """What a verdict is worth for A.

    >>> points("first", "AB"), points("first", "BA"), points("tie", "AB")
    (1.0, 0.0, 0.5)
    """
    if verdict == "tie":
        return 0.5
    return float((verdict == "first") == (order == "AB"))


def wilson(share: float, count: float) -> tuple[float, float]:
    """95 % interval of a share in [0, 1] of `count` independent observations.

        (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n)

    Also right, if wider than need be, for results between 0 and 1: with mean p their variance is at most
    p(1 − p).

    >>> [round(end, 4) for end in wilson(0.5, 100)]
    [0.4038, 0.5962]

    Reference: Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    middle = share + Z95**2 / (2 * count)
    half = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    scale = 1 + Z95**2 / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def summarise(judgements: Iterable[Judgement], prompts: Mapping[int, str]) -> Preferences:
    """The outcome over all pairs.

    Args:
        judgements: at most one of each pair and order.
        prompts: of every pair, by sample. Pictures of one prompt are not independent, so that the interval
            counts prompts, not pairs.
    """
    said = {(judgement.sample, judgement.order): judgement.verdict for judgement in judgements}
    verdicts = [verdict for verdict in said.values() if verdict is not None]
    results = {}
    for sample in prompts:
        both = [(order, said.get((sample, order))) for order in ORDERS]
        parts = [points(verdict, order) for order, verdict in both if verdict is not None]
        if len(parts) == len(ORDERS):
            results[sample] = parts
    means = [sum(parts) / len(parts) for parts in results.values()]
    texts = {prompts[sample] for sample in results}
    win_rate = math.fsum(means) / len(means) if means else None
    low, high = wilson(win_rate, len(texts)) if win_rate is not None else (None, None)
    decided = [verdict for verdict in verdicts if verdict != "tie"]
    return Preferences(
        pairs=len(prompts),
        judged=len(results),
        prompts=len(texts),
        wins=sum(mean > 0.5 for mean in means),
        ties=sum(mean == 0.5 for mean in means),
        losses=sum(mean < 0.5 for mean in means),
        win_rate=win_rate,
        low=low,
        high=high,
        first_place=decided.count("first") / len(decided) if decided else None,
        consistent=sum(one == two for one, two in results.values()) / len(results) if results else None,
        unparsable=sum(verdict is None for verdict in said.values()),
        missing=len(ORDERS) * len(prompts) - len(said),
    )
