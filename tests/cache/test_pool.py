"""Slots: the order in which they are taken, and what those cost that nobody ever took."""

from __future__ import annotations

import tracemalloc

import numpy as np

from kvant.cache.pool import Pool


def test_slots_that_were_freed_are_taken_first_then_fresh_ones_in_order() -> None:
    pool = Pool(4)
    assert pool.take(3).tolist() == [0, 1, 2]
    pool.drop(np.array([2, 0]))
    assert (pool.size, pool.free) == (4, 3)
    twin = pool.copy()
    for each in (pool, twin):
        assert each.take(4).tolist() == [0, 2, 3, 4]
        assert (each.size, each.free) == (8, 3)
    pool.drop(np.array([1]))
    pool.drop(np.array([4, 3]))  # what was dropped last comes first
    assert pool.take(5).tolist() == [3, 4, 1, 5, 6]


def test_slots_are_fresh_or_free_after_they_were_counted_anew() -> None:
    pool = Pool()
    pool.grow(9)
    pool.take(4)
    pool.recount()  # nobody holds any
    assert pool.free == 9
    pool.check()
    assert pool.take(6).tolist() == list(range(6))


def test_slots_that_nobody_took_cost_their_counts_and_no_more() -> None:
    pool = Pool(1 << 21)
    tracemalloc.start()
    try:
        assert pool.take(2).tolist() == [0, 1]
        pool.recount()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    held = pool.counts.nbytes + pool.takes.nbytes
    assert peak < held + 1.5 * pool.counts.nbytes  # a second array while they are counted anew
    assert pool.free == pool.size == 1 << 21
