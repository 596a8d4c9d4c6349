"""Window: which steps have credit, and when a sliding window moves."""

import pytest
import torch
from gaussian import FEW_LEVELS, LEVELS, Gaussian

from recast_pl.credit import CreditAssigner, Uniform, Window
from recast_pl.credit.strategies.window import window_start
from recast_pl.testing import Near, theta, train

REWARDS = {"near": Near(0.5), "far": Near(-3.0)}


def support(values_RK):
    return (values_RK > 0).any(0).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"place": "first", "steps": 3}, [0, 1, 2]),
        ({"place": "last", "steps": 3}, [7, 8, 9]),
        ({"place": "first", "steps": None, "fraction": 0.5}, [0, 1, 2, 3, 4]),
        ({"place": "last", "steps": None, "fraction": 0.01}, [9]),
        ({"place": "last", "steps": None, "fraction": 1.0}, list(range(10))),
    ],
)
def test_fixed_windows_by_hand(settings, expected):
    table = Window(**settings).table(("a", "b"), torch.tensor([3.0, 1.0]), LEVELS)
    assert support(table) == expected
    torch.testing.assert_close(table.sum(1), torch.tensor([0.75, 0.25], dtype=torch.float64))
    inside = table[:, expected]
    torch.testing.assert_close(inside, inside[:, :1].expand_as(inside))


def test_a_window_of_all_steps_is_uniform():
    budgets = torch.tensor([2.0, 0.0, 1.0])
    whole = Window(place="first", steps=4).table(("a", "b", "c"), budgets, FEW_LEVELS)
    torch.testing.assert_close(whole, Uniform().table(("a", "b", "c"), budgets, FEW_LEVELS))


def at(strategy, iteration):
    """The window's steps of an iteration, told by its samples."""
    policy = Gaussian(rewards={"a": lambda x0: x0.double()})
    strategy.observe(policy.probe(samples=4, seed=iteration))  # the probe's iteration is its seed
    return support(strategy.table(("a",), torch.ones(1), LEVELS))


def test_a_sliding_window_by_hand():
    strategy = Window(steps=4, every=25, stride=1)
    assert [at(strategy, i) for i in (0, 24, 25)] == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3, 4]]
    assert at(strategy, 25 * 6) == [6, 7, 8, 9]
    assert at(strategy, 25 * 7) == [0, 1, 2, 3]
    assert at(Window(steps=4, every=25, at_end="stay"), 10_000) == [6, 7, 8, 9]
    assert at(Window(steps=4, every=2, stride=4), 5) == [6, 7, 8, 9]  # the last move is cut short


@pytest.mark.parametrize("stride", [1, 2, 3, 7])
@pytest.mark.parametrize("last", [0, 1, 5, 6])
def test_a_restarting_window_walks_step_by_step(stride, last):
    place, walked = 0, []
    for _ in range(40):
        walked.append(place)
        place = 0 if place == last else min(place + stride, last)
    assert walked == [window_start(m, stride=stride, last=last, restart=True) for m in range(40)]
    stayed = [window_start(m, stride=stride, last=last, restart=False) for m in range(40)]
    assert stayed == [min(m * stride, last) for m in range(40)]


def test_the_window_moves_with_training_and_goes_on_after_a_resume(tmp_path):
    def credit():
        return CreditAssigner(every_n_steps=2, strategy=Window(steps=3, every=4, stride=2))

    whole, rest = credit(), credit()
    one, _ = train(REWARDS, epochs=4, credit=whole)
    moves = [(i, support(values)[0]) for i, values in whole.history]
    assert moves == [(i, (0, 2, 4, 5, 0)[i // 4]) for i in range(0, 20, 2)]
    _, trainer = train(REWARDS, epochs=3, credit=credit(), folder=tmp_path)  # 15 iterations: odd
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    two, _ = train(REWARDS, epochs=4, credit=rest, folder=tmp_path, resume=tmp_path / "half.ckpt")
    assert theta(one) == theta(two)
    assert [i for i, _ in rest.history] == [i for i, _ in whole.history]


def test_looking_at_the_iteration_changes_nothing_else():
    one, _ = train(REWARDS, epochs=1, credit=CreditAssigner(strategy=Window(steps=3)))
    two, _ = train(REWARDS, epochs=1, credit=CreditAssigner(strategy=Window(place="first", steps=3)))
    assert theta(one) == theta(two)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, r"init_args\.steps: expected 1 or more, got 0"),
        ({"every": 0}, r"init_args\.every: expected 1 or more, got 0"),
        ({"stride": 0}, r"init_args\.stride"),
        (
            {"steps": 3, "fraction": 0.5},
            r"init_args\.fraction.*steps 3 and fraction 0\.5; set the other to null",
        ),
        ({"steps": None}, r"init_args\.fraction.*one of them"),
        ({"steps": None, "fraction": 1.5}, r"init_args\.fraction: expected above 0 and at most 1, got 1\.5"),
        ({"place": "middle"}, r"init_args\.place: expected one of first, last, sliding, got middle"),
        ({"at_end": "bounce"}, r"init_args\.at_end"),
    ],
)
def test_wrong_settings_name_their_key(settings, message):
    with pytest.raises(ValueError, match=message):
        Window(**settings)


def test_a_window_longer_than_the_rollout_names_both_keys():
    with pytest.raises(ValueError, match=r"init_args\.steps: a window of 5.*rollout has 4.*num_steps"):
        Window(place="last", steps=5).table(("a",), torch.ones(1), FEW_LEVELS)


def test_a_sliding_window_before_any_iteration_is_an_error():
    with pytest.raises(RuntimeError, match="before any iteration"):
        Window(steps=2).table(("a",), torch.ones(1), FEW_LEVELS)
