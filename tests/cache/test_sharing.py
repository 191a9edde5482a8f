"""Pages that several caches hold: who takes new ones, who copies, and who may write from where."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Thread
from typing import Any

import pytest
import torch

from cache.tagged import forward, rows, same, told
from kvant import Cache, merge
from kvant.cache.storage import Storage
from kvant.cache.tracker import StateTracker

SPECS = ("raw", "affine8", "affine4", "affine8,window=200,sinks=3")


def slots(cache: Cache) -> list[int]:
    """How many there are of each kind of pages, free or not."""
    return [pool.size for pools in cache._tracker.pools for pool in (pools.open, pools.sealed)]


def grown(text: str, count: int, num_layers: int = 2, **shape: int) -> Cache:
    cache = Cache(num_layers, text)
    forward(cache, count, **shape)
    return cache


@pytest.mark.parametrize("text", SPECS)
def test_a_fork_of_many_tokens_takes_no_page(text: str) -> None:
    cache = grown(text, 8192)
    before = slots(cache)
    twins = [cache.fork() for _ in range(5)]
    cache.select([0] * 7)
    assert slots(cache) == before
    assert [slots(twin) for twin in twins] == [before] * 5
    cache.check()


@pytest.mark.parametrize("text", ["raw", "affine8"])
def test_who_writes_copies_the_page_that_is_begun_and_no_other(text: str) -> None:
    cache = grown(text, 8192 + 7)
    before = slots(cache)
    twin = cache.fork()
    forward(twin, 1)
    assert [after - n for after, n in zip(slots(twin), before, strict=True)] == [1, 0]
    forward(twin, 1)
    forward(cache, 1)  # which holds the page alone by now
    assert [after - n for after, n in zip(slots(twin), before, strict=True)] == [1, 0]
    assert (told(cache[0])[-2:], told(twin[0])[-2:]) == ([8198, 8199], [8199, 8200])
    cache.check()


@pytest.mark.parametrize("text", ["raw", "affine8"])
def test_the_last_holder_of_a_page_appends_to_it_in_place(text: str) -> None:
    """Four continuations of an open page need four pages, also while they are copied."""
    cache = grown(text, 64 + 7)
    before = slots(cache)
    cache.select([0] * 4)
    forward(cache, 1, batch=4)
    assert [after - n for after, n in zip(slots(cache), before, strict=True)] == [3, 0]
    assert len({tuple(told(cache[0], which)) for which in range(4)}) == 4
    assert all(told(cache[1], which)[:71] == told(cache[1])[:71] for which in range(4))
    cache.check()


@pytest.mark.parametrize("text", ["raw", "affine8"])
def test_a_page_with_a_holder_elsewhere_is_copied_for_every_continuation(text: str) -> None:
    cache = grown(text, 64 + 7)
    before, twin = slots(cache), cache.fork()
    cache.select([0] * 4)
    forward(cache, 1, batch=4)
    assert [after - n for after, n in zip(slots(cache), before, strict=True)] == [4, 0]
    assert told(twin[0]) == list(range(71))
    cache.check()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_longest_holder_appends_in_place_and_a_dead_forward_takes_no_row(
    order: tuple[int, int],
) -> None:
    cache = grown("raw", 12)
    short = cache.fork()
    short.rewind(10)
    both = [short, cache]
    merged = merge([both[place] for place in order])
    before = slots(cache)
    del cache, short, both
    more = torch.cat([rows(500, 501), rows(600, 601)])
    merged[0].append(more, more)
    merged.rollback()
    forward(merged, 1, batch=2)
    assert [after - n for after, n in zip(slots(merged), before, strict=True)] == [1, 0]
    lengths = [(10, 12)[place] for place in order]
    for which, length in enumerate(lengths):
        found = told(merged[0], which)
        assert found[-length - 1 : -1] == list(range(length))
    merged.check()


def test_a_fork_at_the_end_of_a_page_copies_nothing() -> None:
    cache = grown("raw", 128)
    twin = cache.fork()
    forward(twin, 1)
    assert slots(twin) == [3, 0]


@pytest.mark.parametrize("text", SPECS)
def test_what_is_extracted_and_merged_again_takes_no_page(text: str) -> None:
    cache = grown(text, 300, batch=3)
    before = slots(cache)
    parts = [cache.extract(which) for which in (2, 0)]
    merged = merge(parts)
    assert slots(merged) == before
    assert [told(merged[1], which) for which in (0, 1)] == [told(cache[1], w) for w in (2, 0)]
    merged.check()


@pytest.mark.parametrize("text", SPECS)
def test_a_merge_of_caches_of_other_pools_copies_their_pages_once(text: str) -> None:
    one, other = grown(text, 300), grown(text, 200)
    merged = merge([one, other])
    assert merged.lengths == [300, 200]
    for _ in range(2):
        for which, cache in enumerate((one, other)):
            same(merged.extract(which).snapshot(), cache.snapshot())
            cache.check()
        merged.check()
        forward(one, 70)
        forward(other, 70)
        more = torch.cat([rows(300, 370), rows(200, 270)])
        for state in merged:
            state.append(more, more)


@pytest.mark.parametrize("text", SPECS)
def test_a_sequence_that_is_removed_leaves_its_pages(text: str) -> None:
    cache = grown(text, 300, batch=3)
    expected, before = [told(cache[0], which) for which in (0, 2)], slots(cache)
    cache.remove(1)
    assert [told(cache[0], which) for which in (0, 1)] == expected
    forward(cache, 100, batch=2)
    assert slots(cache) == before or "window" in text or "affine" in text
    cache.check()


@pytest.mark.parametrize("text", SPECS)
def test_threads_append_to_forks_of_one_cache(text: str) -> None:
    cache, steps = grown(text, 190), 150
    before, begin = cache.snapshot(), Barrier(2)

    def work(number: int, twin: Cache) -> list[list[int]]:
        begin.wait()
        for step in range(steps):
            tag = 1000 * number + step
            for state in twin:
                state.append(rows(tag, tag + 1), rows(tag, tag + 1))
        return [told(state) for state in twin]

    twins = [cache.fork() for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, (1, 2), twins))
    for number, layers in enumerate(found, 1):
        tail = list(range(1000 * number, 1000 * number + steps))
        assert [layer[-steps:] for layer in layers] == [tail] * 2
        assert [layer[-steps - 1] for layer in layers] == [189] * 2
    same(before, cache.snapshot())
    cache.check()


@pytest.mark.parametrize("text", ["raw", "affine8,window=100,sinks=0"])
def test_forks_go_while_others_are_written_to(text: str) -> None:
    """From whichever thread collects them, in the middle of whatever."""
    cache, rounds, begin = grown(text, 130), 60, Barrier(2)

    def fork_and_forget(source: Cache) -> None:
        begin.wait()
        for _ in range(rounds):
            twin = source.fork()
            forward(twin, 3)
            ring = [twin]
            ring.append(ring)  # type: ignore[arg-type]
            del twin, ring
            gc.collect(0)

    def write(twin: Cache) -> list[int]:
        begin.wait()
        for _ in range(3 * rounds):
            forward(twin, 1)
        return told(twin[1])

    with ThreadPoolExecutor(2) as pool:
        forgetting = pool.submit(fork_and_forget, cache.fork())
        found = pool.submit(write, cache.fork()).result(60)
        forgetting.result(60)
    assert found == list(range(130 + 3 * rounds))[-len(found) :]
    gc.collect()
    cache.check()
    forward(cache, 1)
    sizes = slots(cache)
    for _ in range(3):
        cache.fork()
    assert slots(cache) == sizes


def test_a_fork_may_go_while_all_are_asked_for_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = grown("raw", 130)
    forks = [cache.fork() for _ in range(9)]
    going: list[Cache] = []

    def asked(ledger: StateTracker) -> int:
        going.clear()
        number: int = ledger.__dict__["serial"]
        return number

    going.append(forks.pop(4))
    monkeypatch.setattr(StateTracker, "serial", property(asked), raising=False)
    forward(forks[0], 1)
    assert not going
    monkeypatch.undo()
    cache.check()
    assert told(cache[0]) == list(range(130)) and told(forks[0][0]) == list(range(131))


class Collecting(deque[Any]):
    """What holders left; the collector runs whenever `check` looks at it."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        self.looks += 1
        if self.looks > 1:  # at first, it is asked whose end was interrupted
            gc.collect()
        return super().__iter__()


