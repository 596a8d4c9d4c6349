"""Drawing scenes: antialiased shapes from signed distances, then a spread of image quality."""

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from recast_pl.scenes.grammar import BACKGROUNDS, COLOURS, Scene

Array = npt.NDArray[np.float32]

IMAGE_SIZE = 64  # pixels, square
MARGIN = 3.0  # pixels kept free between objects
PLACES = (16, 24, 32, 40, 48)  # pixels; objects' centres, along both axes
BAR = 0.36  # half-width of a cross's bars, in radii


def inside(shape: str, u: Array, v: Array) -> Array:
    """Signed distance to the unit shape (negative inside) at (u, v), v downwards, in units of its radius."""
    if shape == "circle":
        return np.asarray(np.hypot(u, v) - 1)
    if shape == "square":
        return np.asarray(np.maximum(abs(u), abs(v)) - 1)
    if shape == "triangle":  # apex up; |u| <= (v + 1) / 2
        return np.asarray(np.maximum((abs(u) - (v + 1) / 2) / np.hypot(1, 0.5), v - 1))
    if shape == "cross":
        upright = np.maximum(abs(u) - BAR, abs(v) - 1)
        return np.asarray(np.minimum(upright, np.maximum(abs(v) - BAR, abs(u) - 1)))
    raise ValueError(f"unknown shape {shape!r}: expected circle, square, triangle or cross")


RADII = {"circle": 1.0, "square": 0.88, "triangle": 1.0, "cross": 1.06}  # of equal visual weight


def place(scene: Scene, generator: np.random.Generator) -> list[tuple[str, str, float, float, float]]:
    """Non-overlapping places (shape, colour, x, y, radius in pixels) that satisfy the scene's relation."""
    kinds = [(group.shape, group.colour) for group in scene.groups for _ in range(group.count)]
    while True:
        base = generator.uniform(9.0, 12.0 if len(kinds) < 3 else 10.5)
        places = []
        for shape, colour in kinds:
            radius = base * generator.uniform(0.95, 1.05) * RADII[shape]
            x, y = generator.choice(PLACES, size=2)
            places.append((shape, colour, float(x), float(y), float(radius)))
        apart = all(
            max(abs(a[2] - b[2]), abs(a[3] - b[3])) > a[4] + b[4] + MARGIN
            for i, a in enumerate(places)
            for b in places[:i]
        )
        if apart and _relation_holds(scene.relation, places):
            return places


def _relation_holds(relation: str | None, places: list[tuple[str, str, float, float, float]]) -> bool:
    if relation is None:
        return True
    right, down = places[1][2] - places[0][2], places[1][3] - places[0][3]
    return right > 1.5 * abs(down) if relation == "left of" else down > 1.5 * abs(right)


def degrade(image: Array, generator: np.random.Generator) -> Array:
    """Blur, low contrast and grain, each present or not: the spread of quality that detail rewards judge."""
    if generator.random() < 0.5:
        sigma = generator.uniform(0.6, 1.6)
        image = ndimage.gaussian_filter(image, sigma=(0, sigma, sigma))
    if generator.random() < 0.5:
        mean = image.mean(axis=(1, 2), keepdims=True)
        image = mean + generator.uniform(0.45, 0.9) * (image - mean)
    if generator.random() < 0.2:
        coarse = generator.normal(size=(1, IMAGE_SIZE // 2, IMAGE_SIZE // 2)).astype(np.float32)
        image = image + generator.uniform(0.015, 0.05) * ndimage.zoom(coarse, (1, 2, 2), order=1)
    return image


def draw(scene: Scene, generator: np.random.Generator, *, perfect: bool = False) -> Array:
    """Draws a scene: float32 [3, 64, 64] in [0, 1]; `perfect` leaves the degradations out."""
    rows, columns = np.mgrid[0:IMAGE_SIZE, 0:IMAGE_SIZE].astype(np.float32) + 0.5
    slope = generator.uniform(-0.06, 0.06, size=2)
    shade = slope[0] * (columns / IMAGE_SIZE - 0.5) + slope[1] * (rows / IMAGE_SIZE - 0.5)
    image = np.repeat((BACKGROUNDS[scene.background] + shade)[None], 3, axis=0).astype(np.float32)
    for shape, colour, x, y, radius in place(scene, generator):
        distance = radius * inside(shape, (columns - x) / radius, (rows - y) / radius)
        cover = np.clip(0.5 - distance, 0, 1)
        tint = np.asarray(COLOURS[colour], dtype=np.float32)[:, None, None] + shade * 0.5
        image = image * (1 - cover) + tint * cover
    if not perfect:
        image = degrade(image, generator)
    return np.clip(image, 0, 1).astype(np.float32)
