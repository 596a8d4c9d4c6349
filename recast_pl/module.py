"""The LightningModule: online rollout and policy update, one RL iteration a training step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from recast_pl.advantages import Advantages, PerReward
from recast_pl.credit.assignment import Credit
from recast_pl.credit.probe import Probe
from recast_pl.evaluation.steps import EvaluationSteps
from recast_pl.objectives import DiffusionNFT, Objective
from recast_pl.parallel.fully_shard import FullyShard, without_gradient_exchange
from recast_pl.parallel.processes import averaged, gathered, summed
from recast_pl.parallel.sharded import whole
from recast_pl.policy import Policy, Role
from recast_pl.policy.average import WeightAverage
from recast_pl.policy.old_policy import OldPolicyRamp
from recast_pl.prompts import PromptData
from recast_pl.rewards import JudgeSuite, RewardSuite
from recast_pl.rollout import ODERollout, RolloutSampler
from recast_pl.telemetry.clock import StageClock
from recast_pl.telemetry.iteration import reward_values, time_values, update_values
from recast_pl.trainer_limits import check_precision, check_whole_epochs, unfused
from recast_pl.types import (
    Experience,
    Prompt,
    PromptBatch,
    Rollout,
    Scores,
    TextEmbeddings,
    UpdatePart,
    Weights,
)
from recast_pl.update import Pairs, Pass, check_whole_groups, planned_passes, spare_pairs, training_pairs


class ReCASTModule(EvaluationSteps):
    """prompts → rollout → rewards → advantages → credit → objective → optimiser.

    Args:
        policy: the text-to-image model and its trained, old and reference weights.
        rewards: what is optimised.
        judges: what only judges, in `test`.
        rollout: how clean samples are drawn, in training from the old policy; None: ODERollout.
        advantages: how scores become advantages; None: PerReward.
        objective: the loss; None: DiffusionNFT.
        optimizer: makes the optimiser of the trained parameters.
        old_policy: how fast the old policy follows.
        average: averaged weights beside the trained ones, for `evaluated_policy: averaged`; None: none.
        timesteps_per_sample: denoising steps that each sample is trained at, drawn anew each time; None: all.
        min_noise_level: steps that start below are not trained: next to the clean sample there is no signal.
        micro_batch_size: (sample, step) pairs in one backward pass.
        updates_per_iteration: optimiser steps in one iteration, each over an equal share of the pairs.
        max_grad_norm: gradients are scaled down to this norm.
        evaluated_policy: whose pictures `validate`, `test` and `predict` judge.
        seed: of all noise, of the choice of steps and of the adapters.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        rewards: RewardSuite,
        judges: JudgeSuite | None = None,
        rollout: RolloutSampler | None = None,
        advantages: Advantages | None = None,
        objective: Objective | None = None,  # type: ignore[type-arg]
        optimizer: Callable[[Iterable[Any]], Optimizer] = torch.optim.AdamW,
        old_policy: OldPolicyRamp = OldPolicyRamp(),  # noqa: B008 - frozen
        average: WeightAverage | None = None,
        timesteps_per_sample: int | None = None,
        min_noise_level: float = 0.01,
        micro_batch_size: int = 64,
        updates_per_iteration: int = 1,
        max_grad_norm: float = 1.0,
        evaluated_policy: Role = "default",
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (
            ("micro_batch_size", micro_batch_size),
            ("updates_per_iteration", updates_per_iteration),
            ("timesteps_per_sample", 1 if timesteps_per_sample is None else timesteps_per_sample),
        ):
            if value < 1:
                raise ValueError(f"model.{name}: expected 1 or more, got {value}")
        rollout = rollout or ODERollout()
        if timesteps_per_sample is not None and timesteps_per_sample > rollout.num_steps:
            raise ValueError(
                f"model.timesteps_per_sample: {timesteps_per_sample} is more than the rollout has steps "
                f"(model.rollout.init_args.num_steps: {rollout.num_steps})"
            )
        if not max_grad_norm > 0:
            raise ValueError(f"model.max_grad_norm: expected above 0, got {max_grad_norm}")
        if evaluated_policy == "averaged" and average is None:
            raise ValueError("model.evaluated_policy: averaged needs model.average, such as {decay: 0.9}")
        self.automatic_optimization = False
        self.policy, self.average = policy, average
        policy.averaged = average is not None
        self.rewards, self.judges = rewards, judges
        self.rollout = rollout
        self.advantages, self.objective = advantages or PerReward(), objective or DiffusionNFT()
        self.optimizer, self.old_policy = optimizer, old_policy
        self.timesteps_per_sample, self.min_noise_level = timesteps_per_sample, min_noise_level
        self.micro_batch_size, self.updates_per_iteration = micro_batch_size, updates_per_iteration
        self.max_grad_norm = max_grad_norm
        self.evaluated_policy, self.seed = evaluated_policy, seed
        self.iteration = 0
        self.clock = StageClock()
        self.evaluations = []
        self.credit = Credit()  # a CreditAssigner brings its own

    # ------------------------------------------------------------------ the iteration

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """One RL iteration."""
        clock = self.clock
        experience = self.experience(batch)
        with clock("credit"):
            weights = self.credit(experience)
        with clock("advantages"):
            advantages_BK = self.advantages(experience.scores, experience.group_B, weights)
        with clock("update"):
            pairs = self.pairs(experience.rollout)
            parts = self.update_policy(experience, advantages_BK[experience.own].cpu(), pairs)
        with clock("old_policy"):
            self.policy.update_old(self.old_policy.decay(self.iteration))
            if self.average is not None:
                self.policy.update_average(self.average.at(self.iteration))
        self.iteration += 1
        self._log_iteration(experience, weights, advantages_BK, parts)

    def experience(self, batch: PromptBatch) -> Experience:
        """The iteration's rollout and scores."""
        scoring = self.rewards.begin(batch.prompts)
        rollout = self.collect(batch, role="old", on_images=scoring.add)
        with self.clock("rewards"):
            scores = self.everywhere(scoring.result())
        own = slice(self.global_rank * len(batch), (self.global_rank + 1) * len(batch))
        group_B = gathered(batch.group_B.to(self.device)).flatten()
        return Experience(rollout=rollout, scores=scores, group_B=group_B, own=own)

    def collect(
        self, batch: PromptBatch, *, role: Role, on_images: Callable[[Tensor], None] | None = None
    ) -> Rollout:
        """Clean samples and pictures of `role` for the batch's prompts; `on_images` gets them part by part."""
        clock, policy, images = self.clock, self.policy, []

        def decode(x0: Tensor) -> None:
            with clock("decode"):
                images.append(policy.decode(x0))
            if on_images is not None:
                on_images(images[-1])

        with torch.no_grad(), policy.using(role):
            with clock("text"):
                text = policy.text(batch.texts)
            with clock("rollout"):
                record = self.objective.records and batch.iteration >= 0
                drawn = self.rollout.draw(policy, batch, text, seed=self.seed, record=record, on_samples=decode)
        return Rollout(
            batch=batch,
            text=text,
            x0_BCHW=drawn.x0_BCHW,
            images_B3HW=torch.cat(images),
            levels_BT=drawn.levels_BT,
            steps_B=drawn.steps_B,
            drawn_B=torch.full((len(batch),), batch.iteration),
            version_B=torch.full((len(batch),), self.iteration),
            trajectory=drawn.trajectory,
        )

    def pairs(self, rollout: Rollout) -> Pairs:
        """The (sample, step) pairs that this iteration trains."""
        return training_pairs(
            rollout,
            iteration=self.iteration,
            trainable_BK=self.objective.trainable(rollout, min_noise_level=self.min_noise_level),
            levels=self.levels,
            timesteps_per_sample=self.timesteps_per_sample,
            seed=self.seed,
            whole_groups=self.objective.whole_groups,
        )

    def update_policy(
        self, experience: Experience, advantages_BK: Tensor, pairs: Pairs
    ) -> Mapping[str, Tensor]:
        """Accumulates gradients over micro-batches of pairs, steps; returns the mean loss parts."""
        optimizer = self.optimizers()
        assert isinstance(optimizer, pl.core.optimizer.LightningOptimizer)
        updates = planned_passes(
            pairs,
            spare=spare_pairs(experience.rollout, pairs),
            updates=self.updates_per_iteration,
            size=self.micro_batch_size,
            gathered=lambda counts: gathered(counts.to(self.device)),
        )
        means: dict[str, Tensor] = {}
        for passes in updates:
            for place, part in enumerate(passes, start=1):
                last = place == len(passes)
                with nullcontext() if last else without_gradient_exchange(self.trainer.strategy):
                    values = self._accumulate(experience, advantages_BK, part)
                for key, value in values.items():
                    means[key] = means.get(key, 0.0) + value * part.share
            optimizer.step()
            optimizer.zero_grad()
            torch.clear_autocast_cache()  # it holds half-precision copies of the weights before the step
        if self.credit.observer is not None:
            with self.clock("credit"):
                self.credit.observer.learn(summed)
        return {**averaged(means), "grad_norm": whole(self._grad_norm)}

    def _accumulate(self, experience: Experience, advantages_BK: Tensor, part: Pass) -> dict[str, Tensor]:
        """One forward and backward pass; its loss and the loss's parts, zeros for padding."""
        rollout, objective, pairs = experience.rollout, self.objective, part.pairs
        samples = objective.draw(rollout, advantages_BK, pairs, seed=self.seed)
        text = rollout.text[pairs.row_N.to(self.device)]
        velocities = objective.predict(self.policy, self.rollout, samples, text)
        loss = objective.loss(velocities, samples)
        values = {"total": loss.total.detach(), **loss.parts}
        if part.padding:  # the other processes wait for this pass, and nothing else is asked of it
            self.manual_backward((velocities.current_NCHW * 0).sum())
            return {key: torch.zeros_like(value) for key, value in values.items()}
        self.manual_backward(loss.total * part.weight)
        if self.credit.observer is not None:
            with self.clock("credit"):
                self.credit.observer.watch(
                    UpdatePart(
                        experience=experience,
                        row_N=pairs.row_N,
                        column_N=pairs.column_N,
                        columns=advantages_BK.shape[1],
                        samples=samples,
                        velocities=velocities,
                    )
                )
        return values

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Clips gradients: under 16-mixed they are scaled until here."""
        parameters = self.policy.trainable_parameters()
        self._grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)

    # ------------------------------------------------------------------ credit

    @property
    def levels(self) -> Tensor:
        """The K + 1 noise levels of the rollout's usual schedule, and of W's columns."""
        return self.policy.levels(self.rollout.num_steps)

    def probe(self, experience: Experience) -> Probe:
        """What an estimator may do with an iteration's samples, by the rollout policy."""
        policy, size = self.policy, self.rollout.micro_batch_size

        def velocity(x: Tensor, t: float, text: TextEmbeddings) -> Tensor:
            with torch.no_grad(), policy.using("old"):
                parts = [
                    self.rollout.velocity(policy, x[rows], t, text[rows])
                    for rows in (slice(start, start + size) for start in range(0, len(x), size))
                ]
            return torch.cat(parts)

        return Probe(
            experience=experience,
            levels=self.levels,
            iteration=self.iteration,
            velocity=velocity,
            decode=lambda x0: torch.cat([policy.decode(part) for part in x0.split(size)]),
            score=self.score_everywhere,
            schedule=policy.levels,
            seed=self.seed,
        )

    # ------------------------------------------------------------------ life cycle

    def setup(self, stage: str) -> None:
        """Checks what the constructor could not see, then loads rewards; no weight is read before that."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        check_precision(str(self.trainer.precision))
        suite = self.judges if stage == "test" else self.rewards
        if suite is None or not suite.rewards:
            raise ValueError("judges.rewards: `test` judges by held-out rewards; the configuration has none")
        if isinstance(data, PromptData):
            for part in ("train", "evaluation") if stage == "fit" else ("evaluation",):
                suite.check_prompts(data.prompts(part), origin=data.origin(part))
            if stage == "fit":
                data.check_shares(self.trainer.world_size)
                check_whole_epochs(self.trainer, data.iterations_per_epoch)
                if self.objective.whole_groups:
                    check_whole_groups(
                        num_groups=data.num_groups,
                        group_size=data.group_size,
                        micro_batch_size=self.micro_batch_size,
                        processes=self.trainer.world_size,
                    )
        if stage == "fit":
            self.objective.check(self.rollout)
        suite.setup(self.trainer.strategy.root_device)

    def configure_model(self) -> None:
        """Loads the policy's weights, and shards them where the strategy does."""
        self.policy.load(seed=self.seed)
        if isinstance(self.trainer.strategy, FullyShard):
            self.policy.shard(self.trainer.strategy.shard)
        self.credit.prepare(
            names=self.rewards.names,
            budgets_R=self.rewards.budgets_R,
            levels=self.levels,
            trained_K=self.objective.trained_steps(
                self.levels,
                self.rollout,
                min_noise_level=self.min_noise_level,
                timesteps_per_sample=self.timesteps_per_sample,
            ),
            probe=self.probe,
        )

    def configure_optimizers(self) -> Optimizer:
        """The optimiser of the trained parameters."""
        return unfused(self.optimizer(self.policy.trainable_parameters()), str(self.trainer.precision))

    def teardown(self, stage: str) -> None:
        """Frees the rewards."""
        suite = self.judges if stage == "test" else self.rewards
        if suite is not None:
            suite.teardown()

    def state_dict(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        """The trained and the old weights; base model, text encoders, VAE and rewards are not in it."""
        return self.policy.saved_state()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Puts the trained and the old weights back, or refuses; see `Policy.load_saved_state`."""
        self.policy.load_saved_state(dict(state_dict))
        return torch.nn.modules.module._IncompatibleKeys([], [])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the iteration, the policy's settings, and the evaluations so far."""
        checkpoint["policy"] = dict(self.policy.settings)
        checkpoint["iteration"] = self.iteration
        checkpoint["evaluations"] = [[iteration, dict(values)] for iteration, values in self.evaluations]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Goes on at the saved iteration; what is reported at the end is the change over the whole run.

        Raises:
            ValueError: where the policy's settings are not the checkpoint's.
        """
        for key, own in self.policy.settings.items():
            saved = checkpoint.get("policy", {}).get(key)
            if saved != own:
                raise ValueError(f"model.policy.init_args.{key}: the checkpoint's is {saved}, this run's {own}")
        self.iteration = int(checkpoint["iteration"])
        self.evaluations = [(int(iteration), values) for iteration, values in checkpoint["evaluations"]]

    # ------------------------------------------------------------------ over processes, and logs

    def score_everywhere(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Scores:
        """The training rewards of all processes' pictures, in the order of the iteration's samples."""
        return self.everywhere(self.rewards.score(images_B3HW, prompts))

    def everywhere(self, scores: Scores) -> Scores:
        """The scores of all processes' samples, in the order of the iteration's samples."""
        values_RB = gathered(scores.values_RB).transpose(0, 1).flatten(1)
        return Scores(names=scores.names, values_RB=values_RB, valid_RB=values_RB.isfinite())

    def _log_iteration(
        self, experience: Experience, weights: Weights, advantages_BK: Tensor, parts: Mapping[str, Tensor]
    ) -> None:
        scores = experience.scores
        values = {
            "old_policy/distance": self.policy.distance_to_old(),
            "old_policy/decay": self.old_policy.decay(self.iteration - 1),
            **update_values(advantages_BK, weights, parts),
            **reward_values(scores),
            **time_values(self.clock.take(), samples=scores.values_RB.shape[1]),
            "time/credit_share": self.clock.share("credit"),
        }
        self.log_dict({key: torch.as_tensor(value, dtype=torch.float32) for key, value in values.items()})
        shown = {name: values[f"train/{name}"].float() for name in scores.names}
        self.log_dict(shown, prog_bar=True, logger=False)
