"""Test pages shared by caches: allocation, copy on write, and in-place appends."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Thread
from typing import Any

import pytest
import torch

from cache.tagged import assert_same, forward, make_rows, read_tags
from kvant import Cache, merge
from kvant.cache.holder import StateHolder
from kvant.pages.storage import Storage

SPECS = ("raw", "affine8", "affine4", "affine8,window=200,sinks=3")


def count_slots(cache: Cache) -> list[int]:
    """Return the number of slots of each page type, free or not."""
    return [pool.size for pools in cache.state.pools for pool in (pools.open, pools.sealed)]


def make_cache(text: str, count: int, num_layers: int = 2, **shape: int) -> Cache:
    cache = Cache(num_layers, text)
    forward(cache, count, **shape)
    return cache


@pytest.mark.parametrize("text", SPECS)
def test_fork_of_many_tokens_allocates_no_page(text: str) -> None:
    cache = make_cache(text, 8192)
    before = count_slots(cache)
    forks = [cache.fork() for _ in range(5)]
    cache.select([0] * 7)
    assert count_slots(cache) == before
    assert [count_slots(clone) for clone in forks] == [before] * 5
    cache.state.pools.check()


@pytest.mark.parametrize("text", ["raw", "affine8"])
def test_write_copies_only_the_open_page(text: str) -> None:
    cache = make_cache(text, 8192 + 7)
    before = count_slots(cache)
    fork = cache.fork()
    forward(fork, 1)
    assert [after - n for after, n in zip(count_slots(fork), before, strict=True)] == [1, 0]
    forward(fork, 1)
    forward(cache, 1)  # the only holder by now
    assert [after - n for after, n in zip(count_slots(fork), before, strict=True)] == [1, 0]
    assert (read_tags(cache[0])[-2:], read_tags(fork[0])[-2:]) == ([8198, 8199], [8199, 8200])
    cache.state.pools.check()


@pytest.mark.parametrize("text", ["raw", "affine8"])
def test_last_holder_of_a_page_appends_in_place(text: str) -> None:
    """Four continuations of an open page need four pages, also while they are copied."""
    cache = make_cache(text, 64 + 7)
    before = count_slots(cache)
    cache.select([0] * 4)
    forward(cache, 1, batch=4)
    assert [after - n for after, n in zip(count_slots(cache), before, strict=True)] == [3, 0]
    assert len({tuple(read_tags(cache[0], index)) for index in range(4)}) == 4
    assert all(read_tags(cache[1], index)[:71] == read_tags(cache[1])[:71] for index in range(4))
    cache.state.pools.check()


@pytest.mark.parametrize("text", ["raw", "affine8"])
def test_page_with_another_holder_is_copied_for_every_continuation(text: str) -> None:
    cache = make_cache(text, 64 + 7)
    before, fork = count_slots(cache), cache.fork()
    cache.select([0] * 4)
    forward(cache, 1, batch=4)
    assert [after - n for after, n in zip(count_slots(cache), before, strict=True)] == [4, 0]
    assert read_tags(fork[0]) == list(range(71))
    cache.state.pools.check()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_longest_holder_appends_in_place_and_a_failed_forward_adds_no_row(
    order: tuple[int, int],
) -> None:
    cache = make_cache("raw", 12)
    short = cache.fork()
    short.rewind(10)
    holders = [short, cache]
    merged = merge([holders[place] for place in order])
    before = count_slots(cache)
    del cache, short, holders
    more = torch.cat([make_rows(500, 501), make_rows(600, 601)])
    merged[0].append(more, more)
    merged.rollback()
    forward(merged, 1, batch=2)
    assert [after - n for after, n in zip(count_slots(merged), before, strict=True)] == [1, 0]
    lengths = [(10, 12)[place] for place in order]
    for index, length in enumerate(lengths):
        tags = read_tags(merged[0], index)
        assert tags[-length - 1 : -1] == list(range(length))
    merged.state.pools.check()


def test_fork_at_a_page_boundary_copies_nothing() -> None:
    cache = make_cache("raw", 128)
    fork = cache.fork()
    forward(fork, 1)
    assert count_slots(fork) == [3, 0]


@pytest.mark.parametrize("text", SPECS)
def test_extract_and_merge_allocates_no_page(text: str) -> None:
    cache = make_cache(text, 300, batch=3)
    before = count_slots(cache)
    parts = [cache.extract(sequence) for sequence in (2, 0)]
    merged = merge(parts)
    assert count_slots(merged) == before
    assert [read_tags(merged[1], sequence) for sequence in (0, 1)] == [
        read_tags(cache[1], w) for w in (2, 0)
    ]
    merged.state.pools.check()


@pytest.mark.parametrize("text", SPECS)
def test_merge_across_pools_copies_pages_once(text: str) -> None:
    first, second = make_cache(text, 300), make_cache(text, 200)
    merged = merge([first, second])
    assert merged.lengths == [300, 200]
    for _ in range(2):
        for index, cache in enumerate((first, second)):
            assert_same(merged.extract(index).snapshot(), cache.snapshot())
            cache.state.pools.check()
        merged.state.pools.check()
        forward(first, 70)
        forward(second, 70)
        more = torch.cat([make_rows(300, 370), make_rows(200, 270)])
        for state in merged:
            state.append(more, more)


@pytest.mark.parametrize("text", SPECS)
def test_removed_sequence_releases_its_pages(text: str) -> None:
    cache = make_cache(text, 300, batch=3)
    expected, before = [read_tags(cache[0], sequence) for sequence in (0, 2)], count_slots(cache)
    cache.remove(1)
    assert [read_tags(cache[0], sequence) for sequence in (0, 1)] == expected
    forward(cache, 100, batch=2)
    assert count_slots(cache) == before or "window" in text or "affine" in text
    cache.state.pools.check()


@pytest.mark.parametrize("text", SPECS)
def test_threads_append_to_forks_of_one_cache(text: str) -> None:
    cache, steps = make_cache(text, 190), 150
    before, begin = cache.snapshot(), Barrier(2)

    def work(number: int, clone: Cache) -> list[list[int]]:
        begin.wait()
        for step in range(steps):
            tag = 1000 * number + step
            for state in clone:
                state.append(make_rows(tag, tag + 1), make_rows(tag, tag + 1))
        return [read_tags(state) for state in clone]

    forks = [cache.fork() for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, (1, 2), forks))
    for number, layers in enumerate(results, 1):
        tail = list(range(1000 * number, 1000 * number + steps))
        assert [layer[-steps:] for layer in layers] == [tail] * 2
        assert [layer[-steps - 1] for layer in layers] == [189] * 2
    assert_same(before, cache.snapshot())
    cache.state.pools.check()


@pytest.mark.parametrize("text", ["raw", "affine8,window=100,sinks=0"])
def test_forks_are_freed_while_others_are_written_to(text: str) -> None:
    """Any thread may collect them, in the middle of any operation."""
    cache, rounds, begin = make_cache(text, 130), 60, Barrier(2)

    def fork_and_forget(source: Cache) -> None:
        begin.wait()
        for _ in range(rounds):
            fork = source.fork()
            forward(fork, 3)
            ring = [fork]
            ring.append(ring)  # type: ignore[arg-type]
            del fork, ring
            gc.collect(0)

    def write(fork: Cache) -> list[int]:
        begin.wait()
        for _ in range(3 * rounds):
            forward(fork, 1)
        return read_tags(fork[1])

    with ThreadPoolExecutor(2) as pool:
        forgetting = pool.submit(fork_and_forget, cache.fork())
        tags = pool.submit(write, cache.fork()).result(60)
        forgetting.result(60)
    assert tags == list(range(130 + 3 * rounds))[-len(tags) :]
    gc.collect()
    cache.state.pools.check()
    forward(cache, 1)
    sizes = count_slots(cache)
    for _ in range(3):
        cache.fork()
    assert count_slots(cache) == sizes


def test_fork_may_be_freed_while_stats_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache("raw", 130)
    forks = [cache.fork() for _ in range(9)]
    dropped: list[Cache] = []

    def count_with_action(holder: StateHolder) -> int:
        dropped.clear()
        number: int = holder.__dict__["serial"]
        return number

    dropped.append(forks.pop(4))
    monkeypatch.setattr(StateHolder, "serial", property(count_with_action), raising=False)
    forward(forks[0], 1)
    assert not dropped
    monkeypatch.undo()
    cache.state.pools.check()
    assert read_tags(cache[0]) == list(range(130)) and read_tags(forks[0][0]) == list(range(131))


class CollectedSlots(deque[Any]):
    """Slots of dead holders; the collector runs whenever `check` reads them."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        self.looks += 1
        if self.looks > 1:  # the first read asks for the interrupted holder
            gc.collect()
        return super().__iter__()


