"""Which prompts an iteration draws: whole groups of k, without repetition within an epoch of the source."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.data import IterableDataset

from recast_pl.noise import Purpose, keyed_generator
from recast_pl.types import Prompt, PromptBatch


def prompt_at(position: int, *, total: int, seed: int) -> int:
    """The prompt drawn at `position` of an endless shuffled run through `total` prompts.

    Every pass visits each prompt once; the order of pass p depends on (seed, p) alone, so that the position is
    all the state there is.
    """
    rounds, place = divmod(position, total)
    order = torch.randperm(total, generator=keyed_generator(seed, rounds, -1, -1, Purpose.PROMPTS))
    return int(order[place])


def grouped_batch(
    prompts: Sequence[Prompt],
    *,
    iteration: int,
    num_groups: int,
    group_size: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
) -> PromptBatch:
    """This process's share of an iteration: a contiguous run of its num_groups × group_size samples.

    The iteration's samples do not depend on `world_size`; a group may be split over processes.
    """
    total = num_groups * group_size
    first, last = rank * total // world_size, (rank + 1) * total // world_size
    sample_B = torch.arange(first, last)
    group_B = iteration * num_groups + sample_B // group_size
    chosen = {
        int(group): prompts[prompt_at(int(group), total=len(prompts), seed=seed)] for group in group_B.unique()
    }
    return PromptBatch(
        iteration=iteration,
        prompts=tuple(chosen[int(group)] for group in group_B),
        group_B=group_B,
        sample_B=sample_B,
    )


class GroupedPrompts(IterableDataset[PromptBatch]):
    """The training batches of an epoch: those from `position()`, iterations begun so far, to the epoch's end.

    Asked anew at each pass, so that one loader serves all epochs, and a run resumed in the middle of an epoch
    goes on with the rest of it.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        position: Callable[[], int],
        iterations_per_epoch: int,
        num_groups: int,
        group_size: int,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.prompts, self.position = prompts, position
        self.iterations_per_epoch = iterations_per_epoch
        self.geometry = {"num_groups": num_groups, "group_size": group_size, "seed": seed}
        self.place = {"rank": rank, "world_size": world_size}

    def __len__(self) -> int:
        return self.iterations_per_epoch

    def __iter__(self) -> Iterator[PromptBatch]:
        first = self.position()
        rest = self.iterations_per_epoch - first % self.iterations_per_epoch
        for iteration in range(first, first + rest):
            yield grouped_batch(self.prompts, iteration=iteration, **self.geometry, **self.place)


class EvaluationPrompts(IterableDataset[PromptBatch]):
    """Each prompt once, in order: batches of fixed noises, shared out evenly among processes.

    Batches have the same sizes on all processes, for a sharded network steps in unison: a process with a prompt
    less than the others repeats one, and `PromptBatch.padding` says so.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> None:
        share = range(rank * len(prompts) // world_size, (rank + 1) * len(prompts) // world_size)
        self.missing = -(-len(prompts) // world_size) - len(share)  # 0 or 1
        self.rows = [*share, *[share[-1] if share else 0] * self.missing]
        self.prompts, self.batch_size = prompts, batch_size

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __iter__(self) -> Iterator[PromptBatch]:
        for start in range(0, len(self.rows), self.batch_size):
            rows = self.rows[start : start + self.batch_size]
            index_B = torch.tensor(rows, dtype=torch.int64)
            last = start + self.batch_size >= len(self.rows)
            yield PromptBatch(
                iteration=-1,
                prompts=tuple(self.prompts[row] for row in rows),
                group_B=index_B,
                sample_B=index_B,
                padding=self.missing if last else 0,
            )
