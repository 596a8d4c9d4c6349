"""The LightningModule: online rollout and policy update, one RL iteration a training step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from recast_pl.advantages import Advantages, PerReward
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
    NoisedSamples,
    Prompt,
    PromptBatch,
    Rollout,
    Scores,
    TextEmbeddings,
    Transitions,
    UpdateObserver,
    UpdatePart,
    Velocities,
    Weights,
)
from recast_pl.update import (
    Pairs,
    check_even_updates,
    check_whole_groups,
    trained_steps,
    training_pairs,
    training_samples,
)


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
        objective: Objective | None = None,
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
        self.observer: UpdateObserver | None = None
        self._experience: Experience | None = None
        self._weights: Weights | None = None

    # ------------------------------------------------------------------ the iteration

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """One RL iteration."""
        clock = self.clock
        experience = self.experience(batch)
        with clock("advantages"):
            advantages_BK = self.advantages(experience.scores, experience.group_B, self.weights)
        with clock("update"):
            pairs = training_pairs(
                experience.rollout,
                timesteps_per_sample=self.timesteps_per_sample,
                min_noise_level=self.min_noise_level,
                seed=self.seed,
                whole_groups=self.objective.whole_groups,
            )
            parts = self.update_policy(experience, advantages_BK[experience.own].cpu(), pairs)
        with clock("old_policy"):
            self.policy.update_old(self.old_policy.decay(self.iteration))
            if self.average is not None:
                self.policy.update_average(self.average.at(self.iteration))
        self.iteration += 1
        self._experience = None
        self._log_iteration(experience, advantages_BK, parts)

    def experience(self, batch: PromptBatch) -> Experience:
        """The iteration's rollout and scores; made once, for credit may look before the training step does."""
        if self._experience is None or self._experience.rollout.batch is not batch:
            scoring = self.rewards.begin(batch.prompts)
            rollout = self.collect(batch, role="old", on_images=scoring.add)
            with self.clock("rewards"):
                scores = self.everywhere(scoring.result())
            own = slice(self.global_rank * len(batch), (self.global_rank + 1) * len(batch))
            group_B = gathered(batch.group_B.to(self.device)).flatten()
            self._experience = Experience(rollout=rollout, scores=scores, group_B=group_B, own=own)
        return self._experience

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
                record = self.objective.trains_on == "trajectory" and batch.iteration >= 0
                drawn = self.rollout.draw(policy, batch, text, seed=self.seed, record=record, on_samples=decode)
        return Rollout(
            batch=batch,
            text=text,
            x0_BCHW=drawn.x0_BCHW,
            images_B3HW=torch.cat(images),
            levels=self.levels,
            trajectory=drawn.trajectory,
        )

    def update_policy(
        self, experience: Experience, advantages_BK: Tensor, pairs: Pairs
    ) -> Mapping[str, Tensor]:
        """Accumulates gradients over micro-batches of pairs, steps; returns the mean loss parts."""
        optimizer, rollout = self.optimizers(), experience.rollout
        assert isinstance(optimizer, pl.core.optimizer.LightningOptimizer)
        means: dict[str, Tensor] = {}
        for share in pairs.shares(self.updates_per_iteration):
            parts = list(share.split(self.micro_batch_size))
            for part in parts:
                samples = training_samples(
                    rollout, advantages_BK, part, seed=self.seed, shared_noise=self.objective.shared_noise
                )
                text = rollout.text[part.row_N.to(self.device)]
                velocities = self.velocities(samples, text)
                loss = self.objective.loss(velocities, samples)
                last = part is parts[-1]
                with nullcontext() if last else without_gradient_exchange(self.trainer.strategy):
                    self.manual_backward(loss.total * (len(part) / len(share)))
                if self.observer is not None:
                    with self.clock("credit"):
                        self.observer.watch(
                            UpdatePart(
                                experience=experience,
                                row_N=part.row_N,
                                step_N=part.step_N,
                                samples=samples,
                                velocities=velocities,
                            )
                        )
                for key, value in {"total": loss.total.detach(), **loss.parts}.items():
                    means[key] = means.get(key, 0.0) + value * (len(part) / len(pairs))
            optimizer.step()
            optimizer.zero_grad()
            torch.clear_autocast_cache()  # it holds half-precision copies of the weights before the step
        if self.observer is not None:
            with self.clock("credit"):
                self.observer.learn(summed)
        return {**averaged(means), "grad_norm": whole(self._grad_norm)}

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Clips gradients: under 16-mixed they are scaled until here."""
        parameters = self.policy.trainable_parameters()
        self._grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)

    def velocities(self, samples: NoisedSamples | Transitions, text: TextEmbeddings) -> Velocities:
        """Predictions at x_t; old and reference only where the objective reads them."""
        x_t = samples.x_t_NCHW

        def velocity() -> Tensor:
            if isinstance(samples, Transitions):  # taken along the guided velocity
                return self.rollout.velocity(self.policy, x_t, samples.t_N, text)
            return self.policy.velocity(x_t, samples.t_N, text)

        def without_gradient(role: Role) -> Tensor:
            with torch.no_grad(), self.policy.using(role):
                return velocity()

        old = without_gradient("old") if self.objective.needs_old else None
        reference = without_gradient("reference") if self.objective.needs_reference else None
        current = velocity()
        return Velocities(current_NCHW=current, old_NCHW=old, reference_NCHW=reference)

    # ------------------------------------------------------------------ credit

    @property
    def levels(self) -> Tensor:
        """The K + 1 noise levels of rollouts and of W's columns."""
        return self.policy.levels(self.rollout.num_steps)

    @property
    def has_weights(self) -> bool:
        """Whether W has been computed."""
        return self._weights is not None

    @property
    def weights(self) -> Weights:
        """K·W; set by the CreditAssigner before the first iteration."""
        if self._weights is None:
            raise RuntimeError("W is used before it is computed: the trainer needs a CreditAssigner callback")
        return self._weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        rewards, steps = len(self.rewards.names), len(self.levels) - 1
        if weights.names != self.rewards.names or weights.values_RK.shape != (rewards, steps):
            raise ValueError(
                f"W of the shape {tuple(weights.values_RK.shape)} and the rewards {', '.join(weights.names)} "
                f"does not fit {rewards} × {steps} (rewards × steps) and {', '.join(self.rewards.names)}"
            )
        self._weights = weights

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
        rollout, objective = self.rollout, self.objective
        on_path = objective.trains_on == "trajectory"
        steps = trained_steps(
            self.levels,
            min_noise_level=self.min_noise_level,
            timesteps_per_sample=self.timesteps_per_sample,
            stochastic=(rollout.stochastic_range, rollout.stochastic_steps) if on_path else None,
        )
        data, processes = self.trainer.datamodule, self.trainer.world_size  # type: ignore[attr-defined]
        if isinstance(data, PromptData):
            owners = data.num_groups * (1 if objective.whole_groups else data.group_size)
            check_even_updates(
                pairs=owners // processes * steps, updates=self.updates_per_iteration, processes=processes
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
        self, experience: Experience, advantages_BK: Tensor, parts: Mapping[str, Tensor]
    ) -> None:
        scores = experience.scores
        values = {
            "old_policy/distance": self.policy.distance_to_old(),
            "old_policy/decay": self.old_policy.decay(self.iteration - 1),
            **update_values(advantages_BK, parts),
            **reward_values(scores),
            **time_values(self.clock.take(), samples=scores.values_RB.shape[1]),
            "time/credit_share": self.clock.share("credit"),
        }
        self.log_dict({key: torch.as_tensor(value, dtype=torch.float32) for key, value in values.items()})
        shown = {name: values[f"train/{name}"].float() for name in scores.names}
        self.log_dict(shown, prog_bar=True, logger=False)
