"""A checkpoint as diffusers reads it: a LoRA or a merged pipeline, with a model card."""

from recast_pl.verbs.export.folder import export

__all__ = ["export"]
