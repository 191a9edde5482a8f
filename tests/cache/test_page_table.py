"""Test the invariants of PageTable: 10,000 random integer caches, and cases that they do not
cover.
"""

from __future__ import annotations

import pytest

from cache.lives import Life


@pytest.mark.parametrize("seed", range(8))
def test_random_page_tables(seed: int) -> None:
    for life in range(60):
        Life(1000 * seed + life).run(15)


@pytest.mark.laws
def test_ten_thousand_random_page_tables() -> None:
    for seed in range(10_000):
        Life(seed).run(25)
