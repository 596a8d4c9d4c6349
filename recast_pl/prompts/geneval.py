"""Prompts of GenEval's six task families over COCO's classes, with the metadata that its scorer reads.

Reference: Ghosh et al., "GenEval: An object-focused framework for evaluating text-to-image alignment", 2023.
The sentences are built here and are not its list of 553; that list is read by `JSONLines`.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recast_pl.prompts.sources import PromptSource
from recast_pl.scenes.coco import COCO_CLASSES, COLOURS, RELATIONS
from recast_pl.types import Prompt

NUMBERS = {2: "two", 3: "three", 4: "four"}
"""The counts that are asked for; beyond four, the detector itself miscounts."""

HELD_OUT_ONE_IN = 5
"""One combination in five is held out."""

_SPOKEN = {"mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard"}
_PORTIONS = {"scissors": "pair of {}scissors", "skis": "pair of {}skis", "broccoli": "head of {}broccoli"}
_PLURALS = {"person": "people", "sheep": "sheep", "knife": "knives", "computer mouse": "computer mice"}


class GenEvalPrompts(PromptSource):
    """Prompts such as "a photo of three cats" or "a photo of a dog left of an umbrella".

    Within a family no prompt comes twice before all its combinations have come once. One combination in five
    is held out, whatever the seed: the order of a pair does not make another combination, nor does a relation
    said from the other side.

    Args:
        count: how many prompts are drawn.
        tasks: relative shares by family (single_object, two_object, counting, colors, position, color_attr);
            a family that is left out, or has the share 0, is not drawn. None: all six alike.
        held_out: from the combinations that training never draws.
        seed: of the draw and its order.
    """

    def __init__(
        self,
        *,
        count: int = 600,
        tasks: dict[str, float] | None = None,
        held_out: bool = False,
        seed: int = 0,
    ) -> None:
        if count < 1:
            raise ValueError(f"GenEvalPrompts.count: expected 1 or more, got {count}")
        shares = dict.fromkeys(FAMILIES, 1.0) if tasks is None else dict(tasks)
        if unknown := shares.keys() - FAMILIES.keys():
            raise ValueError(
                f"GenEvalPrompts.tasks: no family {sorted(unknown)}; there are {', '.join(FAMILIES)}"
            )
        for family, share in shares.items():
            if not (share >= 0 and math.isfinite(share)):
                raise ValueError(
                    f"GenEvalPrompts.tasks.{family}: expected a finite number of 0 or more, got {share}"
                )
        if not any(shares.values()):
            raise ValueError("GenEvalPrompts.tasks: expected at least one family with a share above 0")
        self.count, self.shares, self.held_out, self.seed = count, shares, held_out, seed

    def prompts(self) -> Sequence[Prompt]:
        """See the class."""
        drawn: list[Prompt] = []
        for number, (name, family) in enumerate(FAMILIES.items()):
            wanted = apportion(self.count, [self.shares.get(other, 0.0) for other in FAMILIES])[number]
            # a generator of its own: what one family draws does not depend on the others' shares
            stream = _stream(name, family, self.held_out, np.random.default_rng([self.seed, number]))
            drawn += [next(stream) for _ in range(wanted)]
        order = np.random.default_rng([self.seed, len(FAMILIES)]).permutation(len(drawn))
        return [drawn[i] for i in order]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of prompt: its choices, and what they are made into."""

    choices: tuple[int, ...]  # how many there are, place by place
    build: Callable[..., tuple[str, dict[str, Any]] | None]  # sentence and clauses; None: makes no sense


def noun(name: str, *, count: int = 1, colour: str | None = None) -> str:
    """A class in words, in the given number.

    >>> noun("orange"), noun("bus", count=3), noun("scissors", count=2, colour="red"), noun("mouse", count=2)
    ('an orange', 'three buses', 'two pairs of red scissors', 'two computer mice')
    """
    name = _SPOKEN.get(name, name)
    adjective = f"{colour} " if colour else ""
    if name in _PORTIONS:
        head, rest = _PORTIONS[name].format(adjective).split(" ", 1)
        words = f"{_plural(head) if count > 1 else head} {rest}"
    else:
        words = adjective + (_plural(name) if count > 1 else name)
    if count > 1:
        return f"{NUMBERS[count]} {words}"
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"  # right for all of COCO's classes and the colours


def apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers that sum to `total`, in proportion to the shares (largest remainders, the earlier first).

    >>> apportion(8, [1, 1, 1]), apportion(5, [3, 1, 0])
    ([3, 3, 2], [4, 1, 0])
    """
    exact = [total * share / sum(shares) for share in shares]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def is_held_out(metadata: Mapping[str, Any]) -> bool:
    """Whether a combination stays out of training; the digest of its words decides."""
    opposite = {"right of": "left of", "below": "above"}
    parts = []
    for clause in metadata["include"]:
        parts.append(f"{clause.get('color', '')} {clause['class']} {clause['count']}")
    relation = metadata["include"][-1].get("position", [None])[0]
    if relation is None:
        parts.sort()
    elif relation in opposite:
        parts, relation = parts[::-1], opposite[relation]
    words = "|".join([metadata["tag"], *parts, str(relation)])
    return hashlib.sha256(words.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def _stream(name: str, family: Family, held_out: bool, generator: np.random.Generator) -> Iterator[Prompt]:
    """Endless passes through the family's combinations on one side, in one random order."""
    order = generator.permutation(math.prod(family.choices))
    while True:
        for place in order:
            built = family.build(*(int(i) for i in np.unravel_index(place, family.choices)))
            if built is None:
                continue
            sentence, clauses = built
            metadata = {"tag": name, **clauses, "prompt": f"a photo of {sentence}"}
            if is_held_out(metadata) == held_out:
                yield Prompt(text=metadata["prompt"], metadata=metadata)


def _plural(name: str) -> str:
    if name in _PLURALS:
        return _PLURALS[name]
    return name + ("es" if name.endswith(("s", "ch", "sh")) else "s")


def _single(a: int) -> tuple[str, dict[str, Any]]:
    return noun(COCO_CLASSES[a]), {"include": [_clause(a)]}


def _pair(a: int, b: int) -> tuple[str, dict[str, Any]] | None:
    if a == b:
        return None
    return f"{noun(COCO_CLASSES[a])} and {noun(COCO_CLASSES[b])}", {"include": [_clause(a), _clause(b)]}


def _counted(a: int, more: int) -> tuple[str, dict[str, Any]]:
    count = 2 + more
    clauses = {"include": [_clause(a, count=count)], "exclude": [_clause(a, count=count + 1)]}
    return noun(COCO_CLASSES[a], count=count), clauses


def _coloured(a: int, colour: int) -> tuple[str, dict[str, Any]] | None:
    name, colour_name = COCO_CLASSES[a], COLOURS[colour]
    if name in ("person", colour_name):  # a person has no colour to paint, an orange orange says nothing
        return None
    return noun(name, colour=colour_name), {"include": [_clause(a, color=colour_name)]}


def _placed(a: int, relation: int, b: int) -> tuple[str, dict[str, Any]] | None:
    if a == b:
        return None
    # a clause points to an earlier one: the object that is spoken of first comes second
    include = [_clause(b), _clause(a, position=[RELATIONS[relation], 0])]
    return f"{noun(COCO_CLASSES[a])} {RELATIONS[relation]} {noun(COCO_CLASSES[b])}", {"include": include}


def _coloured_pair(a: int, colour_a: int, b: int, colour_b: int) -> tuple[str, dict[str, Any]] | None:
    first, second = _coloured(a, colour_a), _coloured(b, colour_b)
    if first is None or second is None or a == b or colour_a == colour_b:
        return None
    return f"{first[0]} and {second[0]}", {"include": first[1]["include"] + second[1]["include"]}


def _clause(a: int, *, count: int = 1, **rest: Any) -> dict[str, Any]:
    """A clause with the class's name as GenEval says it, which the scorer's colour phrases repeat."""
    return {"class": _SPOKEN.get(COCO_CLASSES[a], COCO_CLASSES[a]), "count": count, **rest}


_C, _N = len(COCO_CLASSES), len(COLOURS)
FAMILIES: dict[str, Family] = {
    "single_object": Family(choices=(_C,), build=_single),
    "two_object": Family(choices=(_C, _C), build=_pair),
    "counting": Family(choices=(_C, len(NUMBERS)), build=_counted),
    "colors": Family(choices=(_C, _N), build=_coloured),
    "position": Family(choices=(_C, len(RELATIONS), _C), build=_placed),
    "color_attr": Family(choices=(_C, _N, _C, _N), build=_coloured_pair),
}
"""GenEval's task families by tag."""
