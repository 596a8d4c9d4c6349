"""Geometries that an update cannot train with, refused in words."""

import torch
from torch import Tensor


def trainable_steps(levels: Tensor, *, min_noise_level: float) -> Tensor:
    """Which steps start at `min_noise_level` or above: bool, the shape of `levels` less its last place.

    Args:
        levels: […, K + 1] noise levels.
        min_noise_level: steps that start below are not trained.
    """
    return levels[..., :-1] >= min_noise_level


def check_whole_groups(*, num_groups: int, group_size: int, micro_batch_size: int, processes: int) -> None:
    """Refuses a geometry that an objective over whole groups cannot train with.

    Args:
        num_groups: of an iteration, over all processes.
        group_size: samples of each group.
        micro_batch_size: pairs in one backward pass.
        processes: that share an iteration.

    Raises:
        ValueError: where a micro-batch does not hold a group, or groups are split over processes.
    """
    if micro_batch_size < group_size:
        raise ValueError(
            f"model.micro_batch_size: {micro_batch_size} pairs do not hold a group of {group_size} samples "
            "(data.group_size), and model.objective compares whole groups; take a multiple of "
            f"{group_size}, or smaller groups"
        )
    if num_groups % processes:
        raise ValueError(
            f"data.num_groups: {num_groups} groups of {group_size} samples (data.group_size) split over "
            f"{processes} processes, and model.objective compares whole groups; take a multiple of {processes}"
        )


def noised_steps(levels: Tensor, *, min_noise_level: float, timesteps_per_sample: int | None) -> Tensor:
    """Which of a schedule's K steps an objective on re-noised samples may train: [K], bool.

    Raises:
        ValueError: where there are fewer than each sample is to be trained at; names the key.
    """
    trainable_K = trainable_steps(levels, min_noise_level=min_noise_level)
    if trainable_K.sum() < (timesteps_per_sample or 1):
        raise ValueError(
            f"model.timesteps_per_sample: {timesteps_per_sample or 1} steps are asked for, but only "
            f"{int(trainable_K.sum())} start at model.min_noise_level {min_noise_level} or above"
        )
    return trainable_K


def stochastic_steps(
    levels: Tensor, *, possible: range, count: int, min_noise_level: float, timesteps_per_sample: int | None
) -> Tensor:
    """Which of a schedule's K steps an objective on trajectories may train: [K], bool.

    Args:
        levels: K + 1 noise levels.
        possible: the steps that may be stochastic.
        count: how many of each sample's are.
        min_noise_level: no stochastic step may start below.
        timesteps_per_sample: how many are asked for; None: all.

    Raises:
        ValueError: where there are not as many, or stochastic steps cannot all be trained; names the key.
    """
    trainable = noised_steps(
        levels, min_noise_level=min_noise_level, timesteps_per_sample=timesteps_per_sample
    ).sum()
    if possible.stop > trainable:
        raise ValueError(
            f"model.min_noise_level: lets {trainable} steps be trained, but the rollout's stochastic steps "
            f"reach up to step {possible.stop - 1}; lower it, or end the stochastic steps earlier "
            "(model.rollout.init_args.window)"
        )
    if count < (timesteps_per_sample or 1):
        raise ValueError(
            f"model.timesteps_per_sample: {timesteps_per_sample} steps are asked for, but only {count} of each "
            "sample are stochastic (model.rollout.init_args.window); null takes them all"
        )
    step_K = torch.arange(len(levels) - 1)
    return (step_K >= possible.start) & (step_K < possible.stop)
