import itertools
from types import SimpleNamespace

import pytest

from recast_pl.telemetry.clock import STAGES, Mark, StageClock, elapsed


@pytest.fixture(autouse=True)
def _ticking(monkeypatch):
    """Every look at the time is one second later."""
    seconds = itertools.count(1.0)
    monkeypatch.setattr("recast_pl.telemetry.clock.time", SimpleNamespace(perf_counter=lambda: next(seconds)))


def test_a_stage_within_another_is_charged_to_itself_alone():
    clock = StageClock()
    with clock("update"):  # 1 … 6
        with clock("credit"):  # 2 … 3
            pass
        with clock("credit"):  # 4 … 5
            pass
    with clock("rollout"):  # 7 … 8
        pass
    taken = clock.take()
    assert (taken["update"], taken["credit"], taken["rollout"]) == (3, 2, 1)
    assert sum(taken.values()) == 6
    assert clock.share("credit") == 2 / 6
    assert set(clock.take().values()) == {0.0}
    with clock("rollout"):
        pass
    clock.discard()
    assert clock.share("credit") == 2 / 6
    assert set(clock.take().values()) == {0.0}
    assert set(taken) == set(STAGES)


def test_a_stage_that_fails_ends():
    clock = StageClock()
    with pytest.raises(RuntimeError), clock("update"), clock("credit"):  # 1 … 4, 2 … 3
        raise RuntimeError
    taken = clock.take()
    assert (taken["update"], taken["credit"]) == (2, 1)


class Event:
    """A place in a GPU's work; `elapsed_time` is in milliseconds, and of events that have been waited for."""

    def __init__(self, milliseconds):
        self.milliseconds, self.over = milliseconds, False

    def synchronize(self):
        self.over = True

    def elapsed_time(self, end):
        assert end.over
        return end.milliseconds - self.milliseconds


def test_on_a_gpu_a_stage_is_its_stretch_of_the_stream_and_nothing_waits_before_the_end(monkeypatch):
    events = [Event(0.0), Event(1500.0)]
    left = iter(events)
    monkeypatch.setattr("recast_pl.telemetry.clock._event", lambda: next(left))
    clock = StageClock()
    with clock("rollout"):
        pass
    assert not any(event.over for event in events)
    assert clock.take()["rollout"] == 1.5
    assert events[-1].over


def test_where_the_gpu_came_in_between_wall_time_counts():
    begin = Mark(stage="text", seconds=1.0, event=None)
    assert elapsed(begin, Mark(stage=None, seconds=3.0, event=Event(7.0))) == 2.0
