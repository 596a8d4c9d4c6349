"""GenEval's rules on detections made by hand."""

import re

import pytest
from conftest import clause

from recast_pl.rewards.geneval.rules import (
    Detection,
    fault_of,
    partial_score,
    relations,
    select,
    strict_score,
)
from recast_pl.scenes.coco import COCO_CLASSES, COLOURS, coco_class


def seen(label, *, score=0.95, box=(0, 0, 10, 10)):
    return Detection(label=label, score=score, box=box)


def judged(objects, metadata, colours=()):
    """Strict and partial score; `colours` are those of the objects asked about, in order."""
    found = select(objects, threshold=0.3, max_objects=16)

    def colours_of(name, chosen):
        assert len(chosen) <= len(colours)
        return list(colours)[: len(chosen)]

    return strict_score(found, metadata, colours_of), partial_score(found, metadata, colours_of)


def counting(name, count):
    return {"include": [clause(name, count)], "exclude": [clause(name, count + 1)]}


@pytest.mark.parametrize(
    ("present", "strict", "partial"),
    [(0, 0, 0.0), (1, 0, 1 / 3), (2, 0, 2 / 3), (3, 1, 1.0), (4, 0, 2 / 3), (6, 0, 0.0), (9, 0, 0.0)],
)
def test_counts(present, strict, partial):
    scores = judged([seen("cat")] * present + [seen("dog")], counting("cat", 3))
    assert scores == pytest.approx((strict, partial))


def test_without_exclusion_strict_takes_more_than_asked_and_partial_does_not():
    assert judged([seen("cat")] * 2, {"include": [clause("cat")]}) == (1.0, 0.0)


def test_two_objects():
    metadata = {"include": [clause("cat"), clause("computer mouse")], "exclude": None}
    assert judged([seen("cat"), seen("mouse")], metadata) == (1.0, 1.0)
    assert judged([seen("cat")], metadata) == (0.0, 0.5)
    assert judged([], metadata) == (0.0, 0.0)


def test_a_foreign_excluded_class_costs_its_own_fact():
    metadata = {"include": [clause("cat")], "exclude": [clause("dog", 2)]}
    assert judged([seen("cat"), seen("dog")], metadata) == (1.0, 1.0)  # one dog is fewer than two
    assert judged([seen("cat"), seen("dog"), seen("dog")], metadata) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("colours", "strict", "partial"),
    [(["red", "red"], 1, 1.0), (["red", "blue"], 0, 0.75), (["blue", "blue"], 0, 0.5)],
)
def test_colours(colours, strict, partial):
    metadata = {"include": [clause("cup", 2, color="red")]}
    assert judged([seen("cup")] * 2, metadata, colours) == (strict, partial)


def test_a_wrong_count_leaves_colours_unasked():
    metadata = {"include": [clause("cup", 2, color="red")]}
    assert judged([seen("cup")], metadata) == (0.0, 0.25)  # (1/2 + 0) / 2


def test_strict_asks_for_the_colour_of_the_most_confident_only():
    asked = []

    def colours_of(name, chosen):
        asked.extend(chosen)
        return ["red"] * len(chosen)

    objects = [seen("cup", score=score) for score in (0.5, 0.9, 0.7)]
    found = select(objects, threshold=0.3, max_objects=16)
    assert strict_score(found, {"include": [clause("cup", 2, color="red")]}, colours_of) == 1
    assert [detection.score for detection in asked] == [0.9, 0.7]


@pytest.mark.parametrize(
    ("dog_box", "strict", "partial"),
    [
        ((0, 50, 10, 60), 1, 1.0),  # left of the cat
        ((90, 50, 99, 60), 0, 2 / 3),  # right of it
        ((50, 0, 60, 10), 0, 2 / 3),  # above it
        ((49, 50, 59, 60), 0, 2 / 3),  # beside it by less than the margin
    ],
)
def test_positions(dog_box, strict, partial):
    metadata = {"include": [clause("cat"), clause("dog", position=["left of", 0])]}
    objects = [seen("cat", box=(50, 50, 60, 60)), seen("dog", box=dog_box)]
    assert judged(objects, metadata) == pytest.approx((strict, partial))


