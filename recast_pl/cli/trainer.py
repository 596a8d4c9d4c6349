"""The trainer's further verbs, where Lightning has none: `profile`, `memory` and `export`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from recast_pl.credit import Profile
from recast_pl.module import ReCASTModule
from recast_pl.policy import Role
from recast_pl.prompts import PromptData
from recast_pl.verbs.export import export
from recast_pl.verbs.memory import Budget, Hardware, memory_budget, memory_table
from recast_pl.verbs.profile import measure_profile


class Trainer(pl.Trainer):
    """Lightning's trainer with three verbs more."""

    planned: Hardware | None = None  # what the configuration asks for, where a verb runs on less
    settings: Mapping[str, Any] = {}  # the configuration, for a verb that writes it down

    def memory(self, model: ReCASTModule, datamodule: PromptData, processes: int | None = None) -> Budget:
        """Prints what the configuration takes on each device, without loading a weight.

        Args:
            model: the module.
            datamodule: its geometry is used, no prompt is read.
            processes: that share an iteration's samples; None: trainer.devices × trainer.num_nodes.
        """
        if processes is not None and processes < 1:
            raise ValueError(f"processes: expected 1 or more, got {processes}")
        assert self.planned is not None  # the command line has set it
        planned = self.planned if processes is None else replace(self.planned, processes=processes)
        budget = memory_budget(model, datamodule, planned)
        rank_zero_info(memory_table(budget))
        return budget

    def profile(
        self,
        model: ReCASTModule,
        datamodule: PromptData,
        ckpt_path: str | None = None,
        iterations: int = 8,
        folder: str | None = None,
    ) -> Profile:
        """Measures the rewards' discriminability profiles and W, without training.

        Args:
            model: the module.
            datamodule: its training prompts are used, in groups as in training.
            ckpt_path: a checkpoint whose old policy is profiled; None: the base model's.
            iterations: training iterations' worth of samples, all counted equally.
            folder: where profiles.npz, profiles.png and W.png go; None: `profile` in the run's folder.
        """
        return measure_profile(
            self, model, datamodule, ckpt_path=ckpt_path, iterations=iterations, folder=folder
        )

    def export(
        self,
        model: ReCASTModule,
        datamodule: PromptData,
        ckpt_path: str,
        role: Role = "default",
        merged: bool = False,
        folder: str | None = None,
        push_to: str | None = None,
    ) -> Path:
        """Writes a checkpoint as diffusers reads it, with a model card; loads no reward and needs no GPU.

        Args:
            model: the module.
            datamodule: not used.
            ckpt_path: the checkpoint. The configuration must be its run's: a LoRA's alpha is only there.
            role: whose weights.
            merged: a whole pipeline with the weights merged into it, instead of a LoRA.
            folder: where to, new or empty; None: named as the checkpoint, beside it.
            push_to: owner/name of a model repository on the Hugging Face Hub that the folder is uploaded to.
        """
        return export(
            model,
            ckpt_path=Path(ckpt_path),
            role=role,
            merged=merged,
            folder=None if folder is None else Path(folder),
            push_to=push_to,
            settings=self.settings,
        )
