"""Test the coverage of intervals, on values with a known mean."""

from __future__ import annotations

import pytest
import torch

from kvant.eval.result import bootstrap_mean_interval

COUNT = 4096


def measure_coverage(alike: int, block: int, repeats: int = 120) -> float:
    """Return how often an interval covers the mean, with runs of `alike` equal values."""
    hits = 0
    for _ in range(repeats):
        values = torch.empty(COUNT // alike).exponential_().repeat_interleave(alike)
        low, high = bootstrap_mean_interval(values, block=block)
        hits += low <= 1.0 <= high
    return hits / repeats


def test_interval_covers_the_mean_at_its_nominal_rate() -> None:
    assert 0.89 <= measure_coverage(alike=1, block=32) <= 0.99


@pytest.mark.parametrize("repeats", [40, pytest.param(120, marks=pytest.mark.laws)])
def test_correlated_neighbours_widen_the_interval(repeats: int) -> None:
    assert measure_coverage(alike=32, block=1, repeats=repeats) < 0.6
    assert measure_coverage(alike=32, block=64, repeats=repeats) > 0.85


def test_interval_surrounds_the_mean_and_is_reproducible() -> None:
    values = torch.randn(1000)
    low, high = bootstrap_mean_interval(values, seed=3)
    assert low < float(values.mean()) < high
    assert (
        bootstrap_mean_interval(values, seed=3)
        == (low, high)
        != bootstrap_mean_interval(values, seed=4)
    )


def test_single_or_equal_values_give_an_interval_of_zero_width() -> None:
    assert bootstrap_mean_interval(torch.tensor([2.0])) == (2.0, 2.0)
    assert bootstrap_mean_interval(torch.full((1000,), 0.5)) == (0.5, 0.5)


def test_infinite_values_stay_infinite() -> None:
    values = torch.zeros(1024)
    values[:900] = torch.inf
    assert bootstrap_mean_interval(values) == (torch.inf, torch.inf)
