"""How the RewardSuite runs rewards: options, retries, time-outs, background, devices."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from command_line import run
from conftest import prompt_batch
from torch import nn

from recast_pl.rewards import JudgeSuite, Reward, RewardFailure, RewardOptions, RewardSuite
from recast_pl.testing import Near, theta, train

IMAGES = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
PROMPTS = prompt_batch(["a"] * 6).prompts
MEAN = IMAGES.mean(dim=(1, 2, 3))


class Mean(Reward):
    """The mean of a picture; notes what it was given, and that no two calls overlap."""

    def __init__(self):
        self.seen, self.inside = [], threading.Lock()

    def score(self, images_B3HW, prompts):
        assert self.inside.acquire(blocking=False)
        try:
            assert len(prompts) == len(images_B3HW)
            self.seen.append(images_B3HW)
            return self.answer(images_B3HW)
        finally:
            self.inside.release()

    def answer(self, images_B3HW):
        return images_B3HW.mean(dim=(1, 2, 3))


class Flaky(Mean):
    """Fails so many times before it answers."""

    def __init__(self, failures):
        super().__init__()
        self.failures = failures

    def answer(self, images_B3HW):
        self.failures -= 1
        if self.failures >= 0:
            raise ConnectionError("server is down")
        return super().answer(images_B3HW)


class Hanging(Mean):
    """Answers only once it is let go."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def answer(self, images_B3HW):
        self.go.wait(30)
        return super().answer(images_B3HW)


def suite_of(options=None, **rewards):
    suite = RewardSuite(
        rewards=rewards, options={name: RewardOptions(**o) for name, o in (options or {}).items()}
    )
    suite.setup(torch.device("cpu"))
    return suite


def test_each_reward_has_its_own_micro_batches():
    suite = suite_of({"b": {"micro_batch_size": 4}}, a=Mean(), b=Mean())
    scores = suite.score(IMAGES, PROMPTS)
    assert [len(part) for part in suite.rewards["a"].seen] == [6]
    assert [len(part) for part in suite.rewards["b"].seen] == [4, 2]
    torch.testing.assert_close(scores.values_RB, MEAN.expand(2, 6))


def test_rewards_of_one_micro_batch_size_get_the_same_tensors():
    """So that a backbone they share embeds a picture once."""
    suite = suite_of({"b": {"micro_batch_size": 2}}, a=Mean(), b=Mean(), c=Mean())
    suite.score(IMAGES, PROMPTS)
    one, three = suite.rewards["a"].seen, suite.rewards["c"].seen
    assert [id(part) for part in one] == [id(part) for part in three]


def test_a_reward_of_which_less_is_better_is_negated():
    class Less(Mean):
        higher_is_better = False

    torch.testing.assert_close(suite_of(less=Less()).score(IMAGES, PROMPTS).values_RB[0], -MEAN)


def test_one_reward_is_masked_and_another_ends_the_run():
    masked = suite_of({"bad": {"on_failure": "mask"}}, good=Mean(), bad=Flaky(99))
    with pytest.warns(UserWarning, match="'bad' failed and is masked: server is down"):
        scores = masked.score(IMAGES, PROMPTS)
    assert scores.valid_RB.tolist() == [[True] * 6, [False] * 6]
    with pytest.raises(RewardFailure, match=r"rewards\.rewards\.good: server is down"):
        suite_of({"bad": {"on_failure": "mask"}}, good=Flaky(99), bad=Mean()).score(IMAGES, PROMPTS)


@pytest.mark.parametrize("background", [False, True])
def test_a_reward_is_asked_again_as_often_as_its_options_say(background):
    options = {"retries": 2, "retry_wait": 0.0, "background": background}
    with pytest.warns(UserWarning, match="'flaky' failed and is asked again: server is down"):
        scores = suite_of({"flaky": options}, flaky=Flaky(2)).score(IMAGES, PROMPTS)
    torch.testing.assert_close(scores.values_RB[0], MEAN)
    hopeless = suite_of({"flaky": options}, flaky=Flaky(3))
    with (
        pytest.warns(UserWarning, match="is asked again"),
        pytest.raises(RewardFailure, match=r"rewards\.rewards\.flaky: server is down"),
    ):
        hopeless.score(IMAGES, PROMPTS)


@pytest.mark.parametrize("background", [False, True])
def test_a_reward_that_hangs_is_a_failure_until_it_answers(background):
    """While the hanging call is in the scorer, no other one enters it."""
    options = {"timeout": 0.2, "on_failure": "mask", "background": background}
    hanging = Hanging()
    suite = suite_of({"slow": options}, slow=hanging, quick=Mean())
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"'slow' failed and is masked: no answer within 0\.2 s"):
            scores = suite.score(IMAGES, PROMPTS)
        assert not scores.valid_RB[0].any()
        torch.testing.assert_close(scores.values_RB[1], MEAN)
    hanging.go.set()
    torch.testing.assert_close(suite.score(IMAGES, PROMPTS).values_RB[0], MEAN)
    suite.teardown()


def test_a_failed_micro_batch_is_asked_again_before_those_that_wait():
    """Its time-out is that of one micro-batch, and none of them takes that long."""

    class SlowAndOnceDown(Flaky):
        def answer(self, images_B3HW):
            time.sleep(0.1)
            return super().answer(images_B3HW)

    options = {"background": True, "micro_batch_size": 1, "retries": 1, "retry_wait": 0.0, "timeout": 0.4}
    suite = suite_of({"slow": options}, slow=SlowAndOnceDown(1))
    with pytest.warns(UserWarning, match="is asked again: server is down"):
        scores = suite.score(IMAGES, PROMPTS)
    torch.testing.assert_close(scores.values_RB[0], MEAN)
    suite.teardown()


