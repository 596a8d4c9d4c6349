"""Runs of the real command line that record what each process drew: `python tests/parallel_cases.py RUNS.json`.

Started once for each process, with the environment of torchrun; the runs follow one another, so that the
imports are paid for once.
"""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch

from recast_pl.rewards import Reward


class Recorder(pl.Callback):
    """Writes what each iteration drew and how it was scored to FOLDER/record-RANK.pt, at the end of `fit`."""

    def __init__(self, folder: str) -> None:
        self.folder, self.rows, self.noises = Path(folder), [], {}

    def on_train_start(self, trainer, module):
        module.credit.observer, self.processes = self, trainer.world_size
        experience_of = module.experience

        def seen(batch):
            experience = experience_of(batch)
            self.keep(batch, experience)
            return experience

        module.experience = seen

    def keep(self, batch, experience):
        own = experience.scores.values_RB[:, experience.own]
        for b, sample in enumerate(batch.sample_B.tolist()):
            self.rows.append(
                {
                    "key": (batch.iteration, sample),
                    "prompt": batch.prompts[b].text,
                    "group": int(batch.group_B[b]),
                    "x0": experience.rollout.x0_BCHW[b].clone(),
                    "image": experience.rollout.images_B3HW[b].clone(),
                    "scores": own[:, b].clone(),
                }
            )

    def watch(self, part):
        batch = part.experience.rollout.batch
        for n, (row, step) in enumerate(zip(part.row_N.tolist(), part.column_N.tolist(), strict=True)):
            key = (batch.iteration, int(batch.sample_B[row]), step)
            drawn = getattr(part.samples, "noise_NCHW", part.samples.t_N)  # a recorded step draws nothing anew
            self.noises[key] = (drawn[n].clone(), float(part.samples.advantage_N[n]))

    def learn(self, total):
        assert total(torch.ones(())) == self.processes

    def on_fit_end(self, trainer, module):
        self.folder.mkdir(parents=True, exist_ok=True)
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        record = {"rows": self.rows, "noises": self.noises, "logged": logged, "evaluations": module.evaluations}
        torch.save(record, self.folder / f"record-{trainer.global_rank}.pt")


class Brightness(Reward):
    """Mean of a picture's pixels."""

    def score(self, images_B3HW, prompts):
        return images_B3HW.mean(dim=(1, 2, 3))


class Contrast(Reward):
    """Spread of a picture's pixels; the same for all of a prompt that begins with `dull`: nothing to learn."""

    def score(self, images_B3HW, prompts):
        dull = torch.tensor([prompt.text.startswith("dull") for prompt in prompts], device=images_B3HW.device)
        return torch.where(dull, 1.0, images_B3HW.std(dim=(1, 2, 3)))


class Moody(Reward):
    """A picture's green, of every other picture by its brightness; the others fail."""

    def score(self, images_B3HW, prompts):
        fails = (images_B3HW.mean(dim=(1, 2, 3)) * 1e4).round().long() % 3 == 0
        return torch.where(fails, torch.nan, images_B3HW[:, 1].mean(dim=(1, 2)))


def main() -> None:
    from recast_pl.cli import main as command_line

    torch.set_num_threads(1)
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        command_line(arguments)


if __name__ == "__main__":
    main()
