"""The LightningDataModule of prompts: groups for training, single held-out prompts for evaluation."""

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from recast_pl.prompts.sampling import EvaluationPrompts, GroupedPrompts
from recast_pl.prompts.sources import PromptSource
from recast_pl.types import Prompt, PromptBatch


class PromptData(pl.LightningDataModule):
    """Prompts in groups of k for training; held-out prompts, one sample each, for everything else.

    Args:
        train: the source of training prompts.
        evaluation: the source of held-out prompts (validate, test, predict, sample grids).
        num_groups: prompts in one iteration, over all processes.
        group_size: samples of each prompt; advantages compare within these.
        iterations_per_epoch: iterations between validations.
        evaluation_batch_size: held-out samples at a time, in each process.
        seed: of the order of prompts.
    """

    def __init__(
        self,
        *,
        train: PromptSource,
        evaluation: PromptSource,
        num_groups: int = 8,
        group_size: int = 8,
        iterations_per_epoch: int = 10,
        evaluation_batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, low in (
            ("num_groups", num_groups, 1),
            ("group_size", group_size, 2),
            ("iterations_per_epoch", iterations_per_epoch, 1),
            ("evaluation_batch_size", evaluation_batch_size, 1),
        ):
            if value < low:
                why = ": a group of one has no one to be better than" if name == "group_size" else ""
                raise ValueError(f"data.{name}: expected {low} or more, got {value}{why}")
        self.sources = {"train": train, "evaluation": evaluation}
        self.num_groups, self.group_size = num_groups, group_size
        self.iterations_per_epoch = iterations_per_epoch
        self.evaluation_batch_size, self.seed = evaluation_batch_size, seed
        self.position = 0  # iterations begun so far in the whole run
        self._prompts: dict[str, list[Prompt]] = {}

    def prompts(self, part: str) -> list[Prompt]:
        """All prompts of `train` or `evaluation`, read once."""
        if part not in self._prompts:
            self._prompts[part] = list(self.sources[part].prompts())
        return self._prompts[part]

    def origin(self, part: str) -> str:
        """Where the prompts of `train` or `evaluation` come from: the YAML key, and the file if it is one."""
        path = getattr(self.sources[part], "path", None)
        return f"data.{part}" if path is None else f"data.{part} ({path})"

    def check_shares(self, processes: int) -> None:
        """Refuses an iteration's samples that processes cannot share evenly."""
        samples = self.num_groups * self.group_size
        if samples % processes:
            raise ValueError(
                f"data.num_groups × data.group_size = {samples} samples cannot be shared evenly by "
                f"{processes} processes; take a multiple of {processes}, such as "
                f"{samples + processes - samples % processes}"
            )

    def train_dataloader(self) -> DataLoader[PromptBatch]:
        """Groups of the training prompts, in this process's share of each iteration."""
        return self.grouped(self.iterations_per_epoch)

    def grouped(self, iterations: int) -> DataLoader[PromptBatch]:
        """The next `iterations` batches of training."""
        rank, world_size = self._place()
        dataset = GroupedPrompts(
            self.prompts("train"),
            position=lambda: self.position,
            iterations_per_epoch=iterations,
            num_groups=self.num_groups,
            group_size=self.group_size,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
        )
        return DataLoader(dataset, batch_size=None)

    def val_dataloader(self) -> DataLoader[PromptBatch]:
        """The held-out prompts in order, in this process's share."""
        rank, world_size = self._place()
        dataset = EvaluationPrompts(
            self.prompts("evaluation"),
            batch_size=self.evaluation_batch_size,
            rank=rank,
            world_size=world_size,
        )
        return DataLoader(dataset, batch_size=None)

    test_dataloader = predict_dataloader = val_dataloader

    def on_before_batch_transfer(self, batch: PromptBatch, dataloader_idx: int) -> PromptBatch:
        """Counts an iteration as begun when its batch is used, not when a loader fetched it ahead."""
        if batch.iteration >= 0:
            self.position = batch.iteration + 1
        return batch

    def transfer_batch_to_device(self, batch: PromptBatch, device: Any, dataloader_idx: int) -> PromptBatch:
        """Prompts stay where they are: the keys of noise are read on the CPU."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The prompt position."""
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on at the saved position."""
        self.position = int(state_dict["position"])

    def _place(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
