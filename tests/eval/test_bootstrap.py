"""Intervals hold what they promise, on values whose mean is known."""

from __future__ import annotations

import pytest
import torch

from kvant.eval.result import bootstrap_mean_interval

COUNT = 4096


def covered(alike: int, block: int, repeats: int = 120) -> float:
    """How often an interval holds the mean, of values that come `alike` times each, in a row."""
    hits = 0
    for _ in range(repeats):
        values = torch.empty(COUNT // alike).exponential_().repeat_interleave(alike)
        low, high = bootstrap_mean_interval(values, block=block)
        hits += low <= 1.0 <= high
    return hits / repeats


def test_it_holds_the_mean_as_often_as_it_says() -> None:
    assert 0.89 <= covered(alike=1, block=32) <= 0.99


@pytest.mark.parametrize("repeats", [40, pytest.param(120, marks=pytest.mark.laws)])
def test_neighbours_that_are_alike_do_not_make_it_too_sure(repeats: int) -> None:
    assert covered(alike=32, block=1, repeats=repeats) < 0.6
    assert covered(alike=32, block=64, repeats=repeats) > 0.85


def test_it_lies_about_the_mean_and_is_the_same_again() -> None:
    values = torch.randn(1000)
    low, high = bootstrap_mean_interval(values, seed=3)
    assert low < float(values.mean()) < high
    assert (
        bootstrap_mean_interval(values, seed=3)
        == (low, high)
        != bootstrap_mean_interval(values, seed=4)
    )


def test_one_value_and_equal_values_have_an_interval_of_no_width() -> None:
    assert bootstrap_mean_interval(torch.tensor([2.0])) == (2.0, 2.0)
    assert bootstrap_mean_interval(torch.full((1000,), 0.5)) == (0.5, 0.5)


def test_what_is_infinite_stays_so() -> None:
    values = torch.zeros(1024)
    values[:900] = torch.inf
    assert bootstrap_mean_interval(values) == (torch.inf, torch.inf)
