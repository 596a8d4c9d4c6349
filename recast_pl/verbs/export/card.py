"""The model card: what the weights are, what they were trained for, and how to load them."""

from dataclasses import dataclass
from pathlib import Path

from recast_pl.assets import EMBEDDED, SCHEME
from recast_pl.module import ReCASTModule
from recast_pl.policy import Role, SD3Policy
from recast_pl.types import Weights
from recast_pl.verbs.export.scores import Score

PROMPT = "a red circle on a white background"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a card says."""

    module: ReCASTModule
    policy: SD3Policy
    role: Role
    merged: bool  # a whole pipeline, not a LoRA
    full: bool  # all weights trained
    iteration: int
    weights: Weights | None
    scores: list[Score]
    settings: str  # YAML
    name: str  # of the repository or folder


def model_card(facts: Facts) -> str:
    """A README.md for the Hub: YAML front matter and sections; the licence is left to the user."""
    sections = [
        _front_matter(facts),
        f"# {facts.name.rsplit('/', 1)[-1]}",
        _what(facts),
        f"## Use\n\n```python\n{usage(facts)}\n```",
        f"## Rewards\n\n{_rewards(facts)}",
        *([f"## Held-out scores\n\n{_scores(facts)}"] if facts.scores else []),
        *([f"## When each reward counted\n\n{_credit()}"] if facts.weights is not None else []),
        f"## Settings\n\n```yaml\n{facts.settings.rstrip()}\n```",
    ]
    return "\n\n".join(sections) + "\n"


def base_of(policy: SD3Policy) -> tuple[str, bool]:
    """The base model as a reader may know it, and whether that is a name on the Hub."""
    for name, folder in EMBEDDED.items():
        if policy.source == str(folder):
            return SCHEME + name, False
    local = Path(policy.source).is_dir()
    return (Path(policy.source).resolve().name if local else policy.source), not local


def usage(facts: Facts) -> str:
    """How to load the weights and draw a picture as in training."""
    policy, rollout = facts.policy, facts.module.rollout
    base, _ = base_of(policy)
    source = f'"{facts.name}"' if facts.merged else f'"{base}"'
    lines = ["import torch", "from diffusers import StableDiffusion3Pipeline", ""]
    if not facts.merged and base.startswith(SCHEME):
        lines.insert(2, "from recast_pl.assets import EMBEDDED")
        source = f'EMBEDDED["{base.removeprefix(SCHEME)}"]'
    how = f"dtype={policy.weights_dtype}"
    if not policy.third_text_encoder:
        how += ", text_encoder_3=None, tokenizer_3=None"
    lines.append(f"pipeline = StableDiffusion3Pipeline.from_pretrained({source}, {how})")
    if not facts.merged:
        lines.append(f'pipeline.load_lora_weights("{facts.name}")')
    options = {
        "num_inference_steps": rollout.num_steps,
        "guidance_scale": rollout.guidance_scale,
        "max_sequence_length": policy.max_sequence_length,
        **({} if policy.resolution is None else {"height": policy.resolution, "width": policy.resolution}),
    }
    arguments = ", ".join(f"{key}={value}" for key, value in options.items())
    lines.append(f'image = pipeline("{PROMPT}", {arguments}).images[0]')
    lines.append('image.save("picture.png")')
    return "\n".join(lines)


def _front_matter(facts: Facts) -> str:
    base, on_hub = base_of(facts.policy)
    lines = ["---"]
    if on_hub:  # the Hub refuses anything else
        lines += [f"base_model: {base}", f"base_model_relation: {'finetune' if facts.merged else 'adapter'}"]
    tags = ["text-to-image", "reinforcement-learning", "recast_pl", *([] if facts.merged else ["lora"])]
    lines += ["library_name: diffusers", "pipeline_tag: text-to-image", "tags:", *(f"- {tag}" for tag in tags)]
    return "\n".join([*lines, "# license: yours to name; the base model's binds what is made from it", "---"])


def _what(facts: Facts) -> str:
    policy, module = facts.policy, facts.module
    base, on_hub = base_of(policy)
    shown = f"[{base}](https://huggingface.co/{base})" if on_hub else f"`{base}`"
    adapter = f"LoRA of rank {policy.lora_rank} and alpha {policy.lora_alpha:g}"
    kind = f"a {adapter} for {shown}"
    if facts.merged:
        how = "its weights fine-tuned" if facts.full else f"a {adapter} merged into it"
        kind = f"{shown} with {how} (denoiser in float32)"
    whose = {"default": "trained", "old": "old (rollout)"}.get(facts.role, facts.role)
    return (
        f"This is {kind}: the {whose} weights after {facts.iteration} iterations of online reinforcement "
        f"fine-tuning with {len(module.rewards.names)} rewards by recast_pl, with the objective "
        f"{type(module.objective).__name__}."
    )


def _rewards(facts: Facts) -> str:
    suite = facts.module.rewards
    total = sum(suite.budgets.values())
    rows = [
        f"| {name} | `{type(reward).__name__}` | {suite.budgets[name]:g} | {suite.budgets[name] / total:.1%} |"
        for name, reward in suite.rewards.items()
    ]
    return "\n".join(["| reward | class | budget | share |", "|---|---|---|---|", *rows])


def _scores(facts: Facts) -> str:
    first, last = facts.scores[0].first, facts.scores[0].last
    rows = []
    for score in facts.scores:
        change = (score.after - score.before) / score.spread if score.spread > 0 else float("nan")
        rows.append(
            f"| {score.name} | {score.before:.4f} | {score.after:.4f} | {score.spread:.4f} | {change:+.2f} |"
        )
    return "\n".join(
        [
            f"Means over held-out prompts with the same noises at iterations {first} and {last} "
            f"(weights: `{facts.module.evaluated_policy}`).",
            "",
            "| reward | before | after | spread before | change / spread |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )


def _credit() -> str:
    return (
        "W at the end: rewards by denoising steps, from noise to clean. Row sums are the budgets, and the "
        "numbers are W times the number of steps.\n\n![W](W.png)"
    )
