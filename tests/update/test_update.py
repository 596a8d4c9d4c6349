"""Which pairs an iteration trains on, in which order, and with which noise."""

import pytest
import torch

from recast_pl.types import Prompt, PromptBatch, Rollout, TextEmbeddings
from recast_pl.update import check_even_updates, check_whole_groups, renoise, training_pairs

STEPS, SIZE = 6, 3


def rollout_of(group_B, *, sample_B=None, iteration=2):
    group_B = torch.as_tensor(group_B)
    size = len(group_B)
    sample_B = torch.arange(size) if sample_B is None else torch.as_tensor(sample_B)
    prompts = tuple(Prompt(text="", metadata={}) for _ in range(size))
    return Rollout(
        batch=PromptBatch(iteration=iteration, prompts=prompts, group_B=group_B, sample_B=sample_B),
        text=TextEmbeddings(sequence_BLD=torch.zeros(size, 1, 1), pooled_BD=torch.zeros(size, 1)),
        x0_BCHW=torch.arange(size).float().view(-1, 1, 1, 1),
        images_B3HW=torch.zeros(size, 3, 1, 1),
        levels=torch.linspace(1, 0, STEPS + 1, dtype=torch.float64),
    )


INTERLEAVED = [40, 41, 42, 42, 41, 40, 40, 41, 42]


def pairs_of(rollout, *, steps=4, whole=True):
    return training_pairs(rollout, timesteps_per_sample=steps, min_noise_level=0.1, seed=5, whole_groups=whole)


def sets(pairs, rollout):
    """The (group, step) of each pair."""
    return list(zip(rollout.batch.group_B[pairs.row_N].tolist(), pairs.step_N.tolist(), strict=True))


@pytest.mark.parametrize("size", [3, 4, 5, 7, 64])
@pytest.mark.parametrize("updates", [1, 2, 5])
def test_no_split_cuts_a_group_at_one_step(size, updates):
    rollout = rollout_of(INTERLEAVED)
    pairs, seen, shares = pairs_of(rollout), [], 0
    for share in pairs.shares(updates):
        shares += 1
        for part in share.split(size):
            assert len(part) <= size
            counts = {key: sets(part, rollout).count(key) for key in sets(part, rollout)}
            assert set(counts.values()) == {SIZE}
            seen += list(zip(part.row_N.tolist(), part.step_N.tolist(), strict=True))
    assert shares <= updates
    assert len(seen) == len(set(seen)) == len(pairs) == len(INTERLEAVED) * 4


def test_whole_groups_are_trained_at_the_same_steps_and_groups_at_their_own():
    rollout = rollout_of(INTERLEAVED)
    pairs = pairs_of(rollout)
    steps_of = {row: sorted(pairs.step_N[pairs.row_N == row].tolist()) for row in range(len(INTERLEAVED))}
    by_group = {
        group: {tuple(steps_of[row]) for row in range(len(INTERLEAVED)) if INTERLEAVED[row] == group}
        for group in (40, 41, 42)
    }
    assert all(len(chosen) == 1 for chosen in by_group.values())
    assert len(set.union(*by_group.values())) > 1
    assert all(len(set(steps)) == 4 for steps in steps_of.values())


def test_a_group_s_steps_and_shared_noise_do_not_depend_on_who_else_is_there():
    """A process that holds one of the groups draws for it what a process with all of them draws."""
    rollout = rollout_of([40, 40, 40, 41, 41, 41])
    alone = rollout_of([41, 41, 41], sample_B=[3, 4, 5])
    pairs, own = pairs_of(rollout), pairs_of(alone)
    rows = pairs.row_N >= 3
    assert torch.equal(pairs.step_N[rows], own.step_N)
    advantages = torch.zeros(6, STEPS)
    all_noise = renoise(rollout, advantages, pairs, seed=5, shared_noise=True).noise_NCHW
    assert torch.equal(
        all_noise[rows], renoise(alone, advantages[:3], own, seed=5, shared_noise=True).noise_NCHW
    )


