"""A policy of one parameter whose optimum is known, and a run of the real loop on it."""

from contextlib import contextmanager

import lightning.pytorch as pl
import torch
from torch import nn

from recast_pl.advantages import PerReward
from recast_pl.credit import CreditAssigner
from recast_pl.module import ReCASTModule
from recast_pl.objectives import DiffusionNFT
from recast_pl.policy import Policy
from recast_pl.policy.old_policy import OldPolicyRamp
from recast_pl.prompts import PromptData, SceneGrammar
from recast_pl.rewards import Reward, RewardSuite
from recast_pl.rollout import ODERollout
from recast_pl.types import TextEmbeddings

GROUP_SIZE = 8


class OnePixel(Policy):
    """Samples x0 ~ N(θ, 0.2²): the exact velocity field of that Gaussian, shifted by the one parameter θ."""

    spread = 0.2

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterDict()
        self.role = "default"

    def load(self, *, seed):
        if not self.weights:
            for role in ("default", "old", "reference", *["averaged"] * self.averaged):
                self.weights[role] = nn.Parameter(torch.zeros(()), requires_grad=role == "default")

    latent_shape = (1, 1, 1)

    def levels(self, num_steps):
        return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)

    def text(self, texts):
        return TextEmbeddings(sequence_BLD=torch.zeros(len(texts), 1, 1), pooled_BD=torch.zeros(len(texts), 1))

    def velocity(self, x_NCHW, t_N, text):
        t = t_N[:, None, None, None]
        mean, variance = self.weights[self.role], self.spread**2
        total = (1 - t) ** 2 * variance + t**2
        centred = x_NCHW - (1 - t) * mean
        return t / total * centred - (mean + (1 - t) * variance / total * centred)

    def decode(self, x0_BCHW):
        return x0_BCHW.expand(-1, 3, 2, 2)

    @contextmanager
    def using(self, role):
        self.role = role
        try:
            yield
        finally:
            self.role = "default"

    def trainable_parameters(self):
        return [self.weights["default"]]

    def update_old(self, decay):
        self.weights["old"].data.lerp_(self.weights["default"].data, 1 - decay)

    def update_average(self, decay):
        self.weights["averaged"].data.lerp_(self.weights["default"].data, 1 - decay)

    def distance_to_old(self):
        return (self.weights["default"] - self.weights["old"]).detach().abs()

    def saved_state(self):
        return {role: value.detach().clone() for role, value in self.weights.items()}

    def load_saved_state(self, state):
        for role, value in state.items():
            self.weights[role].data.copy_(value)


class TwoModes(OnePixel):
    """Samples x0 ~ p N(1, 0.2²) + (1 − p) N(−1, 0.2²), p = σ(θ): the exact velocity field of that mixture."""

    def velocity(self, x_NCHW, t_N, text):
        t = t_N[:, None, None, None]
        total = (1 - t) ** 2 * self.spread**2 + t**2
        gain = (1 - t) * self.spread**2 / total
        # each mode's responsibility, from its prior odds and the densities of x_t
        odds = self.weights[self.role] + 2 * (1 - t) * x_NCHW / total
        right = torch.sigmoid(odds)
        clean = sum(
            share * (mode + gain * (x_NCHW - (1 - t) * mode)) for share, mode in ((right, 1), (1 - right, -1))
        )
        return (x_NCHW - clean) / t


class Near(Reward):
    """−|x − target|, scaled."""

    def __init__(self, target, scale=1.0):
        self.target, self.scale = target, scale

    def score(self, images_B3HW, prompts):
        return -self.scale * (images_B3HW.mean(dim=(1, 2, 3)) - self.target).abs()


def train(
    rewards, *, epochs=8, budgets=None, advantages=None, updates=1, folder=None, resume=None, callbacks=(),
    credit=None, steps=8, precision="32-true", options=None, policy=None, objective=None, lr=0.03,
    old_policy=None, timesteps=4, min_noise_level=0.01, groups=4, micro_batch=37, settings=None, **rest,
):  # fmt: skip
    module = ReCASTModule(
        policy=policy or OnePixel(),
        rewards=RewardSuite(rewards=rewards, budgets=budgets, options=options),
        rollout=ODERollout(num_steps=steps, micro_batch_size=10, progress_bar=False),
        advantages=advantages or PerReward(),
        objective=objective or DiffusionNFT(beta=1.0, reference_coefficient=0.0),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=lr),
        old_policy=old_policy or OldPolicyRamp(slope=0.01, maximum=0.5),
        timesteps_per_sample=timesteps,
        min_noise_level=min_noise_level,
        micro_batch_size=micro_batch,  # 37 does not divide the number of pairs
        updates_per_iteration=updates,
        seed=3,
        **rest,
    )
    data = PromptData(
        train=SceneGrammar(count=8),
        evaluation=SceneGrammar(count=4),
        num_groups=groups,
        group_size=GROUP_SIZE,
        iterations_per_epoch=5,
    )
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        precision=precision,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=folder is not None,
        default_root_dir=folder,
        inference_mode=False,
        num_sanity_val_steps=0,
        callbacks=[credit or CreditAssigner(), *callbacks],
        **(settings or {}),  # further ones of the trainer
    )
    trainer.fit(module, data, ckpt_path=resume)
    return module, trainer


def theta(module):
    return module.policy.weights["default"].item()
