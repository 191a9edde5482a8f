"""Test slots: the order of allocation, and the cost of unallocated slots."""

from __future__ import annotations

import tracemalloc

import numpy as np

from kvant.pages.pool import Pool


def test_freed_slots_are_reused_before_fresh_ones() -> None:
    pool = Pool(4)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    pool.drop_references(np.array([2, 0]))
    assert (pool.size, pool.num_free) == (4, 3)
    clone = pool.copy()
    for each in (pool, clone):
        assert each.allocate(4).tolist() == [0, 2, 3, 4]
        assert (each.size, each.num_free) == (8, 3)
    pool.drop_references(np.array([1]))
    pool.drop_references(np.array([4, 3]))  # the slot dropped last is reused first
    assert pool.allocate(5).tolist() == [3, 4, 1, 5, 6]


def test_recount_marks_slots_fresh_or_free() -> None:
    pool = Pool()
    pool.grow(9)
    pool.allocate(4)
    pool.recount()  # no slot has a holder
    assert pool.num_free == 9
    pool.check()
    assert pool.allocate(6).tolist() == list(range(6))


def test_unallocated_slots_cost_only_their_counts() -> None:
    pool = Pool(1 << 21)
    tracemalloc.start()
    try:
        assert pool.allocate(2).tolist() == [0, 1]
        pool.recount()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    array_nbytes = pool.ref_counts.nbytes + pool.slot_versions.nbytes
    assert peak < array_nbytes + 1.5 * pool.ref_counts.nbytes  # a recount needs a second array
    assert pool.num_free == pool.size == 1 << 21