def test_fork_collected_during_stats_is_counted_once() -> None:
    cache = make_cache("raw", 130)
    ring: list[Any] = [cache.fork()]
    ring.append(ring)
    del ring
    for pools in cache.state.pools:
        for pool in (pools.open, pools.sealed):
            pool.orphaned_slots = CollectedSlots()
    cache.state.pools.check()
    gc.collect()
    cache.state.pools.check()


class ConcurrentAction:
    """An action of another thread, tried once while this thread is inside a call.

    The other thread may have to wait until the call returns.
    """

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action
        self.threads: list[Thread] = []

    def __call__(self) -> None:
        if not self.threads:
            self.threads.append(Thread(target=self.action))
            self.threads[0].start()
            self.threads[0].join(0.3)

    def end(self) -> None:
        (thread,) = self.threads
        thread.join(60)
        assert not thread.is_alive()


def test_threads_wait_while_slots_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache("raw", 130)
    fork = cache.fork()
    other = ConcurrentAction(lambda: forward(fork, 300))
    slots_of = StateHolder.list_slots

    def check_with_action(holder: StateHolder, pool: Any) -> Any:
        other()
        return slots_of(holder, pool)

    monkeypatch.setattr(StateHolder, "list_slots", check_with_action)
    cache.state.pools.check()
    other.end()
    cache.state.pools.check()
    assert read_tags(fork[0]) == list(range(430))