def test_a_position_without_its_target_fails():
    metadata = {"include": [clause("cat", color="red"), clause("dog", position=["left of", 0])]}
    objects = [seen("cat", box=(50, 50, 60, 60)), seen("dog", box=(0, 50, 10, 60))]
    assert judged(objects, metadata, ["red"]) == (1.0, 1.0)
    assert judged(objects, metadata, ["blue"]) == (0.0, 0.5)  # count and count of four facts
    assert judged(objects[1:], metadata) == (0.0, 0.25)


def test_every_pair_must_be_in_place():
    metadata = {"include": [clause("cat"), clause("dog", 2, position=["above", 0])]}
    cat = seen("cat", box=(40, 80, 60, 90))
    above, below = seen("dog", box=(40, 0, 60, 20)), seen("dog", box=(40, 95, 60, 99))
    assert judged([cat, above, above], metadata) == (1.0, 1.0)
    assert judged([cat, above, below], metadata) == pytest.approx((0.0, 2 / 3))


@pytest.mark.parametrize(
    ("box", "other", "expected"),
    [
        ((0, 0, 10, 10), (30, 0, 40, 10), {"left of"}),
        ((30, 0, 40, 10), (0, 0, 10, 10), {"right of"}),
        ((0, 0, 10, 10), (0, 30, 10, 40), {"above"}),
        ((0, 30, 10, 40), (0, 0, 10, 10), {"below"}),
        ((0, 0, 10, 10), (100, 100, 110, 110), {"left of", "above"}),
        ((0, 0, 10, 10), (0, 0, 10, 10), set()),
        # offset 2 in x, margin .1 · 20 = 2: nothing is left of it
        ((0, 0, 10, 10), (2, 0, 12, 10), set()),
        # offset (−4, 0): 2 of 4 is left, which is not more than half; (−4.1, 0): 2.1 of 4.1 is
        ((0, 0, 10, 10), (4, 0, 14, 10), set()),
        ((0, 0, 10, 10), (4.1, 0, 14.1, 10), {"left of"}),
        # (−30, −10) of boxes 10 wide: 28 and 8 of 31.6
        ((0, 0, 10, 10), (30, 10, 40, 20), {"left of"}),
    ],
)
def test_relations_by_hand(box, other, expected):
    assert relations(box, other) == expected


def test_selection_is_by_class_above_the_threshold_and_the_most_confident():
    detections = [seen("cat", score=0.1 * i) for i in range(1, 10)] + [seen("dog", score=0.3)]
    found = select(detections, threshold=0.3, max_objects=4)
    assert [round(d.score, 1) for d in found["cat"]] == [0.9, 0.8, 0.7, 0.6]
    assert not found.get("dog")  # 0.3 is not above 0.3


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({}, "`include`"),
        ({"include": []}, "`include`"),
        ({"include": "cat"}, "`include`"),
        ({"include": [clause("unicorn")]}, "clause 0: COCO has no class 'unicorn'"),
        ({"include": [clause("cat"), clause("dog", 0)]}, "clause 1: `count`"),
        ({"include": [{"class": "cat"}]}, "`count`.*None"),
        ({"include": [clause("cat", "2")]}, "`count`.*'2'"),
        ({"include": [clause("cat", color="teal")]}, "`color`.*red.*'teal'"),
        ({"include": [clause("cat", position=["left of", 0])]}, "`position`.*earlier"),
        ({"include": [clause("cat"), clause("dog", position=["near", 0])]}, "`position`.*near"),
        ({"include": [clause("cat"), clause("dog", position="left of")]}, "`position`"),
        ({"include": [clause("cat")], "exclude": [clause("unicorn")]}, "`exclude`, clause 0"),
        ({"include": [clause("cat")], "exclude": 3}, "`exclude` must be a list"),
    ],
)
def test_clauses_that_no_picture_can_fulfil_are_faults(metadata, match):
    assert re.search(match, fault_of(metadata))


def test_colour_and_class_names():
    assert len(set(COCO_CLASSES)) == 80
    assert len(COLOURS) == 10
    assert coco_class("tvmonitor") == coco_class("tv") == "tv"
