"""One RL iteration, stage by stage, against a plain loop of the same algorithm (`plain_loop.py`).

    OMP_NUM_THREADS=1 python tests/benchmarks/iteration.py

Pairs of iterations run alternately in one process, from the same adapters, prompts, noises and steps; which of
the two goes first changes from pair to pair, so that other load on the machine meets both. A pair's losses and
gradient norms must agree. The framework's side is the real thing: Lightning's loop, from the start of a batch
to its end, logging and checks included; credit is `Uniform`. Printed: medians over pairs, and of the ratios
within pairs. The first pair is not counted.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from peft import LoraConfig
from plain_loop import Draws, Outcome, PlainLoop, Recipe
from quickstart import built, circumstances, larger, run

from recast_pl.module import ReCASTModule
from recast_pl.noise import Purpose, keyed_normal, keyed_subset
from recast_pl.policy import SD3Policy
from recast_pl.prompts import PromptData
from recast_pl.telemetry.clock import STAGES
from recast_pl.types import PromptBatch
from recast_pl.update import trainable_steps

# relative to 1, or to the loss where that is larger: the quickstart's is about 27, of which float32 resolves
# 2e-6, and a picture that rounds to another grey level moves the JPEG reward by a byte or more
LOSS_TOLERANCE = 1e-5
# relative to the norm, or to .01 where that is larger: the gradient sums terms of both signs
NORM_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One iteration done twice."""

    ours: Outcome
    plain: Outcome


class Alternation(pl.Callback):
    """Runs the plain loop's iteration before or after each of the framework's, and times both."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self._loop: PlainLoop | None = None
        self._plain: Outcome | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Before anything else happens to a batch; this callback is the first."""
        assert isinstance(module, ReCASTModule)
        self._loop = self._loop or plain_loop_of(module, trainer.datamodule)  # type: ignore[attr-defined]
        self._take_over(module)
        self._reward_seconds = dict(module.rewards.seconds)
        self._plain = self._run(module, batch) if batch_idx % 2 else None
        self._began = (time.perf_counter(), time.process_time())

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """After the framework's iteration."""
        wall, cpu = (time.perf_counter() - self._began[0], time.process_time() - self._began[1])
        logged = trainer.callback_metrics
        rewards = {name: s - self._reward_seconds[name] for name, s in module.rewards.seconds.items()}
        seconds = {stage: float(logged[f"time/{stage}"]) for stage in STAGES} | rewards
        seconds["other"] = wall - sum(seconds[stage] for stage in STAGES)
        ours = Outcome(
            loss=float(logged["loss/total"]),
            grad_norm=float(logged["loss/grad_norm"]),
            seconds=seconds,
            cpu_seconds=cpu,
        )
        plain = self._plain or self._run(module, batch, iteration=module.iteration - 1)
        check_equal(ours, plain)
        self.pairs.append(Pair(ours=ours, plain=plain))

    def _take_over(self, module: ReCASTModule) -> None:
        """Both start from the same adapters."""
        assert self._loop is not None
        assert isinstance(module.policy, SD3Policy)
        with torch.no_grad():
            for own, theirs in ((self._loop.trained, module.policy.adapters.trained),
                                (self._loop.old, module.policy.adapters.old)):  # fmt: skip
                for mine, value in zip(own, theirs, strict=True):
                    mine.copy_(value)

    def _run(self, module: ReCASTModule, batch: PromptBatch, iteration: int | None = None) -> Outcome:
        assert self._loop is not None
        iteration = module.iteration if iteration is None else iteration
        return self._loop.iteration(batch.prompts, draws_of(module, batch), module.old_policy.decay(iteration))


def check_equal(ours: Outcome, plain: Outcome) -> None:
    """Raises where the two did not compute the same."""
    if not abs(ours.loss - plain.loss) <= LOSS_TOLERANCE * max(1.0, abs(plain.loss)):
        raise RuntimeError(f"the framework's loss is {ours.loss:.8f}, the plain loop's {plain.loss:.8f}")
    if not abs(ours.grad_norm - plain.grad_norm) <= NORM_TOLERANCE * max(0.01, plain.grad_norm):
        raise RuntimeError(
            f"the framework's gradient norm is {ours.grad_norm:.8f}, the plain loop's {plain.grad_norm:.8f}"
        )


def plain_loop_of(module: ReCASTModule, data: PromptData) -> PlainLoop:
    """The plain loop of a module's configuration, on a pipeline of its own and the module's loaded rewards."""
    from diffusers import StableDiffusion3Pipeline

    policy, objective = module.policy, module.objective
    assert isinstance(policy, SD3Policy)
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        policy.source, text_encoder_3=None, tokenizer_3=None, dtype={"default": torch.float32}
    )
    config = LoraConfig(
        r=policy.lora_rank,
        lora_alpha=policy.lora_alpha,
        target_modules=list(policy.lora_targets),
        init_lora_weights="gaussian",
    )
    return PlainLoop(
        pipeline,
        config,
        module.rewards.rewards,
        Recipe(
            num_steps=module.rollout.num_steps,
            group_size=data.group_size,
            max_sequence_length=policy.max_sequence_length,
            beta=objective.beta,
            advantage_clip=objective.advantage_clip,
            reference_coefficient=objective.reference_coefficient,
            max_grad_norm=module.max_grad_norm,
            budgets=module.rewards.budgets,
        ),
        module.optimizer,
    )


