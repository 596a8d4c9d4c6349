"""Preview and ValueHead against PairedCompletions, on the embedded pipeline and the quickstart's rewards.

    python tests/benchmarks/profile_estimators.py --output docs

Truth: paired completions of `--truth` iterations' samples (64 each), a refined schedule. Then every estimator
sees 1, 2, 4 … iterations of other samples; its error is the mean absolute difference of the normalised curves
D(t)/D(0) from the truth, over rewards and levels. Seconds are CPU time of the process. ValueHead is given the
pairs that an update of the same iterations would draw (4 steps a sample), the policy standing still.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recast_pl.cli import quieten
from recast_pl.credit import PairedCompletions, Preview, Profile, ReCAST, ValueHead
from recast_pl.credit.probe import Probe
from recast_pl.policy import SD3Policy
from recast_pl.prompts import SceneGrammar
from recast_pl.prompts.sampling import GroupedPrompts
from recast_pl.rewards import CLIPScore, Composition, JPEGIncompressibility, RewardSuite, Sharpness
from recast_pl.rollout import ODERollout
from recast_pl.types import Experience, PromptBatch, Rollout, TextEmbeddings, UpdatePart, Velocities
from recast_pl.update import renoise, trainable_steps, training_pairs

SEED, STEPS, GROUPS, SIZE = 7, 10, 8, 8


class Bench:
    """The embedded policy, the quickstart's rewards, and iterations of samples."""

    def __init__(self) -> None:
        self.policy = SD3Policy(pretrained="recast_pl://tiny", lora_rank=4, max_sequence_length=1)
        self.policy.load(seed=SEED)
        self.rewards = RewardSuite(
            rewards={
                "clipscore": CLIPScore(pretrained="recast_pl://clip"),
                "composition": Composition(),
                "sharpness": Sharpness(),
                "jpeg": JPEGIncompressibility(),
            }
        )
        self.rewards.setup(torch.device("cpu"))
        self.sampler = ODERollout(num_steps=STEPS, progress_bar=False)
        self.levels = self.policy.levels(STEPS)

    def batches(self, first: int, count: int) -> list[PromptBatch]:
        """`count` iterations' prompts from iteration `first` on."""
        prompts = list(SceneGrammar(count=2048).prompts())
        return list(
            GroupedPrompts(
                prompts,
                position=lambda: first,
                iterations_per_epoch=count,
                num_groups=GROUPS,
                group_size=SIZE,
                seed=SEED,
                rank=0,
                world_size=1,
            )
        )

    @torch.no_grad()
    def probe(self, batch: PromptBatch) -> Probe:
        """An iteration's samples, scored."""
        text = self.policy.text(batch.texts)
        x0 = self.sampler.sample(self.policy, batch, text, seed=SEED)
        rollout = Rollout.on_schedule(
            self.levels, batch=batch, text=text, x0_BCHW=x0, images_B3HW=self.policy.decode(x0)
        )
        scores = self.rewards.score(rollout.images_B3HW, batch.prompts)
        experience = Experience(rollout=rollout, scores=scores, group_B=batch.group_B, own=slice(0, len(batch)))

        def velocity(x: Tensor, t: float, text: TextEmbeddings) -> Tensor:
            return self.sampler.velocity(self.policy, x, t, text)

        return Probe(
            experience=experience,
            levels=self.levels,
            iteration=batch.iteration,
            velocity=velocity,
            decode=self.policy.decode,
            score=self.rewards.score,
            schedule=self.policy.levels,
            seed=SEED,
        )

    @torch.no_grad()
    def update_parts(self, experience: Experience) -> list[UpdatePart]:
        """What the policy update of these samples would show a value head."""
        rollout = experience.rollout
        pairs = training_pairs(
            rollout,
            iteration=rollout.batch.iteration,
            trainable_BK=trainable_steps(rollout.levels_BT, min_noise_level=0.01),
            levels=self.levels,
            timesteps_per_sample=4,
            seed=SEED,
        )
        parts = []
        for part in pairs.split(64):
            samples = renoise(rollout, torch.zeros(len(rollout.batch), STEPS), part, seed=SEED)
            known = self.policy.velocity(samples.x_t_NCHW, samples.t_N, rollout.text[part.row_N])
            parts.append(
                UpdatePart(
                    experience=experience,
                    row_N=part.row_N,
                    column_N=part.column_N,
                    columns=STEPS,
                    samples=samples,
                    velocities=Velocities(current_NCHW=known, old_NCHW=known, reference_NCHW=None),
                )
            )
        return parts


def curves(profile: Profile) -> Tensor:
    """D(t)/D(0) of each reward [R, K]."""
    return profile.monotone_RK / profile.total_R[:, None].clamp_min(1e-12)


