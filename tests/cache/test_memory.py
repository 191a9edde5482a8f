"""Test that memory is allocated in whole pages, and that reserved memory is not counted."""

from __future__ import annotations

import pytest
import torch

from cache.tagged import forward
from kvant import Cache

PAGE = 64 * 8 * 4 * 2  # bytes of 64 rows of keys and values, in float32, 8 wide


def list_allocations(cache: Cache, *counts: int) -> list[int]:
    """Return the pages allocated after each number of new tokens."""
    pages = []
    for count in counts:
        forward(cache, count)
        pages.append(cache.nbytes // PAGE)
        assert cache.nbytes % PAGE == 0
    return pages


def test_memory_grows_by_pages() -> None:
    assert list_allocations(Cache(1, "raw"), 1, 62, 1, 1, 200, 300) == [1, 1, 1, 2, 5, 9]


def test_step_allocates_several_pages_at_once() -> None:
    assert list_allocations(Cache(1, "raw,step=256"), 1, 255, 1, 300) == [4, 4, 8, 12]


def test_capacity_allocates_all_pages_at_once() -> None:
    assert list_allocations(Cache(1, "raw,capacity=1000"), 1, 500) == [16, 16]


@pytest.mark.parametrize("window", [1, 64, 100, 500])
@pytest.mark.parametrize("slack", [0, 16])
def test_window_allocates_its_rows_plus_two_pages(window: int, slack: int) -> None:
    cache = Cache(1, f"raw,window={window},sinks=0,slack={slack}")
    expected_pages = -(-(window + slack) // 64) + 2
    assert max(list_allocations(cache, *[1] * 700)) <= expected_pages
    assert max(list_allocations(cache, 300, 1000, 64, 1)) <= expected_pages


@pytest.mark.parametrize("count", [16, 128, 256])
@pytest.mark.parametrize("form", ["affine8", "affine4", "turbo4"])
def test_small_compressed_cache_needs_at_most_a_page_more_than_raw(form: str, count: int) -> None:
    cache, raw = Cache(2, form), Cache(2, "raw")
    for cache_ in (cache, raw):
        forward(cache_, count)
    assert cache.nbytes <= raw.nbytes + 2 * PAGE


def test_pages_shared_by_caches_are_counted_once() -> None:
    cache = Cache(1, "raw")
    forward(cache, 640)
    forks = [cache.fork() for _ in range(3)]
    forward(forks[0], 1)
    assert [copy_.nbytes // PAGE for copy_ in (cache, *forks)] == [10, 11, 10, 10]
    assert cache.state.pools[0].open.size == 11


def test_prefill_chunks_move_no_sealed_page() -> None:
    """Regression: pages of a chunk were freed by copying the whole cache for every chunk."""
    cache = Cache(2, "affine4,prefill=stored")
    places = set()
    for _ in range(64):
        for layer in cache:
            layer.append(*torch.randn(2, 1, 2, 128, 32))
        places.add(cache[0].storage.sides["keys"].sealed["codes"].data_ptr())
    assert len(places) < 6  # memory grows by a factor
