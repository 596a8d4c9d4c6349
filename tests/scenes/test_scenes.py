import numpy as np
import pytest
from scipy import ndimage

from recast_pl.scenes import (
    ObjectGroup,
    Scene,
    all_scenes,
    background_of,
    clauses,
    detect,
    draw,
    sample_scene,
)
from recast_pl.scenes.draw import place


def test_half_of_the_combinations_are_held_out_on_every_background():
    scenes = list(all_scenes())
    assert len(scenes) == 216 + 2880
    assert 0.45 < np.mean([scene.held_out for scene in scenes]) < 0.55
    halves = {}
    for scene in scenes:
        halves.setdefault((scene.groups, scene.relation), set()).add(scene.held_out)
    assert all(len(half) == 1 for half in halves.values())


def test_captions_are_all_different():
    captions = [scene.caption for scene in all_scenes()]
    assert len(set(captions)) == len(captions)


@pytest.mark.parametrize("held_out", [False, True])
def test_the_detector_reads_back_what_was_drawn(held_out):
    """Degraded pictures included: blur, low contrast and grain must not change what a scene shows."""
    generator = np.random.default_rng(3)
    right = []
    for _ in range(150):
        scene = sample_scene(generator, held_out=held_out)
        right.append([v == 1 for v in clauses(draw(scene, generator), scene.metadata).values()])
    assert np.mean([all(row) for row in right]) > 0.95


def test_perfect_drawings_are_read_without_error():
    generator = np.random.default_rng(4)
    for _ in range(100):
        scene = sample_scene(generator, held_out=False)
        assert set(clauses(draw(scene, generator, perfect=True), scene.metadata).values()) == {1.0}


def test_places_keep_the_relation_and_their_distance():
    generator = np.random.default_rng(5)
    first, second = ObjectGroup(shape="circle", colour="red"), ObjectGroup(shape="cross", colour="blue")
    for _ in range(50):
        left, right = place(Scene(groups=(first, second), background="white", relation="left of"), generator)
        assert left[2] < right[2]
        high, low = place(Scene(groups=(first, second), background="white", relation="above"), generator)
        assert high[3] < low[3]


def canvas(*boxes, background=0.93):
    image = np.full((3, 64, 64), background, dtype=np.float32)
    for (top, left, size), colour in boxes:
        image[:, top : top + size, left : left + size] = np.asarray(colour)[:, None, None]
    return image


RED, BLUE = (0.9, 0.15, 0.15), (0.15, 0.3, 0.9)


def test_detections_by_hand():
    image = canvas(((5, 5, 16), RED), ((30, 40, 12), BLUE))
    first, second = detect(image)
    assert (first.shape, first.colour, first.area, first.x, first.y) == ("square", "red", 256, 13.0, 13.0)
    assert (second.shape, second.colour, second.area) == ("square", "blue", 144)
    assert background_of(image) == "white"
    assert background_of(canvas(background=0.1)) == "black"


def test_clauses_by_hand():
    image = canvas(((5, 5, 16), RED), ((30, 40, 12), BLUE))
    metadata = {
        "include": [
            {"class": "square", "color": "red", "count": 1, "position": ["left of", 1]},
            {"class": "circle", "color": "blue", "count": 1},
        ],
        "background": "black",
    }
    assert clauses(image, metadata) == {
        "count": 1.0, "shape": 0.5, "colour": 1.0, "position": 1.0, "background": 0.0,
    }  # fmt: skip
    three = {"include": [{"class": "square", "color": "red", "count": 3}]}
    assert clauses(image, three) == {"count": 2 / 3, "shape": 2 / 3, "colour": 1 / 3}
    assert clauses(canvas(), three) == {"count": 0.0, "shape": 0.0, "colour": 0.0}


def test_relations_exclude_each_other():
    image = canvas(((5, 30, 12), RED), ((40, 33, 12), BLUE))

    def position(relation):
        include = [
            {"class": "square", "color": "red", "position": [relation, 1]},
            {"class": "square", "color": "blue"},
        ]
        return clauses(image, {"include": include})["position"]

    assert {r: position(r) for r in ("above", "below", "left of", "right of")} == {
        "above": 1.0, "below": 0.0, "left of": 0.0, "right of": 0.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match="behind"):
        position("behind")


def test_quality_varies_and_captions_say_nothing_of_it():
    generator = np.random.default_rng(6)
    scene = Scene(groups=(ObjectGroup(shape="square", colour="red"),), background="white")
    edges = [np.abs(ndimage.sobel(draw(scene, generator).mean(0))).max() for _ in range(60)]
    assert max(edges) > 2 * min(edges)
    words = set(" ".join(s.caption for s in all_scenes()).split())
    assert not words & {"blurred", "sharp", "grainy", "clean"}
