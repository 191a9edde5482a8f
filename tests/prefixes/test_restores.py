"""Test forecasts of restore times from measured ones, without extrapolating too far."""

from __future__ import annotations

import pytest

from kvant.prefixes.restore import RestoreTimes


def test_every_restore_is_tried_without_measurements() -> None:
    assert RestoreTimes().can_restore_within(10**9, 0.0)


def test_slow_small_restores_do_not_rule_out_large_ones() -> None:
    restores = RestoreTimes()
    restores.record_timeout(100, 0.07)
    assert restores.can_restore_within(1200, 0.1) and not restores.can_restore_within(100, 0.06)


def test_slow_large_restores_do_not_bound_a_single_request() -> None:
    restores = RestoreTimes()
    restores.record_time(10_000, 10.0)
    assert restores.can_restore_within(100, 0.1) and not restores.can_restore_within(100, 0.09)


def test_measured_length_bounds_all_others() -> None:
    restores = RestoreTimes()
    restores.record_time(100, 0.5)
    restores.record_time(10_000, 10.0)
    assert restores.bound_seconds(10) == pytest.approx(0.05)
    assert restores.bound_seconds(1_000) == pytest.approx(1.0)
    assert restores.bound_seconds(20_000) == pytest.approx(10.0)


def test_newest_measurement_has_the_largest_weight() -> None:
    restores = RestoreTimes()
    restores.record_time(1000, 3.0)
    for _ in range(10):
        restores.record_time(1000, 1.0)
    assert restores.bound_seconds(1000) == pytest.approx(1.0, rel=1e-2)


def test_late_restore_counts_as_slower_than_its_deadline() -> None:
    restores = RestoreTimes()
    restores.record_time(1000, 3.0)
    restores.record_timeout(1000, 1.0)  # it timed out
    assert restores.bound_seconds(1000) == 3.0
    restores.record_timeout(1000, 4.0)
    assert restores.bound_seconds(1000) == 4.0


def test_slow_length_is_tried_again() -> None:
    restores = RestoreTimes()
    restores.record_time(100, 1.0)
    assert restores.can_restore_within(100, 1.0) and restores.bound_seconds(100) == 1.0
    tries = [restores.can_restore_within(100, 0.5) for _ in range(3)]
    assert tries == [False, False, True]