def draws_of(module: ReCASTModule, batch: PromptBatch) -> Draws:
    """The framework's own keyed noises and steps of an iteration."""
    samples, count = batch.sample_B.tolist(), module.timesteps_per_sample
    key = {"seed": module.seed, "iteration": batch.iteration}
    steps_K = trainable_steps(module.levels, min_noise_level=module.min_noise_level).nonzero().flatten()
    chosen_BS = keyed_subset(len(steps_K), count or len(steps_K), samples=samples, purpose=Purpose.STEPS, **key)
    step_BS = steps_K[chosen_BS]
    shape = module.policy.latent_shape
    noise = [
        keyed_normal(shape, samples=samples, steps=column.tolist(), purpose=Purpose.RENOISE, **key)
        for column in step_BS.T
    ]
    return Draws(
        start_BCHW=keyed_normal(shape, samples=samples, purpose=Purpose.START, **key),
        step_BS=step_BS,
        noise_SBCHW=torch.stack(noise),
    )


def measured(arguments: Sequence[str] = (), *, pairs: int) -> list[Pair]:
    """Runs pairs of iterations after one that is not counted."""
    cli = built(arguments, iterations=pairs + 1)
    alternation = Alternation()
    run(cli, alternation)
    return alternation.pairs[1:]


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Medians over pairs: seconds of each stage on both sides, and the ratio within pairs."""
    rewards = [name for name in pairs[0].plain.seconds if name in pairs[0].ours.seconds and name not in STAGES]
    rows: dict[str, Any] = {}
    for row in ("text", "rollout", "decode", "rewards", *rewards, "advantages", "credit", "update",
                "old_policy", "other"):  # fmt: skip
        rows[row] = _row([(p.ours.seconds[row], p.plain.seconds.get(row)) for p in pairs])
    whole = ("text", "rollout", "decode", "rewards", "advantages", "credit", "update", "old_policy", "other")
    rows["iteration"] = _row([(_total(p.ours.seconds, whole), _total(p.plain.seconds, whole)) for p in pairs])
    rows["iteration, CPU"] = _row([(p.ours.cpu_seconds, p.plain.cpu_seconds) for p in pairs])
    ratios = sorted(_total(p.ours.seconds, whole) / _total(p.plain.seconds, whole) for p in pairs)
    apart = [abs(p.ours.loss - p.plain.loss) for p in pairs]
    return {
        "rows": rows,
        "ratio": median(ratios),
        "ratios": ratios,
        "pairs": len(pairs),
        "largest_loss": max(abs(p.plain.loss) for p in pairs),
        "largest_loss_difference": max(apart),
    }


def _total(seconds: Mapping[str, float], stages: Sequence[str]) -> float:
    return sum(seconds.get(stage, 0.0) for stage in stages)


def _row(values: Sequence[tuple[float, float | None]]) -> dict[str, float | None]:
    ours, plain = [one for one, _ in values], [other for _, other in values if other is not None]
    ratio = [one / other for one, other in values if other]
    return {
        "ours": median(ours),
        "plain": median(plain) if plain else None,
        "ratio": median(ratio) if ratio else None,
    }


def table(report: Mapping[str, Any]) -> str:
    """The summary in Markdown."""
    lines = ["| stage | framework, s | plain loop, s | ratio |", "|---|---|---|---|"]
    for name, row in report["rows"].items():
        plain, ratio = ("" if row[key] is None else f"{row[key]:.3f}" for key in ("plain", "ratio"))
        lines.append(f"| {name} | {row['ours']:.3f} | {plain} | {ratio} |")
    low, high = report["ratios"][0], report["ratios"][-1]
    lines.append(f"\nRatio of whole iterations over {report['pairs']} pairs: median {report['ratio']:.3f}, "
                 f"from {low:.3f} to {high:.3f}.")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Prints the table; writes JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", type=Path, default=None, help="where the numbers go")
    parser.add_argument("--config", action="append", default=[], help="an overlay over the quickstart")
    parser.add_argument(
        "--larger", action="store_true", help="a larger pipeline, untrained, at 128 × 128 pixels"
    )
    options = parser.parse_args()
    before = circumstances()
    with TemporaryDirectory() as folder:
        arguments = [argument for path in options.config for argument in ("--config", path)]
        arguments += larger(Path(folder)) if options.larger else []
        report = {
            "before": before,
            **summary(measured(arguments, pairs=options.pairs)),
            "after": circumstances(),
        }
    print(f"\n{table(report)}\nbefore: {before}\nafter: {report['after']}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
