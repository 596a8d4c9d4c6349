"""The scene grammar: what can be asked for, how it is said, and which combinations stay unseen.

A scene is one group of equal objects ("two red circles on a white background") or two single objects in a
relation ("a red circle left of a blue square on a gray background"). Its metadata follow GenEval's JSONL
(Ghosh et al., "GenEval: An object-focused framework for evaluating text-to-image alignment", 2023):
`include` lists classes with `count`, `color` and `position`, so that a scorer written for one reads the other.
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.15, 0.15),
    "green": (0.15, 0.70, 0.25),
    "blue": (0.15, 0.30, 0.90),
    "yellow": (0.95, 0.85, 0.10),
    "purple": (0.60, 0.20, 0.80),
    "cyan": (0.10, 0.80, 0.85),
}
"""Object colours (RGB in [0, 1])."""

BACKGROUNDS: dict[str, float] = {"black": 0.08, "gray": 0.50, "white": 0.93}
"""Background colours: one luminance each, without hue, so that every hue belongs to an object."""

SHAPES = ("circle", "square", "triangle", "cross")
RELATIONS = ("left of", "above")
COUNT_WORDS = {1: "a", 2: "two", 3: "three"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectGroup:
    """`count` equal objects."""

    shape: str
    colour: str
    count: int = 1

    @property
    def phrase(self) -> str:
        """The group in words: "a red circle", "two red circles", "three red crosses"."""
        plural = self.shape + ("es" if self.shape.endswith("s") else "s")
        return f"{COUNT_WORDS[self.count]} {self.colour} {self.shape if self.count == 1 else plural}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a caption asks for: one group, or two single objects of which the first stands in `relation`."""

    groups: tuple[ObjectGroup, ...]
    background: str
    relation: str | None = None

    @property
    def caption(self) -> str:
        """The sentence.

        >>> Scene(groups=(ObjectGroup(shape="circle", colour="red", count=2),), background="white").caption
        'two red circles on a white background'
        """
        objects = f" {self.relation} ".join(group.phrase for group in self.groups)
        return f"{objects} on a {self.background} background"

    @property
    def metadata(self) -> dict[str, Any]:
        """GenEval's fields (`tag`, `include`), and `background`."""
        include: list[dict[str, Any]] = [
            {"class": group.shape, "color": group.colour, "count": group.count} for group in self.groups
        ]
        if self.relation is not None:
            include[0]["position"] = [self.relation, 1]
        tag = "position" if self.relation is not None else "counting"
        return {"tag": tag, "include": include, "background": self.background}

    @property
    def held_out(self) -> bool:
        """Whether this combination of counts, colours, shapes and relation stays out of training captions.

        Half of the combinations do, on every background alike; the digest of their words decides.
        """
        words = f" {self.relation} ".join(group.phrase for group in self.groups)
        return hashlib.sha256(words.encode()).digest()[0] % 2 == 1


def all_scenes() -> Iterator[Scene]:
    """Every scene of the grammar: 216 with one group, 2880 with two objects of different colours."""
    kinds = list(itertools.product(SHAPES, COLOURS))
    for background in BACKGROUNDS:
        for count, (shape, colour) in itertools.product(COUNT_WORDS, kinds):
            yield Scene(groups=(ObjectGroup(shape=shape, colour=colour, count=count),), background=background)
        for relation, (shape, colour), (other_shape, other_colour) in itertools.product(
            RELATIONS, kinds, kinds
        ):
            if colour != other_colour:
                first = ObjectGroup(shape=shape, colour=colour)
                second = ObjectGroup(shape=other_shape, colour=other_colour)
                yield Scene(groups=(first, second), background=background, relation=relation)


@lru_cache(maxsize=2)
def scenes(*, held_out: bool) -> tuple[tuple[Scene, ...], tuple[Scene, ...]]:
    """The seen or the unseen half of the grammar: (scenes of one group, scenes with a relation)."""
    chosen = [scene for scene in all_scenes() if scene.held_out == held_out]
    return (
        tuple(scene for scene in chosen if scene.relation is None),
        tuple(scene for scene in chosen if scene.relation is not None),
    )


def sample_scene(generator: np.random.Generator, *, held_out: bool, relation_share: float = 0.5) -> Scene:
    """A scene of the given half: with a relation in `relation_share` of the draws."""
    single, related = scenes(held_out=held_out)
    pool = related if generator.random() < relation_share else single
    return pool[int(generator.integers(len(pool)))]
