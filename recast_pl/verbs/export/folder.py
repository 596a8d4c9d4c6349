"""The verb `export`: a checkpoint becomes a folder that is complete or not there."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import yaml  # type: ignore[import-untyped]
from lightning.pytorch.utilities import rank_zero_info

from recast_pl.callbacks.checkpoints import AtomicCheckpointIO
from recast_pl.credit import weights_figure
from recast_pl.credit.weights_record import weights_from_record
from recast_pl.module import ReCASTModule
from recast_pl.policy import Role, SD3Policy
from recast_pl.policy.full_parameters import FullWeights
from recast_pl.types import Weights
from recast_pl.verbs.export.card import Facts, model_card
from recast_pl.verbs.export.hub import check_destination, push
from recast_pl.verbs.export.scores import held_out_scores
from recast_pl.verbs.export.weights import save_lora, save_merged

SHOWN = ("seed_everything", "model", "rewards", "data", "credit")  # blocks of the configuration in the card


def export(
    module: ReCASTModule,
    *,
    ckpt_path: Path,
    role: Role,
    merged: bool,
    folder: Path | None,
    push_to: str | None,
    settings: Mapping[str, Any],
) -> Path:
    """See `recast_pl.cli.trainer.Trainer.export`.

    Raises:
        ValueError: for a target that is not empty, a file that is no checkpoint of this configuration, a role
            without weights of its own, a LoRA of full fine-tuning, or a repository that cannot be pushed to.
    """
    place = (folder or ckpt_path.with_name(f"{ckpt_path.name.removesuffix('.ckpt')}-export")).absolute()
    policy = module.policy
    if not isinstance(policy, SD3Policy):
        raise ValueError(f"model.policy: `export` writes SD3Policy, got {type(policy).__name__}")
    if role not in get_args(Role) or role == "reference":
        roles = ", ".join(name for name in get_args(Role) if name != "reference")
        raise ValueError(f"role: expected one of {roles}, got {role!r} (the reference is the base model)")
    if push_to is not None:
        check_destination(push_to)
    with fresh_folder(place) as writing:
        checkpoint = restored(module, ckpt_path)
        (save_merged if merged else save_lora)(policy, role, writing)
        weights = weights_of(checkpoint)
        if weights is not None:
            weights_figure(weights).savefig(writing / "W.png", dpi=150)
        shown = without_secrets({block: settings[block] for block in SHOWN if block in settings})
        facts = Facts(
            module=module,
            policy=policy,
            role=role,
            merged=merged,
            full=isinstance(policy.adapters, FullWeights),
            iteration=int(checkpoint["iteration"]),
            weights=weights,
            scores=held_out_scores(module.evaluations, module.rewards.names),
            settings=yaml.safe_dump(shown, sort_keys=False, allow_unicode=True),
            name=push_to or place.name,
        )
        (writing / "README.md").write_text(model_card(facts), encoding="utf-8")
    rank_zero_info(f"Written: {place}")
    if push_to is not None:
        rank_zero_info(f"Pushed: {push(place, push_to)}")
    return place


def restored(module: ReCASTModule, ckpt_path: Path) -> Mapping[str, Any]:
    """Loads the policy and puts the checkpoint's weights into it; returns the checkpoint.

    Raises:
        ValueError: for what is no checkpoint, or one of another policy.
    """
    try:
        checkpoint = AtomicCheckpointIO().load_checkpoint(ckpt_path)
    except FileNotFoundError as error:
        raise ValueError(f"--ckpt_path: there is no file {ckpt_path}") from error
    module.policy.load(seed=module.seed)
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"])
    return checkpoint


def weights_of(checkpoint: Mapping[str, Any]) -> Weights | None:
    """The W that the run had come to, where it had one."""
    saved = checkpoint.get("credit")
    if saved is None:
        return None
    return weights_from_record(saved)


def without_secrets(settings: Any) -> Any:
    """Settings as a card may show them: what goes into requests' headers may be a key, so only names are left.

    >>> without_secrets({"served": {"url": "http://here", "headers": {"X-Api-Key": "s3cret"}}})
    {'served': {'url': 'http://here', 'headers': {'X-Api-Key': '…'}}}
    """
    if isinstance(settings, list):
        return [without_secrets(entry) for entry in settings]
    if not isinstance(settings, Mapping):
        return settings
    return {
        key: dict.fromkeys(value, "…") if key == "headers" and value else without_secrets(value)
        for key, value in settings.items()
    }


@contextmanager
def fresh_folder(place: Path) -> Iterator[Path]:
    """A folder beside `place`, which takes its name when the context ends well and vanishes otherwise.

    Raises:
        ValueError: where there is something at `place` already.
    """
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"folder: {place} exists and is not empty; name another (--folder)")
    place.parent.mkdir(parents=True, exist_ok=True)
    writing = place.with_name(f".{place.name}.{os.getpid()}")
    writing.mkdir()
    try:
        yield writing
        if place.exists():
            place.rmdir()
        writing.rename(place)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
