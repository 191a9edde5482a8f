"""What restores took says how soon others come, and nothing that it does not know."""

from __future__ import annotations

import pytest

from kvant.prefixes.restores import Restores


def test_everything_is_likely_before_anybody_knows() -> None:
    assert Restores().likely(10**9, 0.0)


def test_a_few_that_were_slow_say_nothing_of_many() -> None:
    restores = Restores()
    restores.late(100, 0.07)
    assert restores.likely(1200, 0.1) and not restores.likely(100, 0.06)


def test_many_that_were_slow_say_nothing_of_what_one_request_costs() -> None:
    restores = Restores()
    restores.came(10_000, 10.0)
    assert restores.likely(100, 0.1) and not restores.likely(100, 0.09)


def test_what_some_length_took_bounds_all_others() -> None:
    restores = Restores()
    restores.came(100, 0.5)
    restores.came(10_000, 10.0)
    assert restores.least(10) == pytest.approx(0.05)
    assert restores.least(1_000) == pytest.approx(1.0)
    assert restores.least(20_000) == pytest.approx(10.0)


def test_the_newest_counts_most() -> None:
    restores = Restores()
    restores.came(1000, 3.0)
    for _ in range(10):
        restores.came(1000, 1.0)
    assert restores.least(1000) == pytest.approx(1.0, rel=1e-2)


def test_what_is_late_takes_longer_than_that() -> None:
    restores = Restores()
    restores.came(1000, 3.0)
    restores.late(1000, 1.0)  # it would have come later
    assert restores.least(1000) == 3.0
    restores.late(1000, 4.0)
    assert restores.least(1000) == 4.0


def test_what_was_slow_once_is_tried_again() -> None:
    restores = Restores()
    restores.came(100, 1.0)
    assert restores.likely(100, 1.0) and restores.least(100) == 1.0
    tries = [restores.likely(100, 0.5) for _ in range(3)]
    assert tries == [False, False, True]
