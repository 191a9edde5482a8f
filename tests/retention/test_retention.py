"""Test the arithmetic of retention rules against the rows that queries see."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant.retention import RETENTIONS, KeepAll, Window

lengths = st.integers(0, 200)


def visible_positions(window: int, query: int) -> list[int]:
    """Return the positions that a query sees, sinks aside."""
    return [key for key in range(query + 1) if query - key < window]


@given(lengths, st.integers(1, 50))
def test_window_keeps_the_rows_of_the_last_and_all_later_tokens(length: int, window: int) -> None:
    retained = list(range(Window(window).find_first_retained(length), length))
    last = visible_positions(window, length - 1) if length else []
    assert retained == last
    assert {key for key in visible_positions(window, length) if key < length} <= set(retained)


@given(lengths, st.integers(1, 50))
def test_keep_is_monotonic(length: int, window: int) -> None:
    assert Window(window).find_first_retained(length) <= Window(window).find_first_retained(
        length + 1
    )


def test_window_of_three() -> None:
    assert [Window(3).find_first_retained(length) for length in range(7)] == [0, 0, 0, 0, 1, 2, 3]


def test_sinks_do_not_move_the_window() -> None:
    assert [Window(3, sinks=8).find_first_retained(length) for length in (2, 5)] == [0, 2]


def test_all_keeps_row_zero() -> None:
    rule = KeepAll(sinks=4)
    assert (rule.window, rule.sinks, rule.find_first_retained(1000)) == (None, 4, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(0), "window=0: 1 or more is needed"),
        (lambda: Window(-3), "window=-3: 1 or more is needed"),
        (lambda: Window(3, -1), "sinks=-1: 0 or more rows"),
        (lambda: KeepAll(-1), "sinks=-1: 0 or more rows"),
    ],
)
def test_numbers_out_of_range_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_names_are_in_the_table_and_are_no_fields() -> None:
    for name, rule in RETENTIONS.items():
        assert rule.name == name
        assert {item.name for item in fields(rule)} <= {"window", "sinks"}
