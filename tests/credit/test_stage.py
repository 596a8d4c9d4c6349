"""Stage: steps to stages, stages to W."""

import math

import pytest
import torch
from gaussian import FEW_LEVELS, LEVELS, Gaussian

from recast_pl.credit import CreditAssigner, Stage
from recast_pl.credit.strategies.stage import STAGES, stages_by_change, stages_by_snr
from recast_pl.testing import Near, train

THREE = {"early": ["a"], "middle": ["b"], "late": ["c"]}
NAMES = ("a", "b", "c")


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def test_each_reward_counts_in_its_own_stage_by_hand():
    """Steps start at t = 1, .8, .5, .2: log SNR −∞, −2.77, 0, 2.77."""
    stage = Stage(stages=THREE, log_snr=(-1.0, 1.0))
    table = stage.table(NAMES, torch.tensor([2.0, 1.0, 1.0]), FEW_LEVELS)
    assert table.tolist() == [[0.25, 0.25, 0, 0], [0, 0, 0.25, 0], [0, 0, 0, 0.25]]
    steps = Stage(stages=THREE, log_snr=(-1.0, 1.0), keep="steps")
    by_steps = steps.table(NAMES, torch.tensor([2.0, 1.0, 1.0]), FEW_LEVELS)
    assert by_steps.tolist() == table.tolist()  # budgets happen to ask for the same


def test_budgets_are_kept_as_rows_and_steps_as_columns():
    stages = {"early": ["a"], "middle": ["b", "a"], "late": ["c", "b"]}
    budgets = torch.tensor([1.0, 2.0, 5.0])
    rows = Stage(stages=stages, log_snr=(-1.0, 1.0)).table(NAMES, budgets, FEW_LEVELS)
    a, b, c = 1 / 8, 2 / 8, 5 / 8
    expected = float64([[a / 3, a / 3, a / 3, 0], [0, 0, b / 2, b / 2], [0, 0, 0, c]])
    torch.testing.assert_close(rows, expected)
    columns = Stage(stages=stages, log_snr=(-1.0, 1.0), keep="steps").table(NAMES, budgets, FEW_LEVELS)
    expected = float64([[1, 1, 1 / 3, 0], [0, 0, 2 / 3, 2 / 7], [0, 0, 0, 5 / 7]]) / 4
    torch.testing.assert_close(columns, expected)


@pytest.mark.parametrize("keep", ["budgets", "steps"])
def test_a_reward_of_budget_0_has_no_effect(keep):
    stages = {"early": ["a", "z"], "middle": ["b", "z"], "late": ["c"]}
    with_zero = Stage(stages=stages, keep=keep).table((*NAMES, "z"), torch.tensor([1.0, 1, 2, 0]), LEVELS)
    without = Stage(stages=THREE, keep=keep).table(NAMES, torch.tensor([1.0, 1, 2]), LEVELS)
    torch.testing.assert_close(with_zero[:3], without)
    assert not with_zero[3].any()


def test_thresholds_are_log_signal_to_noise_ratios():
    levels = torch.linspace(1, 0, 1001, dtype=torch.float64)
    of_K = stages_by_snr(levels, (-3.0, 0.0))
    first, second = 1 / (1 + math.exp(-1.5)), 0.5  # t where 2 log((1 − t)/t) = −3 and 0
    assert torch.equal(of_K == 0, levels[:-1] > first)
    assert torch.equal(of_K == 2, levels[:-1] <= second)


