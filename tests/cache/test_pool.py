"""Slots: the order in which they are taken, and what those cost that nobody ever took."""

from __future__ import annotations

import tracemalloc

import numpy as np

from kvant.cache.pool import Pool


def test_slots_that_were_freed_are_taken_first_then_fresh_ones_in_order() -> None:
    pool = Pool(4)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    pool.drop_references(np.array([2, 0]))
    assert (pool.size, pool.num_free) == (4, 3)
    twin = pool.copy()
    for each in (pool, twin):
        assert each.allocate(4).tolist() == [0, 2, 3, 4]
        assert (each.size, each.num_free) == (8, 3)
    pool.drop_references(np.array([1]))
    pool.drop_references(np.array([4, 3]))  # what was dropped last comes first
    assert pool.allocate(5).tolist() == [3, 4, 1, 5, 6]


def test_slots_are_fresh_or_free_after_they_were_counted_anew() -> None:
    pool = Pool()
    pool.grow(9)
    pool.allocate(4)
    pool.recount()  # nobody holds any
    assert pool.num_free == 9
    pool.check()
    assert pool.allocate(6).tolist() == list(range(6))


def test_slots_that_nobody_took_cost_their_counts_and_no_more() -> None:
    pool = Pool(1 << 21)
    tracemalloc.start()
    try:
        assert pool.allocate(2).tolist() == [0, 1]
        pool.recount()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    held = pool.ref_counts.nbytes + pool.slot_versions.nbytes
    assert peak < held + 1.5 * pool.ref_counts.nbytes  # a second array while they are counted anew
    assert pool.num_free == pool.size == 1 << 21
