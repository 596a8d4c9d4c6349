"""Procedural scenes: a grammar of captions, their drawings, and a detector that reads them back."""

from recast_pl.scenes.detect import Detection, background_of, clauses, detect
from recast_pl.scenes.draw import IMAGE_SIZE, draw
from recast_pl.scenes.grammar import ObjectGroup, Scene, all_scenes, sample_scene, scenes

__all__ = [
    "IMAGE_SIZE",
    "Detection",
    "ObjectGroup",
    "Scene",
    "all_scenes",
    "background_of",
    "clauses",
    "detect",
    "draw",
    "sample_scene",
    "scenes",
]
