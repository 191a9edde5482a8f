"""What restores took says how soon others come, and nothing that it does not know."""

from __future__ import annotations

import pytest

from kvant.prefixes.restore_times import RestoreTimes


def test_everything_is_likely_before_anybody_knows() -> None:
    assert RestoreTimes().can_restore_within(10**9, 0.0)


def test_a_few_that_were_slow_say_nothing_of_many() -> None:
    restores = RestoreTimes()
    restores.record_timeout(100, 0.07)
    assert restores.can_restore_within(1200, 0.1) and not restores.can_restore_within(100, 0.06)


def test_many_that_were_slow_say_nothing_of_what_one_request_costs() -> None:
    restores = RestoreTimes()
    restores.record_time(10_000, 10.0)
    assert restores.can_restore_within(100, 0.1) and not restores.can_restore_within(100, 0.09)


def test_what_some_length_took_bounds_all_others() -> None:
    restores = RestoreTimes()
    restores.record_time(100, 0.5)
    restores.record_time(10_000, 10.0)
    assert restores.bound_seconds(10) == pytest.approx(0.05)
    assert restores.bound_seconds(1_000) == pytest.approx(1.0)
    assert restores.bound_seconds(20_000) == pytest.approx(10.0)


def test_the_newest_counts_most() -> None:
    restores = RestoreTimes()
    restores.record_time(1000, 3.0)
    for _ in range(10):
        restores.record_time(1000, 1.0)
    assert restores.bound_seconds(1000) == pytest.approx(1.0, rel=1e-2)


def test_what_is_late_takes_longer_than_that() -> None:
    restores = RestoreTimes()
    restores.record_time(1000, 3.0)
    restores.record_timeout(1000, 1.0)  # it would have come later
    assert restores.bound_seconds(1000) == 3.0
    restores.record_timeout(1000, 4.0)
    assert restores.bound_seconds(1000) == 4.0


def test_what_was_slow_once_is_tried_again() -> None:
    restores = RestoreTimes()
    restores.record_time(100, 1.0)
    assert restores.can_restore_within(100, 1.0) and restores.bound_seconds(100) == 1.0
    tries = [restores.can_restore_within(100, 0.5) for _ in range(3)]
    assert tries == [False, False, True]
