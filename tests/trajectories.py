"""Runs of the real loop on the policy of one parameter, by objectives that train on trajectories."""

import lightning.pytorch as pl
import torch

from recast_pl.advantages import PerReward
from recast_pl.credit import CreditAssigner
from recast_pl.module import ReCASTModule
from recast_pl.policy.old_policy import OldPolicyRamp
from recast_pl.prompts import PromptData, SceneGrammar
from recast_pl.rewards import RewardSuite
from recast_pl.rollout import SDERollout
from recast_pl.testing import OnePixel


def learn(
    rewards, *, objective, rollout=None, budgets=None, advantages=None, epochs=6, updates=1, credit=None,
    timesteps=None, lr=0.03, min_noise_level=0.01, policy=None,
):  # fmt: skip
    """Trains θ from 0 and returns the module."""
    module = ReCASTModule(
        policy=policy or OnePixel(),
        rewards=RewardSuite(rewards=rewards, budgets=budgets),
        rollout=rollout or SDERollout(num_steps=8, micro_batch_size=10, progress_bar=False),
        advantages=advantages or PerReward(),
        objective=objective,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=lr),
        old_policy=OldPolicyRamp(slope=0.0, maximum=0.0),
        timesteps_per_sample=timesteps,
        min_noise_level=min_noise_level,
        micro_batch_size=37,  # does not divide the number of pairs
        updates_per_iteration=updates,
        seed=3,
    )
    data = PromptData(
        train=SceneGrammar(count=8),
        evaluation=SceneGrammar(count=4),
        num_groups=4,
        group_size=8,
        iterations_per_epoch=5,
    )
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        inference_mode=False,
        num_sanity_val_steps=0,
        callbacks=[credit or CreditAssigner()],
    )
    trainer.fit(module, data)
    return module