def test_a_call_that_never_returns_does_not_keep_the_process():
    program = """
import threading, torch, test_suite
class Stuck(test_suite.Mean):
    def answer(self, images_B3HW):
        threading.Event().wait()
suite = test_suite.suite_of({"stuck": {"timeout": 0.1, "on_failure": "mask"}}, stuck=Stuck())
print(suite.score(test_suite.IMAGES, test_suite.PROMPTS).valid_RB.any().item())
suite.teardown()
"""
    here = Path(__file__).parent
    program = f"import sys; sys.path[:0] = {sys.path}\n{program}"  # where this process finds its modules
    words = [sys.executable, "-W", "ignore", "-c", program]
    ended = subprocess.run(words, cwd=here, capture_output=True, text=True, timeout=100, check=True)
    assert ended.stdout.split() == ["False"]


def test_a_background_reward_works_while_pictures_are_made():
    started = threading.Event()

    class Early(Mean):
        def answer(self, images_B3HW):
            started.set()
            return super().answer(images_B3HW)

    suite = suite_of({"early": {"background": True, "micro_batch_size": 2}}, early=Early(), late=Mean())
    scoring = suite.begin(PROMPTS)
    scoring.add(IMAGES[:3])
    assert started.wait(10)  # before the rest of the pictures exists
    assert not suite.rewards["late"].seen
    scoring.add(IMAGES[3:])
    torch.testing.assert_close(scoring.result().values_RB, MEAN.expand(2, 6))
    assert [len(part) for part in suite.rewards["early"].seen] == [2, 1, 2, 1]


def test_a_failure_in_the_background_ends_the_run():
    suite = suite_of({"bad": {"background": True}}, bad=Flaky(99), good=Mean())
    with pytest.raises(RewardFailure, match=r"rewards\.rewards\.bad: server is down"):
        suite.score(IMAGES, PROMPTS)


def test_a_run_is_the_same_with_a_reward_in_the_background():
    rewards = {"near": Near(0.5), "far": Near(-3.0)}
    budgets = {"near": 3.0, "far": 1.0}  # equal ones would cancel, and rounding decide
    plain, _ = train(rewards, budgets=budgets, epochs=1)
    options = {"near": RewardOptions(background=True, micro_batch_size=3)}
    overlapped, _ = train(rewards, budgets=budgets, epochs=1, options=options)
    assert theta(plain) == pytest.approx(theta(overlapped), abs=1e-5)


def test_missing_pictures_are_an_error():
    scoring = suite_of(a=Mean()).begin(PROMPTS)
    scoring.add(IMAGES[:4])
    with pytest.raises(ValueError, match="4 pictures but 6 prompts"):
        scoring.result()


# ---------------------------------------------------------------------- devices


class Network(nn.Module):
    """Notes where it is sent."""

    def __init__(self):
        super().__init__()
        self.places = []

    def to(self, device):
        self.places.append(str(device))
        return self


class Networked(Mean):
    def __init__(self, *networks):
        super().__init__()
        self.own = networks

    def networks(self):
        return self.own


def test_offloaded_networks_wait_on_the_cpu_and_shared_ones_stay():
    """`cpu:0` stands for the accelerator."""
    alone, shared = Network(), Network()
    suite = RewardSuite(
        rewards={"a": Networked(alone, shared), "b": Networked(shared)},
        options={"a": RewardOptions(offload=True)},
    )
    suite.setup(torch.device("cpu", 0))
    assert alone.places[-1] == "cpu"
    alone.places.clear()
    shared.places.clear()
    suite.score(IMAGES, PROMPTS)
    assert alone.places == ["cpu:0", "cpu"]
    assert set(shared.places) == {"cpu:0"}


# ---------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"b": {}}, r"rewards\.options: names \['b'\] that do not exist; the rewards are a"),
        ({"a": {"retries": -1}}, r"rewards\.options\.a\.retries: expected 0 or more"),
        ({"a": {"background": True, "offload": True}}, r"rewards\.options\.a: `background`.*choose one"),
        ({"a": {"timeout": 0.0}}, r"rewards\.options\.a\.timeout: expected above 0"),
        ({"a": {"micro_batch_size": 0}}, r"rewards\.options\.a\.micro_batch_size: expected 1 or more"),
    ],
)
def test_wrong_options_name_their_key(options, message):
    with pytest.raises(ValueError, match=message):
        suite_of(options, a=Mean())


def test_judges_messages_name_their_own_block():
    with pytest.raises(ValueError, match=r"judges\.micro_batch_size: expected 1"):
        JudgeSuite(rewards={"a": Mean()}, micro_batch_size=0)
    with pytest.raises(ValueError, match=r"judges\.options: names \['b'\]"):
        JudgeSuite(rewards={"a": Mean()}, options={"b": RewardOptions()})
    with pytest.raises(ValueError, match=r"judges\.options\.a\.timeout: expected above 0"):
        JudgeSuite(rewards={"a": Mean()}, options={"a": RewardOptions(timeout=0.0)})
    judges = JudgeSuite(rewards={"a": Flaky(1)})
    judges.setup(torch.device("cpu"))
    with pytest.raises(RewardFailure, match=r"judges\.rewards\.a: server is down"):
        judges.score(IMAGES, PROMPTS)


def test_options_come_from_the_command_line(overlay, tmp_path):
    cli = run("validate", overlay, tmp_path,
              "--rewards.options", '{"jpeg": {"on_failure": "mask", "background": true, "timeout": 60}}',
              "--rewards.options.sharpness.micro_batch_size", "2")  # fmt: skip
    options = {guarded.name: guarded.options for guarded in cli.model.rewards.guarded}
    assert options["jpeg"] == RewardOptions(on_failure="mask", background=True, timeout=60)
    assert options["sharpness"].micro_batch_size == 2
