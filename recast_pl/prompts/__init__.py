"""Prompts: sources, groups of k with integer ids, and the LightningDataModule that serves them."""

from recast_pl.prompts.datamodule import PromptData
from recast_pl.prompts.geneval import GenEvalPrompts
from recast_pl.prompts.sampling import EvaluationPrompts, GroupedPrompts, grouped_batch, prompt_at
from recast_pl.prompts.sources import JSONLines, PromptSource, SceneGrammar, TextFile

__all__ = [
    "EvaluationPrompts",
    "GenEvalPrompts",
    "GroupedPrompts",
    "JSONLines",
    "PromptData",
    "PromptSource",
    "SceneGrammar",
    "TextFile",
    "grouped_batch",
    "prompt_at",
]
