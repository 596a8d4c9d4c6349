"""Which pairs an iteration trains on, in which order, and with which noise."""

from dataclasses import replace

import pytest
import torch

from recast_pl.objectives import DiffusionNFT
from recast_pl.schedule import padded_schedules
from recast_pl.types import Prompt, PromptBatch, Rollout, TextEmbeddings
from recast_pl.update import (
    check_whole_groups,
    planned_passes,
    renoise,
    spare_pairs,
    trainable_steps,
    training_pairs,
)

STEPS, SIZE = 6, 3
LEVELS = torch.linspace(1, 0, STEPS + 1, dtype=torch.float64)


def rollout_of(group_B, *, sample_B=None, iteration=2):
    group_B = torch.as_tensor(group_B)
    size = len(group_B)
    sample_B = torch.arange(size) if sample_B is None else torch.as_tensor(sample_B)
    prompts = tuple(Prompt(text="", metadata={}) for _ in range(size))
    return Rollout.on_schedule(
        LEVELS,
        batch=PromptBatch(iteration=iteration, prompts=prompts, group_B=group_B, sample_B=sample_B),
        text=TextEmbeddings(sequence_BLD=torch.zeros(size, 1, 1), pooled_BD=torch.zeros(size, 1)),
        x0_BCHW=torch.arange(size).float().view(-1, 1, 1, 1),
        images_B3HW=torch.zeros(size, 3, 1, 1),
    )


INTERLEAVED = [40, 41, 42, 42, 41, 40, 40, 41, 42]


def pairs_of(rollout, *, steps=4, whole=True, iteration=2):
    return training_pairs(
        rollout,
        iteration=iteration,
        trainable_BK=trainable_steps(rollout.levels_BT, min_noise_level=0.1),
        levels=LEVELS,
        timesteps_per_sample=steps,
        seed=5,
        whole_groups=whole,
    )


def sets(pairs, rollout):
    """The (group, step) of each pair."""
    return list(zip(rollout.batch.group_B[pairs.row_N].tolist(), pairs.step_N.tolist(), strict=True))


@pytest.mark.parametrize("size", [3, 4, 5, 7, 64])
@pytest.mark.parametrize("updates", [1, 2, 5])
def test_no_split_cuts_a_group_at_one_step(size, updates):
    rollout = rollout_of(INTERLEAVED)
    pairs, seen, shares = pairs_of(rollout), [], 0
    for share in pairs.shares(updates):
        shares += len(share) > 0
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


def test_a_stored_rollout_gets_other_steps_and_other_noise_in_another_iteration():
    rollout = rollout_of(range(40), iteration=2)
    advantages = torch.zeros(40, STEPS)
    now, later, again = (pairs_of(rollout, whole=False, iteration=i) for i in (2, 7, 7))
    assert not torch.equal(now.step_N, later.step_N)
    assert torch.equal(later.step_N, again.step_N)
    noise = [renoise(rollout, advantages, pairs, seed=5).noise_NCHW.flatten() for pairs in (now, later, again)]
    assert not torch.isin(noise[1], noise[0]).any()
    assert torch.equal(noise[1], noise[2])


def test_samples_of_one_index_that_two_iterations_drew_share_nothing():
    """Sample 3 of iteration 2 and sample 3 of iteration 4, trained together in iteration 7."""
    one, two = (rollout_of(range(40), iteration=i) for i in (2, 4))
    advantages = torch.zeros(40, STEPS)
    pairs = [pairs_of(rollout, whole=False, iteration=7) for rollout in (one, two)]
    assert not torch.equal(pairs[0].step_N, pairs[1].step_N)
    noise = [renoise(r, advantages, p, seed=5).noise_NCHW for r, p in zip((one, two), pairs, strict=True)]
    assert not torch.isin(noise[0], noise[1]).any()


def ragged():
    """Two samples, of 3 and 6 steps; the levels of the shorter lie between those of W's columns."""
    whole = rollout_of([0, 1])
    levels_BT, steps_B = padded_schedules([torch.tensor([1.0, 0.6, 0.45, 0.0], dtype=torch.float64), LEVELS])
    return replace(whole, levels_BT=levels_BT, steps_B=steps_B)


