"""A detector that no network is part of: hues, connected components and the shape that fills a box best."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from recast_pl.scenes.draw import inside
from recast_pl.scenes.grammar import BACKGROUNDS, COLOURS, SHAPES

Array = npt.NDArray[np.float32]

MIN_SATURATION = 0.10  # length of a pixel's chroma below which it is background
MIN_AREA = 20  # pixels; the smallest object that is drawn covers about 80
MIN_OVERLAP = 0.70  # intersection over union below which a component has no shape of ours
MAX_ASPECT = 1.6  # the longer side of a component's box over the shorter

_PALETTE = np.asarray(list(COLOURS.values()), dtype=np.float32)
_HUES = _PALETTE - _PALETTE.mean(axis=1, keepdims=True)
_HUES /= np.linalg.norm(_HUES, axis=1, keepdims=True)
_NAMES = list(COLOURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """One connected component of one hue."""

    shape: str | None  # the best-fitting shape, or None where none fits
    colour: str
    x: float  # of the box's centre, pixels from the left
    y: float  # … from the top
    area: int  # pixels


def detect(image: Array) -> list[Detection]:
    """The objects of a picture [3, H, W] in [0, 1], largest first.

    A component's outline is taken at half of its hue's strongest saturation, so that blur and low contrast
    move it little.
    """
    chroma = image - image.mean(axis=0, keepdims=True)
    saturation = np.linalg.norm(chroma, axis=0)
    label = np.where(saturation > MIN_SATURATION, np.einsum("nc,chw->nhw", _HUES, chroma).argmax(0), -1)
    found = []
    for index, colour in enumerate(_NAMES):
        mask = label == index
        if mask.sum() < MIN_AREA:
            continue
        strong = max(MIN_SATURATION, 0.5 * float(np.quantile(saturation[mask], 0.9)))
        components, _ = ndimage.label(mask & (saturation > strong))
        for number, box in enumerate(ndimage.find_objects(components), start=1):
            part = components[box] == number
            area = int(part.sum())
            if area >= MIN_AREA:
                y, x = ((side.start + side.stop) / 2 for side in box)
                found.append(Detection(shape=best_shape(part), colour=colour, x=x, y=y, area=area))
    return sorted(found, key=lambda detection: -detection.area)


def best_shape(mask: npt.NDArray[np.bool_]) -> str | None:
    """The shape that fills the box of `mask` [h, w] as the mask does (highest intersection over union)."""
    height, width = mask.shape
    if max(height, width) > MAX_ASPECT * min(height, width):
        return None
    v, u = np.meshgrid(
        (np.arange(height) + 0.5) / height * 2 - 1, (np.arange(width) + 0.5) / width * 2 - 1, indexing="ij"
    )
    overlaps = {}
    for shape in SHAPES:
        ideal = inside(shape, u, v) <= 0
        overlaps[shape] = float((mask & ideal).sum() / (mask | ideal).sum())
    best = max(overlaps, key=lambda shape: overlaps[shape])
    return best if overlaps[best] >= MIN_OVERLAP else None


def background_of(image: Array) -> str:
    """The background of a picture [3, H, W]: the named luminance nearest to the median along its border."""
    luminance = image.mean(axis=0)
    border = np.concatenate([luminance[:2].ravel(), luminance[-2:].ravel(), luminance[:, :2].ravel()])
    level = float(np.median(np.concatenate([border, luminance[:, -2:].ravel()])))
    return min(BACKGROUNDS, key=lambda name: abs(BACKGROUNDS[name] - level))


def clauses(image: Array, metadata: dict[str, Any]) -> dict[str, float]:
    """How far a picture [3, H, W] in [0, 1] fulfils each clause of its prompt, each in [0, 1].

    Args:
        image: the picture.
        metadata: GenEval's `include` (entries with `class`, and optionally `color`, `count`, `position`),
            and optionally `background`.

    Returns:
        `count` (wanted over found objects, or the inverse), `shape` and `colour` (shared entries of the two
        multisets over the larger), where asked for `position` (1 where the relation holds) and `background`.
    """
    found = detect(image)
    wanted = [entry for entry in metadata["include"] for _ in range(int(entry.get("count", 1)))]
    scores = {
        "count": min(len(found), len(wanted)) / max(len(found), len(wanted)),
        "shape": _shared([entry["class"] for entry in wanted], [item.shape for item in found]),
    }
    colours = [entry["color"] for entry in wanted if "color" in entry]
    if colours:
        scores["colour"] = _shared(colours, [item.colour for item in found])
    for entry in metadata["include"]:
        if "position" in entry:
            relation, other = entry["position"]
            scores["position"] = _position(found, entry, relation, metadata["include"][other])
    if "background" in metadata:
        scores["background"] = float(background_of(image) == metadata["background"])
    return scores


def _shared(wanted: Sequence[str], found: Sequence[str | None]) -> float:
    return (Counter(wanted) & Counter(filter(None, found))).total() / max(len(wanted), len(found))


def _position(found: list[Detection], entry: dict[str, Any], relation: str, other: dict[str, Any]) -> float:
    """1 where the largest object of the one colour stands in `relation` to that of the other, else 0."""
    first = next((item for item in found if item.colour == entry["color"]), None)
    second = next((item for item in found if item.colour == other["color"]), None)
    if first is None or second is None:
        return 0.0
    right, down = second.x - first.x, second.y - first.y
    signs = {"left of": right, "right of": -right, "above": down, "below": -down}
    if relation not in signs:
        raise ValueError(f"unknown relation {relation!r}: expected one of {', '.join(signs)}")
    return float(signs[relation] > 0 and signs[relation] >= max(abs(right), abs(down)))
