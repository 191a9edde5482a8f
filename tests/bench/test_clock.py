"""Clocks: the machine's own, and events in the stream of a GPU, which is played here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from kvant.bench import clock
from kvant.bench.clock import CudaClock, Lap, WallClock


@pytest.fixture(autouse=True)
def seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Every look at the machine's clock is a second later."""
    looks = count()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(looks)))
    return looks


def test_the_machine_tells_what_a_call_took_until_it_returned() -> None:
    wall, called = WallClock(), []
    wall.start_turn()
    wall.synchronize()
    lap = wall.time_call(lambda: called.append(1))
    assert (called, lap.seconds, wall.describe_laps([lap])) == ([1], 1.0, {})


def test_events_stand_around_each_call_and_are_read_when_all_are_done(done: list[str]) -> None:
    events = CudaClock()
    events.start_turn()
    laps = [events.time_call(lambda name=name: done.append(name)) for name in ("first", "second")]
    queued = ["event 0", "first", "event 1", "event 2", "second", "event 3"]
    assert done == ["settle", "hold", *queued]  # nothing is waited for in between
    assert [lap.seconds for lap in laps] == [0.25, 0.25]
    assert done[-2:] == ["wait for event 1", "wait for event 3"]


def test_what_python_took_is_told_beside(done: list[str]) -> None:
    laps = [Lap(host, (None, None)) for host in (1.0, 2.0, 9.0)]
    assert CudaClock().describe_laps(laps) == {"host_ms": 2e3}


def test_a_call_that_needs_the_one_before_waits_for_it(done: list[str]) -> None:
    CudaClock().synchronize()
    assert done == ["settle"]