def test_samples_of_schedules_of_different_length_have_their_own_steps_levels_and_columns():
    rollout = ragged()
    advantages_BK = torch.arange(12.0).view(2, STEPS)  # W's columns leave 1, 5/6, 2/3, 1/2, 1/3, 1/6
    objective = DiffusionNFT()
    pairs = training_pairs(
        rollout,
        iteration=2,
        trainable_BK=objective.trainable(rollout, min_noise_level=0.2),
        levels=LEVELS,
        timesteps_per_sample=None,
        seed=5,
    )
    assert pairs.row_N.tolist() == [0] * 3 + [1] * 5
    assert pairs.step_N.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert pairs.t_N[:3].tolist() == [1.0, 0.6, 0.45]
    assert pairs.t_next_N[:3].tolist() == [0.6, 0.45, 0.0]
    assert pairs.column_N.tolist() == [0, 2, 3, 0, 1, 2, 3, 4]
    assert pairs.count_N.tolist() == [3] * 3 + [5] * 5
    samples = objective.draw(rollout, advantages_BK, pairs, seed=5)
    assert samples.advantage_N.tolist() == [0, 2, 3, 6, 7, 8, 9, 10]
    torch.testing.assert_close(samples.t_N.double(), pairs.t_N)


def test_groups_of_samples_that_differ_in_their_schedule_are_refused():
    rollout = replace(ragged(), batch=replace(ragged().batch, group_B=torch.tensor([4, 4])))
    with pytest.raises(ValueError, match=r"samples of one group differ in their noise levels"):
        pairs_of(rollout)


@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(9, 1), (4, 4), (7, 0), (5, 8)])
def test_processes_with_different_numbers_of_pairs_pass_alike_and_their_mean_is_that_of_all(sizes, updates):
    """The means of values over all pairs, by hand, against what two processes add up and average."""
    first, rollouts = 0, []
    for size in sizes:
        rollouts.append(
            rollout_of(range(first, first + max(size, 1)), sample_B=range(first, first + max(size, 1)))
        )
        first += max(size, 1)
    all_pairs = [pairs_of(rollout, whole=False) for rollout in rollouts]
    all_pairs = [pairs if size else pairs.at(slice(0, 0)) for pairs, size in zip(all_pairs, sizes, strict=True)]
    counts = []

    def planned(gathered):
        return [
            planned_passes(pairs, spare=spare_pairs(rollout, pairs), updates=updates, size=7, gathered=gathered)
            for rollout, pairs in zip(rollouts, all_pairs, strict=True)
        ]

    planned(lambda own: counts.append(own) or torch.ones_like(own)[None])
    plans = planned(lambda own: torch.stack(counts))
    assert [len(passes) for passes in plans[0]] == [len(passes) for passes in plans[1]]
    value = lambda pairs: (pairs.owner_N * 10 + pairs.step_N).double()  # noqa: E731
    for update, both in enumerate(zip(*plans, strict=True)):
        members = torch.cat([value(list(pairs.shares(updates))[update]) for pairs in all_pairs])
        means = [
            sum(part.weight * float(value(part.pairs).mean()) for part in passes if not part.padding)
            for passes in both
        ]
        assert sum(means) / 2 == pytest.approx(float(members.mean()), rel=1e-12)
        assert all(len(part.pairs) for passes in both for part in passes)
    shares = sum(part.share for plan in plans for passes in plan for part in passes) / 2
    assert shares == pytest.approx(1.0, rel=1e-12)


def test_equal_numbers_of_pairs_weigh_exactly_as_on_one_process():
    rollout = rollout_of(range(9))
    pairs = pairs_of(rollout, whole=False)
    spare = spare_pairs(rollout, pairs)
    alone = planned_passes(pairs, spare=spare, updates=1, size=7, gathered=lambda own: own[None])
    one_of_three = planned_passes(
        pairs, spare=spare, updates=1, size=7, gathered=lambda own: own.expand(3, -1, -1)
    )
    weights = [[part.weight for part in plan[0]] for plan in (alone, one_of_three)]
    assert weights[0] == weights[1] == [7 / 36] * 5 + [1 / 36]