class CountsWithAction(set[int]):
    """Holder counts; another thread runs an action just after one is registered."""

    def __init__(self, numbers: set[int], other: ConcurrentAction) -> None:
        super().__init__(numbers)
        self.other = other

    def add(self, number: int) -> None:
        super().add(number)
        self.other()


def test_threads_wait_while_a_cache_registers_its_new_pages() -> None:
    cache = make_cache("raw", 100)
    fork = cache.fork()
    other = ConcurrentAction(lambda: forward(cache, 70))
    pool = cache.state.pools[0].open
    pool.counted_holders = CountsWithAction(pool.counted_holders, other)
    second = fork.fork()
    other.end()
    cache.state.pools.check()
    assert (read_tags(cache[0]), read_tags(fork[0])) == (list(range(170)), list(range(100)))
    del fork, second
    cache.state.pools.check()


def test_threads_wait_while_a_cache_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache("affine8,tail=0", 100)
    fork = cache.fork()
    other = ConcurrentAction(lambda: forward(cache, 400))
    fit = Storage.ensure_slots

    def fit_and_act(storage: Storage, opened: int, sealed: int) -> None:
        fit(storage, opened, sealed)
        if storage.geometry.device.type == "meta":
            other()

    monkeypatch.setattr(Storage, "ensure_slots", fit_and_act)
    fork.move("meta")
    other.end()
    cache.state.pools.check()
    assert fork.length == 100 and read_tags(cache[1])[-1] == 499


class FreeSlotsWithAction(list[int]):
    """Free slots; another thread runs an action while they are copied."""

    def __init__(self, slots: list[int], other: ConcurrentAction) -> None:
        super().__init__(slots)
        self.other = other

    def __iter__(self) -> Iterator[int]:
        self.other()
        return super().__iter__()


def test_threads_wait_while_growth_is_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache("raw", 100)
    fork, more = cache.fork(), make_rows(100, 200)

    def grow() -> None:
        forked = cache.fork()
        forward(forked, 400)
        forked.reset()

    expected = fork[0].nbytes_after_append(more, more)
    pool = cache.state.pools[0].open
    pool._free_slots = FreeSlotsWithAction(pool._free_slots, ConcurrentAction(grow))
    other = pool._free_slots.other
    assert fork[0].nbytes_after_append(more, more) == expected
    other.end()
    cache.state.pools.check()


EXIT_SCRIPT = """
import torch
from kvant import Cache

cache = Cache(1)
cache[0].append(torch.zeros(1, 2, 70, 64), torch.zeros(1, 2, 70, 64))
torch.kept = cache  # outlives numpy
"""


def test_a_cache_that_outlives_numpy_is_silent_at_exit() -> None:
    run = [sys.executable, "-c", EXIT_SCRIPT]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Exception ignored" not in done.stderr, done.stderr
