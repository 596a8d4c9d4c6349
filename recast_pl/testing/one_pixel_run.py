"""A run of the real loop on a policy of one parameter: a second or two, and the optimum is known."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from recast_pl.callbacks.credit_assigner import CreditAssigner
from recast_pl.module import ReCASTModule
from recast_pl.objectives import DiffusionNFT
from recast_pl.policy.old_policy import OldPolicyRamp
from recast_pl.prompts import PromptData, SceneGrammar
from recast_pl.rewards import Reward, RewardSuite
from recast_pl.rollout import ODERollout
from recast_pl.testing.one_pixel import OnePixel

GROUP_SIZE = 8
MODULE: Mapping[str, Any] = {
    "objective": DiffusionNFT(beta=1.0, reference_coefficient=0.0),
    "old_policy": OldPolicyRamp(slope=0.01, maximum=0.5),
    "timesteps_per_sample": 4,
    "micro_batch_size": 37,  # does not divide the number of pairs
    "seed": 3,
}
QUIET: Mapping[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "inference_mode": False,
    "num_sanity_val_steps": 0,
}


def train(
    rewards: dict[str, Reward], *, epochs: int = 8, groups: int = 4, steps: int = 8, lr: float = 0.03,
    budgets: dict[str, float] | None = None, options: Any = None, credit: CreditAssigner | None = None,
    folder: Path | None = None, resume: Path | None = None, callbacks: Sequence[pl.Callback] = (),
    settings: Mapping[str, Any] | None = None, **parts: Any,
) -> tuple[ReCASTModule, pl.Trainer]:  # fmt: skip
    """Trains `OnePixel`, or another policy, from its start.

    Args:
        rewards: by name, such as {"near": Near(0.5)}.
        epochs: of 5 iterations.
        groups: of 8 samples, in each iteration.
        steps: denoising steps.
        lr: of Adam.
        budgets: the rewards'; None: equal.
        options: the rewards', as in `RewardSuite`.
        credit: with the strategy; None: uniform.
        folder: where checkpoints go; None: there are none.
        resume: a checkpoint to go on from.
        callbacks: further ones.
        settings: further ones of the trainer.
        parts: arguments of the module in the place of `MODULE`'s and those below.

    Returns:
        The module and its trainer.
    """
    defaults: dict[str, Any] = {
        "policy": OnePixel(),
        "rollout": ODERollout(num_steps=steps, micro_batch_size=10, progress_bar=False),
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=lr),
    }
    suite = RewardSuite(rewards=rewards, budgets=budgets, options=options)
    module = ReCASTModule(rewards=suite, **(dict(MODULE) | defaults | parts))
    data = PromptData(
        train=SceneGrammar(count=8),
        evaluation=SceneGrammar(count=4),
        num_groups=groups,
        group_size=GROUP_SIZE,
        iterations_per_epoch=5,
    )
    trainer = pl.Trainer(
        max_epochs=epochs,
        enable_checkpointing=folder is not None,
        default_root_dir=folder,
        callbacks=[credit or CreditAssigner(), *callbacks],
        **(dict(QUIET) | dict(settings or {})),
    )
    trainer.fit(module, data, ckpt_path=resume)
    return module, trainer


def theta(module: ReCASTModule) -> float:
    """The trained parameter."""
    return module.policy.trainable_parameters()[0].item()
