"""Rebuilds the embedded models from nothing: `python -m recast_pl.assets.make --output FOLDER`.

Four stages (VAE, denoiser with its text encoders, two CLIPs), each resumable: started again, the command goes
on where it was. Then everything is written in the layouts that `from_pretrained` reads, measured on held-out
captions, and described in a model card.
"""

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

STAGES = ("vae", "denoiser", "clip", "judge", "assemble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Updates and seeds of each stage."""

    vae_steps: int = 3000
    denoiser_steps: int = 5000
    clip_steps: int = 2500
    scenes: int = 40_000
    seed: int = 1


def main(arguments: list[str] | None = None) -> None:
    """Runs the stages that are asked for, in order."""
    parser = argparse.ArgumentParser(prog="python -m recast_pl.assets.make", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="where pipeline, clip and judge go")
    parser.add_argument("--work", type=Path, default=Path("build/tiny"), help="states of the stages")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--compile", action="store_true", help="torch.compile the denoiser")
    for field in fields(Recipe):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    options = parser.parse_args(arguments)
    recipe = Recipe(**{field.name: getattr(options, field.name) for field in fields(Recipe)})
    build(
        recipe,
        output=options.output,
        work=options.work,
        device=options.device,
        stages=options.stages,
        compiled=options.compile,
    )


def build(
    recipe: Recipe,
    *,
    output: Path,
    work: Path,
    device: str,
    stages: list[str],
    compiled: bool = False,
    pictures: int = 1024,
) -> None:
    """See the module."""
    import torch

    from recast_pl.assets.making import clip, denoiser, text, vae
    from recast_pl.assets.making.assemble import assemble

    target = torch.device(device)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = text.build_tokenizer()
    seconds: dict[str, float] = {}
    parts: dict[str, Any] = {}
    if {"vae", "assemble"} & set(stages):
        parts["vae"], seconds["vae"] = vae.train(work, steps=recipe.vae_steps, seed=recipe.seed, device=target)
    if {"denoiser", "assemble"} & set(stages):
        parts["denoiser"], parts["encoders"], seconds["denoiser"] = denoiser.train(
            work,
            tokenizer=tokenizer,
            steps=recipe.denoiser_steps,
            seed=recipe.seed,
            device=target,
            scenes=recipe.scenes,
            compiled=compiled,
        )
    for name, seed in (("clip", recipe.seed + 10), ("judge", recipe.seed + 20)):
        if {name, "assemble"} & set(stages):
            parts[name], seconds[name] = clip.train(
                work, name=name, tokenizer=tokenizer, steps=recipe.clip_steps, seed=seed, device=target
            )
    if "assemble" in stages:
        measured = assemble(
            parts, tokenizer=tokenizer, output=output, recipe=recipe, seconds=seconds, pictures=pictures
        )
        print(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