def test_a_fork_that_is_collected_meanwhile_is_counted_once() -> None:
    cache = grown("raw", 130)
    ring: list[Any] = [cache.fork()]
    ring.append(ring)
    del ring
    for pools in cache._tracker.pools:
        for pool in (pools.open, pools.sealed):
            pool.orphaned_slots = Collecting()
    cache.check()
    gc.collect()
    cache.check()


class Meanwhile:
    """An action of another thread, tried once while this thread is in the middle of a call.

    It may have to wait until this one is through.
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


def test_others_wait_while_slots_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = grown("raw", 130)
    twin = cache.fork()
    other = Meanwhile(lambda: forward(twin, 300))
    slots_of = StateTracker.list_slots

    def asked(ledger: StateTracker, pool: Any) -> Any:
        other()
        return slots_of(ledger, pool)

    monkeypatch.setattr(StateTracker, "list_slots", asked)
    cache.check()
    other.end()
    cache.check()
    assert told(twin[0]) == list(range(430))


class Joined(set[int]):
    """Numbers of holders; another thread tries something just after one joined."""

    def __init__(self, numbers: set[int], other: Meanwhile) -> None:
        super().__init__(numbers)
        self.other = other

    def add(self, number: int) -> None:
        super().add(number)
        self.other()


def test_others_wait_while_a_cache_joins_its_new_pages() -> None:
    cache = grown("raw", 100)
    twin = cache.fork()
    other = Meanwhile(lambda: forward(cache, 70))
    pool = cache._tracker.pools[0].open
    pool.counted_holders = Joined(pool.counted_holders, other)
    twin.move("cpu")
    other.end()
    cache.check()
    assert (told(cache[0]), told(twin[0])) == (list(range(170)), list(range(100)))
    del twin
    cache.check()


def test_others_wait_while_a_cache_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = grown("affine8,tail=0", 100)
    twin = cache.fork()
    other = Meanwhile(lambda: forward(cache, 400))
    fit = Storage.ensure_slots

    def fitted(storage: Storage, opened: int, sealed: int) -> None:
        fit(storage, opened, sealed)
        if storage.geometry.device.type == "meta":
            other()

    monkeypatch.setattr(Storage, "ensure_slots", fitted)
    twin.move("meta")
    other.end()
    cache.check()
    assert twin.length == 100 and told(cache[1])[-1] == 499


class Freed(list[int]):
    """Free slots; another thread tries something as they are copied."""

    def __init__(self, slots: list[int], other: Meanwhile) -> None:
        super().__init__(slots)
        self.other = other

    def __iter__(self) -> Iterator[int]:
        self.other()
        return super().__iter__()


def test_others_wait_while_growth_is_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = grown("raw", 100)
    twin, more = cache.fork(), rows(100, 200)

    def grow() -> None:
        forked = cache.fork()
        forward(forked, 400)
        forked.reset()

    expected = twin[0].nbytes_after_append(more, more)
    pool = cache._tracker.pools[0].open
    pool._free_slots = Freed(pool._free_slots, Meanwhile(grow))
    other = pool._free_slots.other
    assert twin[0].nbytes_after_append(more, more) == expected
    other.end()
    cache.check()
