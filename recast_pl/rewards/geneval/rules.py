"""GenEval's rules: what detected objects say of a prompt's clauses. No networks here.

Clauses are metadata in GenEval's layout: `include` lists what must be seen ({class, count, and maybe color, or
position: [relation, index of an earlier clause]}), `exclude` what must not ({class, count}: as many or more).

Reference: Ghosh et al., "GenEval: An object-focused framework for evaluating text-to-image alignment", 2023,
and its public evaluation code.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recast_pl.scenes.coco import COLOURS, RELATIONS, coco_class

POSITION_MARGIN = 0.1
"""The share of two objects' summed extents by which their offset is shortened before it counts."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom in pixels; y grows downwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """One object that a detector sees."""

    label: str  # COCO's class name
    score: float  # confidence, in (0, 1]
    box: Box
    mask_HW: Tensor | None = None  # bool, on the CPU, as large as the picture


Found = Mapping[str, Sequence[Detection]]
"""By class, the most confident first."""

ColoursOf = Callable[[str, Sequence[Detection]], Sequence[str]]
"""The colour of each of some objects, all of one class (named as in the prompt's metadata)."""


def select(detections: Iterable[Detection], *, threshold: float, max_objects: int) -> Found:
    """By class, the `max_objects` most confident detections above the threshold."""
    found: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda detection: -detection.score):
        kept = found.setdefault(detection.label, [])
        if detection.score > threshold and len(kept) < max_objects:
            kept.append(detection)
    return found


def relations(box: Box, other: Box, *, margin: float = POSITION_MARGIN) -> set[str]:
    """In which relations `box` stands to `other`: none, one, or two of them for a diagonal.

    The offset of the centres, shortened on each axis by `margin` times the boxes' summed extents, is compared
    with the offset's whole length: a direction holds if it makes up more than half of that.

    >>> relations((0, 0, 10, 10), (50, 0, 60, 10)), relations((0, 0, 10, 10), (1, 0, 11, 10))
    ({'left of'}, set())
    """
    offset = [(box[i] + box[i + 2] - other[i] - other[i + 2]) / 2 for i in (0, 1)]
    extent = [abs(box[i + 2] - box[i]) + abs(other[i + 2] - other[i]) for i in (0, 1)]
    beyond = [max(abs(o) - margin * e, 0.0) for o, e in zip(offset, extent, strict=True)]
    if max(beyond) < 1e-3:  # GenEval's own tolerance, in pixels
        return set()
    names = (("left of", "right of"), ("above", "below"))
    length = math.hypot(*offset)
    return {names[i][offset[i] > 0] for i in (0, 1) if beyond[i] / length > 0.5}


def strict_score(found: Found, metadata: Mapping[str, Any], colours_of: ColoursOf) -> float:
    """GenEval's verdict: 1 if every clause holds, else 0.

    A clause holds if its class was found `count` times or more, its `count` most confident objects all have
    the colour, and all of them stand in the relation to all objects of the clause that it points to.
    """
    met: list[Sequence[Detection]] = []
    for clause in metadata["include"]:
        count = clause["count"]
        objects = _objects(found, clause)[:count]
        if (
            len(objects) < count
            or ("color" in clause and _right_colours(objects, clause, colours_of) < count)
            or ("position" in clause and not _in_place(objects, clause, met))
        ):
            return 0.0
        met.append(objects)
    return float(all(_absent(found, clause) for clause in metadata.get("exclude") or ()))


def partial_score(found: Found, metadata: Mapping[str, Any], colours_of: ColoursOf) -> float:
    """Mean over the prompt's facts, each in [0, 1]: what a picture gets right counts, even if not all is right.

    - A clause's count n: max(0, 1 − |found − n| / n).
    - Its colour: the share of the n objects in that colour; 0 where the count is not exact.
    - Its position: 1 if it holds; 0 where count, colour, or the clause pointed to are not right.
    - A class that is excluded and not included as well: 1 if it is absent. (Where it is included, the exact
      count has said so already.)

    This is our reading of the reward of Liu et al., "Flow-GRPO: Training flow matching models via online RL",
    2025, which ReCAST's recipe uses too. Two things differ from its public server: the count's term there
    falls below 0 for more than 2 n objects, and a wrong position counts as a 0 and a 1 there.
    """
    facts: list[float] = []
    met: list[Sequence[Detection] | None] = []
    for clause in metadata["include"]:
        count, objects = clause["count"], _objects(found, clause)
        facts.append(max(0.0, 1 - abs(len(objects) - count) / count))
        right = len(objects) == count
        if "color" in clause:
            share = _right_colours(objects, clause, colours_of) / count if right else 0.0
            facts.append(share)
            right = share == 1
        if "position" in clause:
            right = right and _in_place(objects, clause, met)
            facts.append(float(right))
        met.append(objects if right else None)
    included = {coco_class(clause["class"]) for clause in metadata["include"]}
    facts += [
        float(_absent(found, clause))
        for clause in metadata.get("exclude") or ()
        if coco_class(clause["class"]) not in included
    ]
    return sum(facts) / len(facts)


def fault_of(metadata: Mapping[str, Any]) -> str | None:
    """What is wrong with a prompt's clauses, in words; None if they can be judged.

    A class that no detector knows would score 0 in every picture, which is no score.
    """
    include = metadata.get("include")
    if not isinstance(include, Sequence) or isinstance(include, str) or not include:
        return f"`include` must be a list of one or more clauses, not {include!r}"
    if not isinstance(metadata.get("exclude") or (), Sequence):
        return f"`exclude` must be a list of clauses, not {metadata['exclude']!r}"
    for part in ("include", "exclude"):
        for index, clause in enumerate(metadata.get(part) or ()):
            fault = _clause_fault(clause, index)
            if fault:
                return f"`{part}`, clause {index}: {fault}"
    return None


def _clause_fault(clause: Any, index: int) -> str | None:
    if not isinstance(clause, Mapping):
        return f"expected class and count, got {clause!r}"
    name, count, colour = clause.get("class"), clause.get("count"), clause.get("color")
    if not isinstance(name, str) or coco_class(name) is None:
        return f"COCO has no class {name!r}"
    if type(count) is not int or count < 1:
        return f"`count` must be a whole number of 1 or more, not {count!r}"
    if "color" in clause and colour not in COLOURS:
        return f"`color` must be one of {', '.join(COLOURS)}, not {colour!r}"
    if "position" not in clause:
        return None
    match clause["position"]:
        case [str(relation), int(target)] if relation in RELATIONS and 0 <= target < index:
            return None
    return (
        f"`position` must be one of {', '.join(RELATIONS)} and the index of an earlier clause, "
        f"not {clause['position']!r}"
    )


def _objects(found: Found, clause: Mapping[str, Any]) -> Sequence[Detection]:
    return found.get(coco_class(clause["class"]) or "", ())


def _absent(found: Found, clause: Mapping[str, Any]) -> bool:
    return len(_objects(found, clause)) < int(clause["count"])


def _right_colours(objects: Sequence[Detection], clause: Mapping[str, Any], colours_of: ColoursOf) -> int:
    return sum(colour == clause["color"] for colour in colours_of(clause["class"], objects))


def _in_place(
    objects: Sequence[Detection], clause: Mapping[str, Any], met: Sequence[Sequence[Detection] | None]
) -> bool:
    relation, target = clause["position"]
    others = met[target]
    return others is not None and all(relation in relations(a.box, b.box) for a in objects for b in others)
