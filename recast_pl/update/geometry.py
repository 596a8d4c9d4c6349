"""Geometries that an update cannot train with, refused in words."""

from torch import Tensor

from recast_pl.update.pairs import trainable_steps


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


def trained_steps(
    levels: Tensor,
    *,
    min_noise_level: float,
    timesteps_per_sample: int | None,
    stochastic: tuple[range, int] | None = None,
) -> int:
    """How many steps of each sample an iteration trains.

    Args:
        levels: K + 1 noise levels.
        min_noise_level: steps that start below are not trained.
        timesteps_per_sample: how many are asked for; None: all that can be.
        stochastic: the steps that may be stochastic in a rollout and how many of each sample's are, where the
            objective trains on those.

    Raises:
        ValueError: where there are not as many, or stochastic steps cannot all be trained; names the key.
    """
    asked = timesteps_per_sample or 1
    trainable = len(trainable_steps(levels, min_noise_level=min_noise_level))
    if trainable < asked:
        raise ValueError(
            f"model.timesteps_per_sample: {timesteps_per_sample} steps are asked for, but only {trainable} "
            f"start at model.min_noise_level {min_noise_level} or above"
        )
    if stochastic is None:
        return timesteps_per_sample or trainable
    possible, count = stochastic
    if possible.stop > trainable:
        raise ValueError(
            f"model.min_noise_level: lets {trainable} steps be trained, but the rollout's stochastic steps "
            f"reach up to step {possible.stop - 1}; lower it, or end the stochastic steps earlier "
            "(model.rollout.init_args.window)"
        )
    if count < asked:
        raise ValueError(
            f"model.timesteps_per_sample: {timesteps_per_sample} steps are asked for, but only {count} of each "
            "sample are stochastic (model.rollout.init_args.window); null takes them all"
        )
    return timesteps_per_sample or count


def check_even_updates(*, pairs: int, updates: int, processes: int) -> None:
    """Refuses updates that some processes would have more pairs for than others, so that the others wait.

    Args:
        pairs: of one process in an iteration, blocks of a group counted once.
        updates: of one iteration.
        processes: that share an iteration.

    Raises:
        ValueError: naming the key.
    """
    if processes > 1 and pairs % updates:
        raise ValueError(
            f"model.updates_per_iteration: {updates} updates cannot share the {pairs} (sample, step) pairs of "
            f"each of {processes} processes evenly; take a divisor of {pairs}"
        )
