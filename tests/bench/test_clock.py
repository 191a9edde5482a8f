"""Test the wall clock, and events in the stream of a simulated GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from kvant.bench import clock
from kvant.bench.clock import CudaClock, Lap, WallClock


@pytest.fixture(autouse=True)
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Advance the wall clock by a second per reading."""
    readings = count()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(readings)))
    return readings


def test_wall_clock_measures_a_call_until_it_returns() -> None:
    wall, calls = WallClock(), []
    wall.start_turn()
    wall.synchronize()
    lap = wall.time_call(lambda: calls.append(1))
    assert (calls, lap.seconds, wall.describe_laps([lap])) == ([1], 1.0, {})


def test_events_surround_each_call_and_are_read_at_the_end(stream_log: list[str]) -> None:
    events = CudaClock()
    events.start_turn()
    laps = [
        events.time_call(lambda name=name: stream_log.append(name)) for name in ("first", "second")
    ]
    queued = ["event 0", "first", "event 1", "event 2", "second", "event 3"]
    assert stream_log == ["settle", "hold", *queued]  # no synchronization in between
    assert [lap.seconds for lap in laps] == [0.25, 0.25]
    assert stream_log[-2:] == ["wait for event 1", "wait for event 3"]


def test_python_overhead_is_reported_separately(stream_log: list[str]) -> None:
    laps = [Lap(host, (None, None)) for host in (1.0, 2.0, 9.0)]
    assert CudaClock().describe_laps(laps) == {"host_ms": 2e3}


def test_dependent_call_waits_for_the_one_before(stream_log: list[str]) -> None:
    CudaClock().synchronize()
    assert stream_log == ["settle"]
