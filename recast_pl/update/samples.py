"""What is known at a trained pair: a clean sample brought back to a step's level, or a step as it was taken.

Shape suffixes: B samples, K columns of W, N pairs.
"""

import torch
from torch import Tensor

from recast_pl.noise import Purpose, keyed_normal
from recast_pl.shapes import check_shapes
from recast_pl.types import NoisedSamples, Rollout, Transitions
from recast_pl.update.pairs import Pairs


def renoise(
    rollout: Rollout, advantages_BK: Tensor, pairs: Pairs, *, seed: int, shared_noise: bool = False
) -> NoisedSamples:
    """The pairs' clean samples, fresh keyed noise, levels and advantages.

    The noise is keyed by the iteration that trains, so that a stored sample is never noised alike twice. With
    `shared_noise`, the samples of one group at one step get the same noise.
    """
    check_shapes(x0_BZ=rollout.x0_BCHW, advantages_BK=advantages_BK)
    device, batch = rollout.x0_BCHW.device, rollout.batch
    group_N = batch.group_B[pairs.row_N]
    noise_NCHW = keyed_normal(
        rollout.x0_BCHW.shape[1:],
        seed=seed,
        iteration=pairs.iteration,
        samples=(group_N if shared_noise else batch.sample_B[pairs.row_N]).tolist(),
        steps=pairs.step_N.tolist(),
        purpose=Purpose.RENOISE,
        drawn=rollout.drawn_B[pairs.row_N].tolist(),
    )
    return NoisedSamples(
        x0_NCHW=rollout.x0_BCHW[pairs.row_N.to(device)],
        noise_NCHW=noise_NCHW.to(device),
        t_N=pairs.t_N.to(device, torch.float32),
        advantage_N=advantages_BK[pairs.row_N, pairs.column_N].to(device, torch.float32),
        group_N=group_N.to(device),
    )


def transitions(rollout: Rollout, advantages_BK: Tensor, pairs: Pairs) -> Transitions:
    """The pairs' stochastic steps as the rollout took them, with their advantages.

    Raises:
        ValueError: where the rollout has kept no trajectory.
    """
    check_shapes(x0_BZ=rollout.x0_BCHW, advantages_BK=advantages_BK)
    trajectory, device = rollout.trajectory, rollout.x0_BCHW.device
    if trajectory is None:
        raise ValueError("the objective trains on the rollout's own steps, and this rollout has kept none")
    place_N = pairs.step_N - trajectory.first_B[pairs.row_N]
    rows, place = pairs.row_N.to(device), place_N.to(device)
    return Transitions(
        before_NCHW=trajectory.latents_BTCHW[rows, place],
        x_next_NCHW=trajectory.latents_BTCHW[rows, place + 1],
        t_N=pairs.t_N.to(device, torch.float32),
        t_next_N=pairs.t_next_N.to(device, torch.float32),
        steps_N=trajectory.steps_BS[pairs.row_N, place_N],
        log_prob_old_N=trajectory.log_prob_BS[rows, place],
        advantage_N=advantages_BK[pairs.row_N, pairs.column_N].to(device, torch.float32),
    )
