import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from reward_cases import CASES, EXTRA

from recast_pl import rewards
from recast_pl.testing import CHECKS, RewardTester

ROOT = Path(rewards.__file__).parents[2]
HERE = {**os.environ, "PYTHONPATH": str(ROOT)}  # the package under test, whatever is installed
CODE = """
import sys, recast_pl.rewards
heavy = {"diffusers", "peft", "transformers.models.clip", "transformers.models.blip"} & sys.modules.keys()
assert not heavy, f"importing recast_pl.rewards imported {heavy}"
from reward_cases import score_with_own_packages
score_with_own_packages(sys.argv[1], sys.argv[2], sys.argv[3:])
"""


@pytest.fixture(scope="session")
def testers(reward_checkpoints):
    return cache(lambda name: RewardTester(CASES[name](reward_checkpoints)))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", CASES)
def test_contract(testers, name, check):
    getattr(testers(name), check)()


def test_every_reward_has_a_case(testers):
    exported = {getattr(rewards, name) for name in rewards.__all__}
    kinds = {kind for kind in exported if isinstance(kind, type) and issubclass(kind, rewards.Reward)}
    assert kinds - {rewards.Reward} == {testers(name).case.reward for name in CASES}


@pytest.mark.parametrize("extra", sorted({"", *EXTRA.values()}))
def test_importing_is_light_and_a_reward_needs_no_other_rewards_packages(reward_checkpoints, testers, extra):
    names = [name for name in CASES if EXTRA.get(name, "") == extra]
    for name in names:
        testers(name).loaded()  # builds the checkpoints, for which this process has the packages
    run = subprocess.run(
        [sys.executable, "-c", CODE, extra, str(reward_checkpoints.folder), *names],
        cwd=Path(__file__).parents[1],
        env=HERE,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines()[-len(names) :] == [f"scored {name}" for name in names]
