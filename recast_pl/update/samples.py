"""What is known at a trained pair: a clean sample brought back to a step's level, or a step as it was taken.

Shape suffixes: B samples, K denoising steps, N pairs.
"""

import torch
from torch import Tensor

from recast_pl.noise import Purpose, keyed_normal
from recast_pl.types import NoisedSamples, Rollout, Transitions
from recast_pl.update.pairs import Pairs


def training_samples(
    rollout: Rollout, advantages_BK: Tensor, pairs: Pairs, *, seed: int, shared_noise: bool = False
) -> NoisedSamples | Transitions:
    """The steps that the rollout has recorded, or clean samples noised anew where it has recorded none."""
    if rollout.trajectory is None:
        return renoise(rollout, advantages_BK, pairs, seed=seed, shared_noise=shared_noise)
    return transitions(rollout, advantages_BK, pairs)


def renoise(
    rollout: Rollout, advantages_BK: Tensor, pairs: Pairs, *, seed: int, shared_noise: bool = False
) -> NoisedSamples:
    """The pairs' clean samples, fresh keyed noise, levels and advantages.

    With `shared_noise`, the samples of one group at one step get the same noise.
    """
    device, batch = rollout.x0_BCHW.device, rollout.batch
    group_N = batch.group_B[pairs.row_N]
    noise_NCHW = keyed_normal(
        rollout.x0_BCHW.shape[1:],
        seed=seed,
        iteration=batch.iteration,
        samples=(group_N if shared_noise else batch.sample_B[pairs.row_N]).tolist(),
        steps=pairs.step_N.tolist(),
        purpose=Purpose.RENOISE,
    )
    return NoisedSamples(
        x0_NCHW=rollout.x0_BCHW[pairs.row_N.to(device)],
        noise_NCHW=noise_NCHW.to(device),
        t_N=rollout.levels[pairs.step_N].to(device, torch.float32),
        advantage_N=advantages_BK[pairs.row_N, pairs.step_N].to(device, torch.float32),
        group_N=group_N.to(device),
    )


def transitions(rollout: Rollout, advantages_BK: Tensor, pairs: Pairs) -> Transitions:
    """The pairs' stochastic steps as the rollout took them, with their advantages."""
    trajectory, device = rollout.trajectory, rollout.x0_BCHW.device
    assert trajectory is not None
    rows, place = pairs.row_N.to(device), (pairs.step_N - trajectory.first_B[pairs.row_N]).to(device)
    return Transitions(
        x_t_NCHW=trajectory.latents_BTCHW[rows, place],
        x_next_NCHW=trajectory.latents_BTCHW[rows, place + 1],
        t_N=rollout.levels[pairs.step_N].to(device, torch.float32),
        t_next_N=rollout.levels[pairs.step_N + 1].to(device, torch.float32),
        steps_N=trajectory.steps_K[pairs.step_N],
        log_prob_old_N=trajectory.log_prob_BS[rows, place],
        advantage_N=advantages_BK[pairs.row_N, pairs.step_N].to(device, torch.float32),
    )