def test_boundaries_by_change_are_the_nearest_ones():
    """Against all pairs of boundaries, the first chosen before the second."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        steps = int(torch.randint(3, 12, (), generator=generator))
        change_K = torch.rand(steps, generator=generator, dtype=torch.float64)
        so_far = [0.0, *(change_K.cumsum(0) / change_K.sum()).tolist()]
        first = min(range(1, steps - 1), key=lambda a: abs(so_far[a] - 0.25))
        second = min(range(first + 1, steps), key=lambda a: abs(so_far[a] - 0.7))
        expected = [0] * first + [1] * (second - first) + [2] * (steps - second)
        assert stages_by_change(change_K, (0.25, 0.7)).tolist() == expected


def test_stages_follow_what_previews_change():
    """Of a linear reward on N(0, s²) the gains are known: small scales are told late, large ones early."""
    starts = {}
    for scale in (0.1, 10.0):
        policy = Gaussian(scale=scale, rewards={"a": lambda x0: x0.double()})
        stages = {stage: ["a"] for stage in STAGES}
        strategy = Stage(stages=stages, by="change")
        assert strategy.needs_evidence
        assert not strategy.ready
        strategy.observe(policy.probe(samples=4096, group_size=64))
        assert strategy.ready
        starts[scale] = strategy.stage_of_steps(torch.ones(1), LEVELS)
        t = LEVELS
        told = (1 - t) ** 2 * scale**2 / ((1 - t) ** 2 * scale**2 + t**2)
        exact = stages_by_change(told.diff().sqrt(), (1 / 3, 2 / 3))
        assert torch.equal(starts[scale], exact)
    assert (starts[0.1] == 0).sum() > (starts[10.0] == 0).sum() + 3


def test_rewards_of_budget_0_do_not_move_the_stages():
    policy = Gaussian(
        scale=0.1, rewards={"a": lambda x0: x0.double(), "wild": lambda x0: torch.sin(400 * x0.double())}
    )
    stages = {stage: ["a", "wild"] for stage in STAGES}
    strategy = Stage(stages=stages, by="change")
    strategy.observe(policy.probe(samples=1024, group_size=64))
    only, both = (strategy.stage_of_steps(torch.tensor([1.0, b]), LEVELS).tolist() for b in (0.0, 1.0))
    alone = Stage(stages={stage: ["a"] for stage in STAGES}, by="change")
    policy.rewards.pop("wild")
    alone.observe(policy.probe(samples=1024, group_size=64))
    assert only == alone.stage_of_steps(torch.ones(1), LEVELS).tolist() != both


@pytest.mark.parametrize(
    ("stages", "budgets", "message"),
    [
        ({**THREE, "late": ["d"]}, [1, 1, 1], r"init_args\.stages: names d, but the rewards are a, b, c"),
        ({**THREE, "late": ["b"]}, [1, 1, 1], r"init_args\.stages: c has a budget, but no stage"),
        (THREE, [1, 0, 1], r"init_args\.stages\.middle: no reward with a budget above 0.*are a, c"),
        ({**THREE, "late": []}, [1, 1, 0], r"init_args\.stages\.late: no reward"),
    ],
)
def test_stages_and_rewards_that_do_not_go_together(stages, budgets, message):
    with pytest.raises(ValueError, match=message):
        Stage(stages=stages).check(NAMES, torch.tensor(budgets), 4)


def test_an_unknown_reward_ends_the_run_before_anything_is_loaded():
    loaded = []

    class Loud(Near):
        def load(self, device):
            loaded.append(device)

    stages = {"early": ["near"], "middle": ["near"], "late": ["fra"]}
    with pytest.raises(ValueError, match=r"init_args\.stages: names fra, but the rewards are near, far"):
        train(
            {"near": Loud(0.5), "far": Near(-3.0)}, epochs=1,
            credit=CreditAssigner(strategy=Stage(stages=stages)),
        )  # fmt: skip
    assert not loaded


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"stages": {"early": ["a"]}},
            r"init_args\.stages: expected rewards of early, middle, late, got early",
        ),
        ({"stages": {**THREE, "last": ["a"]}}, r"init_args\.stages: expected .* got early, middle, late, last"),
        ({"log_snr": (0.0, 0.0)}, r"init_args\.log_snr: expected two rising numbers"),
        ({"change": (0.5, 1.0)}, r"init_args\.change: expected two rising shares in \(0, 1\)"),
        ({"by": "time"}, r"init_args\.by: expected one of snr, change, got time"),
        ({"keep": "rows"}, r"init_args\.keep"),
        ({"samples": 1}, r"init_args\.samples"),
        ({"memory": -1.0}, r"init_args\.memory"),
    ],
)
def test_wrong_settings_name_their_key(settings, message):
    with pytest.raises(ValueError, match=message):
        Stage(**{"stages": THREE, **settings})


def test_a_stage_without_steps_is_refused():
    with pytest.raises(ValueError, match=r"log_snr: no step starts in the stage 'middle'.*-inf, -2\.77, 0\.0"):
        Stage(stages=THREE, log_snr=(1.0, 2.0)).table(NAMES, torch.ones(3), FEW_LEVELS)
    with pytest.raises(ValueError, match="3 denoising steps or more, the rollout has 2"):
        stages_by_change(torch.ones(2), (0.3, 0.6))


def test_W_before_evidence_is_an_error():
    with pytest.raises(RuntimeError, match="before any evidence"):
        Stage(stages=THREE, by="change").table(NAMES, torch.ones(3), LEVELS)
