from recast_pl.clock import STAGES, StageClock


class Ticking(StageClock):
    """Every look at the time is one second later."""

    seconds = 0

    @classmethod
    def _now(cls):
        cls.seconds += 1
        return float(cls.seconds)


def test_a_stage_within_another_is_charged_to_itself_alone():
    clock = Ticking()
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