def main() -> None:
    """Measures, prints the table, writes profile_estimators.json and .png."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--truth", type=int, default=32, help="iterations of 64 samples for the truth")
    parser.add_argument("--truth-steps", type=int, default=20, help="schedule of the truth's completions")
    parser.add_argument("--largest", type=int, default=16, help="iterations of the largest budget")
    parser.add_argument("--output", type=Path, default=Path("docs"))
    options = parser.parse_args()
    quieten()
    bench = Bench()
    probes = [bench.probe(batch) for batch in bench.batches(0, options.truth + options.largest)]
    truth = ReCAST(estimator=PairedCompletions(num_steps=options.truth_steps), memory=1.0)
    for probe in probes[: options.truth]:
        truth.observe(probe)
    assert truth.profile is not None
    wanted = curves(truth.profile)
    rows: list[dict[str, Any]] = []
    final: dict[str, Profile] = {}
    for name, estimator in (
        ("PairedCompletions", PairedCompletions()),
        ("Preview, linear", Preview()),
        ("Preview, isotonic", Preview(regression="isotonic")),
        ("ValueHead", ValueHead()),
    ):
        strategy, spent = ReCAST(estimator=estimator, memory=1.0), 0.0
        for number, probe in enumerate(probes[options.truth :], start=1):
            parts = bench.update_parts(probe.experience) if strategy.needs_updates else []
            began = time.process_time()  # whatever else the machine does
            for part in parts:
                strategy.watch(part)
            strategy.learn(lambda tensor: tensor)
            strategy.observe(probe)
            spent += time.process_time() - began
            if number & (number - 1) == 0:
                assert strategy.profile is not None
                assert strategy.average.latest is not None
                latest = strategy.average.latest
                error = (curves(strategy.profile) - wanted).abs().mean().item()
                rows.append(
                    {
                        "estimator": name,
                        "samples": number * GROUPS * SIZE,
                        "reward_calls": latest.reward_calls,
                        "seconds": spent,
                        "error": error,
                    }
                )
                print(rows[-1], flush=True)
        assert strategy.profile is not None
        final[name] = strategy.profile
        if name.startswith("Preview"):
            share = (strategy.average.latest.moments_RK - 1) * strategy.clip**2
            print(f"{name}: R² by level", [[round(x, 3) for x in row] for row in share.tolist()], flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    draw(truth.profile, final, rows, options.output / "profile_estimators.png")
    document = {
        "levels": bench.levels.tolist(),
        "rewards": list(truth.profile.names),
        "truth": wanted.tolist(),
        "truth_errors": (truth.profile.errors_RK / truth.profile.total_R[:, None]).tolist(),
        "curves": {name: curves(profile).tolist() for name, profile in final.items()},
        "rows": rows,
    }
    (options.output / "profile_estimators.json").write_text(json.dumps(document, indent=1))


def draw(truth: Profile, final: dict[str, Profile], rows: list[dict[str, Any]], path: Path) -> None:
    """One panel of curves for each reward, one of error against cost."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    panels = figure.subplot_mosaic([["0", "1", "cost"], ["2", "3", "cost"]], width_ratios=[1, 1, 1.25])
    levels = truth.levels.tolist()
    shades = dict(zip(final, ("#4c78a8", "#f58518", "#e45756", "#54a24b"), strict=True))
    for row, name in enumerate(truth.names):
        axes = panels[str(row)]
        total, curve = truth.total_R[row], curves(truth)[row]
        axes.plot(levels, [0, *curve.tolist()], color="black", linewidth=2, label="truth (paired)")
        band = 2 * truth.errors_RK[row] / total
        axes.fill_between(
            levels[1:], (curve - band).tolist(), (curve + band).tolist(), color="black", alpha=0.12, linewidth=0
        )
        for estimator, profile in final.items():
            axes.plot(levels, [0, *curves(profile)[row].tolist()], color=shades[estimator], label=estimator)
        axes.set_xlim(1, 0)
        axes.set_ylim(-0.03, 1.05)
        axes.set_title(name, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels["0"].legend(frameon=False, fontsize=7)
    for key in ("0", "2"):
        panels[key].set_ylabel("D(t) / D(0)")
    for key in ("2", "3"):
        panels[key].set_xlabel("noise level t (noise → clean)")
    cost = panels["cost"]
    for estimator, shade in shades.items():
        mine = [row for row in rows if row["estimator"] == estimator]
        seconds, errors = [row["seconds"] for row in mine], [row["error"] for row in mine]
        cost.plot(seconds, errors, "o-", color=shade, label=estimator)
    cost.legend(frameon=False, fontsize=8)
    cost.set_xscale("log")
    cost.set_ylim(bottom=0)
    cost.set_xlabel("CPU seconds in the estimator")
    cost.set_ylabel("mean |D(t)/D(0) − truth| over rewards and levels")
    cost.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
