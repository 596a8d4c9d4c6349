"""When is a reward's feedback worth anything? Measured directly, beside what ReCAST's profiles say.

    python tests/benchmarks/worth_by_step.py --config configs/tiny/setting_a.yaml \
        --evidence configs/studies/profile_a.npz

Of the base policy, for each reward r and trained step k, with r's own z-scores as advantages:

- μ, the mean over batches of the objective's gradient when all samples are trained at step k alone;
- σ², the variance of one batch's gradient around it, summed over parameters;
- v = −d/dδ of r's mean on held-out prompts when the policy moves by δ μ: what that gradient is worth, by a
  difference quotient in both directions, with the same prompts and noises, in spreads of single pictures.

A batch's gradients at different steps have independent noises to first order, so the weights that raise r most
per length of the noisy update are w ∝ v / σ² (where v > 0), and any row w of W has the efficiency

    (w · v) / √(Σ w² σ²), divided by that of the best row.

Compared are the best rows, one row shared by all rewards (their mean), and those of credit strategies.
R rewards, K trained steps, P parameters.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import torch
from quickstart import CONFIGS, built, circumstances, run
from torch import Tensor
from worth import Worth, figure, table

from recast_pl.advantages.base import group_z_scores
from recast_pl.module import ReCASTModule
from recast_pl.types import PromptBatch, Rollout
from recast_pl.update import Pairs, training_pairs

LENGTH = 3e-3  # of a move, root mean square over parameters: a few of Adam's steps at the quickstart's rate


class Measurement(pl.Callback):
    """Gathers gradients over batches of an unmoved policy, then moves it along each of them."""

    def __init__(self) -> None:
        self.batches = 0
        self.worth: Worth | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Adds one batch's gradients, of every reward at every step."""
        assert isinstance(module, ReCASTModule)
        experience = module.experience(batch)
        scores, rollout = experience.scores, experience.rollout
        z_RB = group_z_scores(scores.values_RB, scores.valid_RB, experience.group_B)
        pairs = training_pairs(
            rollout,
            iteration=module.iteration,
            trainable_BK=module.objective.trainable(rollout, min_noise_level=module.min_noise_level),
            levels=module.levels,
            timesteps_per_sample=None,
            seed=module.seed,
        )
        self.steps = pairs.step_N.unique()
        by_step = [_gradients(module, rollout, _at_step(pairs, int(step)), z_RB) for step in self.steps]
        gradient_RKP = torch.stack(by_step, dim=1)
        if not self.batches:
            self.sum_RKP = torch.zeros_like(gradient_RKP)
            self.squares_RK = torch.zeros(gradient_RKP.shape[:2])
        self.batches += 1
        self.sum_RKP += gradient_RKP
        self.squares_RK += gradient_RKP.square().sum(dim=2)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Moves the policy along each mean gradient, there and back."""
        assert isinstance(module, ReCASTModule)
        count, names = self.batches, module.rewards.names
        square_RK = (self.sum_RKP.square().sum(dim=2) - self.squares_RK) / (count * (count - 1))
        mean_RKP = self.sum_RKP / count
        batches = list(trainer.datamodule.val_dataloader())  # type: ignore[attr-defined]
        spread_R = self._held_out(module, batches).std(dim=1)
        value_RK, error_RK = torch.zeros(square_RK.shape), torch.zeros(square_RK.shape)
        for r in range(len(names)):
            for k in range(len(self.steps)):
                direction_P = mean_RKP[r, k]
                delta = LENGTH / direction_P.square().mean().sqrt()
                ends = [self._moved(module, batches, sign * delta * direction_P)[r] for sign in (-1, 1)]
                slope_B = (ends[0] - ends[1]) / (2 * delta) / spread_R[r]
                value_RK[r, k] = slope_B.mean()
                error_RK[r, k] = slope_B.std() / len(slope_B) ** 0.5
        self.worth = Worth(
            names=names,
            levels=module.levels,
            steps=self.steps,
            mean_square_RK=square_RK,
            noise_RK=self.squares_RK / count - square_RK,
            value_RK=value_RK,
            error_RK=error_RK,
            weights_RK=module.credit.weights.values_RK[:, self.steps].float(),
        )

    def _moved(self, module: ReCASTModule, batches: Sequence[PromptBatch], by_P: Tensor) -> Tensor:
        """Scores of held-out pictures, R × B, with the parameters moved for as long as it takes."""
        parameters = list(module.policy.trainable_parameters())
        kept = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, by in zip(parameters, by_P.split([one.numel() for one in kept]), strict=True):
                parameter.add_(by.view_as(parameter))
            scores_RB = self._held_out(module, batches)
            for parameter, before in zip(parameters, kept, strict=True):
                parameter.copy_(before)
        return scores_RB

    @staticmethod
    def _held_out(module: ReCASTModule, batches: Sequence[PromptBatch]) -> Tensor:
        scores = []
        for batch in batches:
            rollout = module.collect(batch, role="default")
            scores.append(module.rewards.score(rollout.images_B3HW, batch.prompts).values_RB)
        return torch.cat(scores, dim=1)


def _at_step(pairs: Pairs, step: int) -> Pairs:
    return pairs.at((pairs.step_N == step).nonzero().flatten())


def _gradients(module: ReCASTModule, rollout: Rollout, pairs: Pairs, z_RB: Tensor) -> Tensor:
    """The objective's gradient with each reward's z-scores as advantages, R × P."""
    nothing_BK = torch.zeros(z_RB.shape[1], rollout.levels_BT.shape[1] - 1)
    samples = module.objective.draw(rollout, nothing_BK, pairs, seed=module.seed)
    velocities = module.objective.predict(module.policy, module.rollout, samples, rollout.text[pairs.row_N])
    parameters, rows = list(module.policy.trainable_parameters()), []
    for z_B in z_RB:
        loss = module.objective.loss(velocities, replace(samples, advantage_N=z_B[pairs.row_N].float()))
        gradients = torch.autograd.grad(loss.total, parameters, retain_graph=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows)


def measured(arguments: Sequence[str], *, batches: int) -> Worth:
    """Of a configuration; its credit strategy only says which W is looked at."""
    still = ["--model.optimizer.init_args.lr", "0", "--model.timesteps_per_sample", "1"]
    cli, measurement = built([*arguments, *still], iterations=batches), Measurement()
    run(cli, measurement)
    assert measurement.worth is not None
    return measurement.worth


def main() -> None:
    """Prints the table; writes JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", default=[], help="an overlay over the quickstart")
    parser.add_argument(
        "--evidence",
        default=str(CONFIGS / "credit" / "quickstart.npz"),
        help="profiles.npz, which `recast_pl profile` wrote",
    )
    parser.add_argument("--batches", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=256, help="held out, in one batch of 64 after another")
    parser.add_argument("--json", type=Path, default=None, help="where the numbers go")
    parser.add_argument("--figure", type=Path, default=None, help="where the picture goes")
    parser.add_argument("--read", type=Path, default=None, help="numbers of before, in place of a measurement")
    options = parser.parse_args()
    estimator = {"class_path": "recast_pl.credit.FromFile", "init_args": {"path": options.evidence}}
    arguments = [
        *(argument for path in options.config for argument in ("--config", path)),
        *("--config", str(CONFIGS / "credit" / "recast.yaml"), "--credit.strategy.init_args.samples", "null"),
        *("--credit.strategy.init_args.estimator", json.dumps(estimator), "--credit.every_n_steps", "100000"),
        *("--data.evaluation.init_args.count", str(options.prompts)),
    ]
    worth = Worth.read(options.read) if options.read else measured(arguments, batches=options.batches)
    print(f"\n{table(worth)}\n{circumstances()}")
    if options.json is not None:
        worth.write(options.json)
    if options.figure is not None:
        figure(worth, options.figure)


if __name__ == "__main__":
    main()
