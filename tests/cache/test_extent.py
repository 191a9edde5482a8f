"""The law of Extent: 10,000 random lives in integers, and what they do not show."""

from __future__ import annotations

import pytest

from cache.lives import Life


@pytest.mark.parametrize("seed", range(8))
def test_random_lives(seed: int) -> None:
    for life in range(60):
        Life(1000 * seed + life).live(15)


@pytest.mark.laws
def test_ten_thousand_lives() -> None:
    for seed in range(10_000):
        Life(seed).live(25)
