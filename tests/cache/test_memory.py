"""Memory is taken by whole pages, and what is reserved but not taken counts for nothing."""

from __future__ import annotations

import pytest
import torch

from cache.tagged import forward
from kvant import Cache

PAGE = 64 * 8 * 4 * 2  # bytes of 64 rows of keys and values, in float32, 8 wide


def taken(cache: Cache, *counts: int) -> list[int]:
    """Pages' worth of bytes after so many more tokens each."""
    found = []
    for count in counts:
        forward(cache, count)
        found.append(cache.nbytes // PAGE)
        assert cache.nbytes % PAGE == 0
    return found


def test_memory_grows_by_pages() -> None:
    assert taken(Cache(1, "raw"), 1, 62, 1, 1, 200, 300) == [1, 1, 1, 2, 5, 9]


def test_a_step_takes_several_pages_at_once() -> None:
    assert taken(Cache(1, "raw,step=256"), 1, 255, 1, 300) == [4, 4, 8, 12]


def test_a_capacity_takes_all_pages_at_once() -> None:
    assert taken(Cache(1, "raw,capacity=1000"), 1, 500) == [16, 16]


@pytest.mark.parametrize("window", [1, 64, 100, 500])
@pytest.mark.parametrize("slack", [0, 16])
def test_a_window_takes_what_is_kept_and_two_pages(window: int, slack: int) -> None:
    cache = Cache(1, f"raw,window={window},sinks=0,slack={slack}")
    most = -(-(window + slack) // 64) + 2
    assert max(taken(cache, *[1] * 700)) <= most
    assert max(taken(cache, 300, 1000, 64, 1)) <= most


@pytest.mark.parametrize("count", [16, 128, 256])
@pytest.mark.parametrize("form", ["affine8", "affine4", "turbo4"])
def test_a_small_compressed_cache_takes_at_most_a_page_more_than_raw(form: str, count: int) -> None:
    cache, raw = Cache(2, form), Cache(2, "raw")
    for one in (cache, raw):
        forward(one, count)
    assert cache.nbytes <= raw.nbytes + 2 * PAGE


def test_pages_that_several_caches_hold_are_there_once() -> None:
    cache = Cache(1, "raw")
    forward(cache, 640)
    twins = [cache.fork() for _ in range(3)]
    forward(twins[0], 1)
    assert [one.nbytes // PAGE for one in (cache, *twins)] == [10, 11, 10, 10]
    assert cache._tracker.pools[0].open.size == 11


def test_chunks_of_a_prompt_move_no_sealed_page() -> None:
    """Bug: what a chunk took was given back by copying all that there was, chunk by chunk."""
    cache = Cache(2, "affine4,prefill=stored")
    places = set()
    for _ in range(64):
        for layer in cache:
            layer.append(*torch.randn(2, 1, 2, 128, 32))
        places.add(cache[0].storage.sides["keys"].sealed["codes"].data_ptr())
    assert len(places) < 6  # memory grows by a factor