def test_shared_noise_is_one_for_a_group_at_one_step_and_another_for_all_others():
    rollout = rollout_of(INTERLEAVED)
    pairs = pairs_of(rollout)
    advantages = torch.arange(len(INTERLEAVED) * STEPS).view(-1, STEPS)
    shared = renoise(rollout, advantages, pairs, seed=5, shared_noise=True)
    values = dict.fromkeys(sets(pairs, rollout))
    assert len(shared.noise_NCHW.unique()) == len(values) == 3 * 4
    for key in values:
        rows = [index for index, each in enumerate(sets(pairs, rollout)) if each == key]
        assert len(shared.noise_NCHW[rows].unique()) == 1
    own = renoise(rollout, advantages, pairs, seed=5)
    assert len(own.noise_NCHW.unique()) == len(pairs)
    assert torch.equal(own.x0_NCHW.flatten().long(), pairs.row_N)
    assert torch.equal(own.advantage_N.long(), pairs.row_N * STEPS + pairs.step_N)
    assert torch.equal(own.group_N, rollout.batch.group_B[pairs.row_N])


def test_without_whole_groups_every_sample_draws_its_own_steps():
    rollout = rollout_of(INTERLEAVED)
    pairs = pairs_of(rollout, whole=False)
    assert torch.equal(pairs.row_N, torch.arange(len(INTERLEAVED)).repeat_interleave(4))
    assert [len(share) for share in pairs.shares(2)] == [18, 18]
    chosen = {tuple(steps.tolist()) for steps in pairs.step_N.view(-1, 4)}
    assert len(chosen) > 3


def test_a_micro_batch_that_does_not_hold_a_group_is_refused():
    pairs = pairs_of(rollout_of(INTERLEAVED))
    with pytest.raises(ValueError, match=r"model\.micro_batch_size: 2 .*group of 3.*data\.group_size"):
        list(pairs.split(2))
    with pytest.raises(ValueError, match=r"model\.micro_batch_size: 7 .*group of 8.*data\.group_size"):
        check_whole_groups(num_groups=4, group_size=8, micro_batch_size=7, processes=1)
    check_whole_groups(num_groups=4, group_size=8, micro_batch_size=9, processes=2)


def test_groups_that_are_split_over_processes_are_refused():
    with pytest.raises(ValueError, match=r"data\.num_groups: 3 .*data\.group_size.*multiple of 2"):
        check_whole_groups(num_groups=3, group_size=8, micro_batch_size=64, processes=2)
    with pytest.raises(ValueError, match=r"groups of \[3, 1\] samples"):
        pairs_of(rollout_of([1, 1, 1, 2]))


def test_pairs_split_into_consecutive_parts():
    pairs = pairs_of(rollout_of(range(5)), steps=2, whole=False)
    parts = list(pairs.split(4))
    assert [len(part) for part in parts] == [4, 4, 2]
    assert torch.equal(torch.cat([part.row_N for part in parts]), pairs.row_N)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("steps", "updates"), [(4, 2), (4, 4), (3, 2), (1, 2), (2, 3)])
def test_an_update_has_the_same_pairs_however_samples_are_spread_over_processes(whole, steps, updates):
    groups = [40, 40, 40, 41, 41, 41, 42, 42, 42, 43, 43, 43]
    together = pairs_of(rollout_of(groups), steps=steps, whole=whole)
    halves = [
        pairs_of(
            rollout_of(groups[first : first + 6], sample_B=range(first, first + 6)), steps=steps, whole=whole
        )
        for first in (0, 6)
    ]
    for update in range(updates):
        everyone = {(int(r), int(s)) for r, s in members(together, updates, update)}
        apart = [{(int(r) + 6 * half, int(s)) for r, s in members(pairs, updates, update)}
                 for half, pairs in enumerate(halves)]  # fmt: skip
        assert apart[0] | apart[1] == everyone
        if (len(halves[0]) // halves[0].block) % updates == 0:
            assert len(apart[0]) == len(apart[1]) > 0


def members(pairs, updates, update):
    share = list(pairs.shares(updates))[update]
    return zip(share.row_N, share.step_N, strict=True)


def test_where_steps_divide_evenly_every_update_sees_every_sample():
    pairs = pairs_of(rollout_of(range(5)), steps=4, whole=False)
    for share in pairs.shares(2):
        assert share.row_N.bincount().tolist() == [2] * 5
    first = [share.place_N[share.row_N == 0].tolist() for share in pairs.shares(2)]
    second = [share.place_N[share.row_N == 1].tolist() for share in pairs.shares(2)]
    assert first == second[::-1] == [[0, 2], [1, 3]]  # and no update has the noisier steps of all


def test_updates_that_processes_cannot_share_evenly_are_refused():
    with pytest.raises(ValueError, match=r"model\.updates_per_iteration: 5 updates.*the 24 .*divisor of 24"):
        check_even_updates(pairs=24, updates=5, processes=2)
    check_even_updates(pairs=24, updates=5, processes=1)
    check_even_updates(pairs=24, updates=6, processes=2)
