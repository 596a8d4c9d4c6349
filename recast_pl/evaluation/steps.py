"""Lightning's `validate`, `test` and `predict` for a policy: pictures of held-out prompts, scored."""

from abc import ABC, abstractmethod

import lightning.pytorch as pl
import torch

from recast_pl.evaluation.statistics import ScoreStatistics
from recast_pl.policy import Role
from recast_pl.rewards import JudgeSuite, RewardSuite
from recast_pl.telemetry.clock import StageClock
from recast_pl.types import Evaluated, PromptBatch, Rollout


class EvaluationSteps(pl.LightningModule, ABC):
    """The evaluation half of the module: no step here learns anything."""

    rewards: RewardSuite
    judges: JudgeSuite | None
    evaluated_policy: Role
    iteration: int
    clock: StageClock
    evaluations: list[tuple[int, dict[str, float]]]  # iteration, and the values logged there

    @abstractmethod
    def collect(self, batch: PromptBatch, *, role: Role) -> Rollout:
        """Clean samples and pictures of `role` for the batch's prompts."""

    def validation_step(  # type: ignore[override]
        self, batch: PromptBatch, batch_idx: int
    ) -> Evaluated | None:
        """Training rewards on held-out prompts."""
        return self._evaluate(self.rewards, batch)

    def test_step(  # type: ignore[override]
        self, batch: PromptBatch, batch_idx: int
    ) -> Evaluated | None:
        """Held-out judges on held-out prompts."""
        assert self.judges is not None  # setup has refused
        return self._evaluate(self.judges, batch)

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> Evaluated | None:
        """Pictures of held-out prompts, with the training rewards' scores."""
        return self._evaluate(self.rewards, batch)

    def _evaluate(self, suite: RewardSuite, batch: PromptBatch) -> Evaluated | None:
        rollout = self.collect(batch, role=self.evaluated_policy)
        if batch.padding:  # this process has fewer held-out prompts; it had to take the same steps
            rollout = rollout.rows(torch.arange(len(batch) - batch.padding))
        if not len(rollout.batch):
            self.statistics.update(torch.empty(len(suite.names), 0, device=self.device))  # it will be gathered
            return None
        scores = suite.score(rollout.images_B3HW, rollout.batch.prompts)
        self.statistics.update(scores.values_RB)
        return Evaluated(rollout, scores)

    def on_validation_epoch_start(self) -> None:
        """Forgets the scores of the last evaluation."""
        self.statistics = ScoreStatistics(self.rewards.names).to(self.device)

    on_predict_epoch_start = on_validation_epoch_start

    def on_test_epoch_start(self) -> None:
        """Forgets the scores of the last evaluation."""
        assert self.judges is not None
        self.statistics = ScoreStatistics(self.judges.names).to(self.device)

    def on_validation_epoch_end(self) -> None:
        """Logs mean, spread and failures of each reward; before the first iteration too."""
        values = {f"val/{key}": value for key, value in self.statistics.compute().items()}
        self.evaluations.append((self.iteration, values))
        self.clock.discard()  # an evaluation is no part of the next iteration's time
        if self.trainer.state.fn == "validate":  # Lightning prints what goes to its loggers
            self.log_dict(values)
            return
        for logger in self.loggers:  # by iteration; in `fit`, Lightning's own step lags behind by one
            logger.log_metrics(values, step=self.iteration)
        self.log_dict(values, logger=False)

    def on_test_epoch_end(self) -> None:
        """Logs mean, spread and failures of each judge."""
        self.log_dict({f"test/{key}": value for key, value in self.statistics.compute().items()})
