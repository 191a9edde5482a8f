"""Test that any behaviour of a store is a hit or a miss for its tiers, and is counted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvant.errors import CacheError
from kvant.stores import Blob, BlobPayload, Bytes, Tiers, pack_blob
from kvant.stores import tiers as module
from kvant.stores.tiers import CIRCUIT_OPEN_S, MAX_FAILURES_IN_A_ROW, BackgroundWriter

PAGE = "ab/" + "0" * 64
OTHER = "ab/" + "1" * 64


class DictStore:
    """A store in a dict that can be made to fail."""

    url = "shelf"

    def __init__(self, error: BaseException | None = None) -> None:
        self.blobs: dict[tuple[str, str], Bytes] = {}
        self.error = error
        self.calls = 0

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        self._called()
        return [frozenset(part for of, part in self.blobs if of == page) for page in pages]

    def get(self, page: str, part: str) -> Bytes | None:
        self._called()
        return self.blobs.get((page, part))

    def put(self, page: str, part: str, blob: Bytes) -> None:
        self._called()
        self.blobs.setdefault((page, part), blob)

    def drop(self, page: str, part: str) -> None:
        self._called()
        self.blobs.pop((page, part), None)

    def _called(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make_blob(page: str = PAGE, part: str = "k0-1") -> Blob:
    return Blob(page, part, OTHER, (1, 2), BlobPayload.from_fields({"0/keys": torch.ones(3)}))


def read_counts(tiers: Tiers, place: int = 0) -> dict[str, int]:
    """Return the nonzero counters of a store."""
    stats = tiers.stats()["stores"][place]
    return {name: count for name, count in stats.items() if name != "url" and count}


# ---- several stores


def test_nearest_store_is_read_first_and_filled_from_farther_ones() -> None:
    near, middle, far = DictStore(), DictStore(), DictStore()
    far.put(PAGE, "k0-1", pack_blob(make_blob()))
    tiers = Tiers([near, middle, far])
    assert tiers.get(PAGE, "k0-1") is not None
    assert tiers.writer.flush(60)
    assert near.blobs == middle.blobs == far.blobs
    num_calls = far.calls
    assert tiers.get(PAGE, "k0-1") is not None and far.calls == num_calls
    assert read_counts(tiers) == {"hits": 1, "misses": 1, "written": 1}
    assert read_counts(tiers, 2) == {"hits": 1}


def test_put_writes_to_all_stores() -> None:
    stores = [DictStore(), DictStore()]
    tiers = Tiers(stores)
    tiers.put(make_blob())
    assert [list(store.blobs) for store in stores] == [[(PAGE, "k0-1")]] * 2
    tiers.drop(PAGE, "k0-1")
    assert [list(store.blobs) for store in stores] == [[], []]


def test_parts_of_a_page_may_be_in_different_stores() -> None:
    stores = [DictStore(), DictStore()]
    stores[0].put(PAGE, "k0-1", b"x")
    stores[1].put(PAGE, "k1-1", b"x")
    stores[1].put(OTHER, "k0-2", b"x")
    assert Tiers(stores).has([PAGE, OTHER]) == [{"k0-1", "k1-1"}, {"k0-2"}]


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"no blob",
        pack_blob(make_blob())[:-1],
        pack_blob(make_blob(OTHER)),
        pack_blob(make_blob(PAGE, "k0-2")),
        pack_blob(make_blob(), b"of others"),
    ],
)
def test_corrupt_blob_is_dropped_and_the_next_store_is_read(wrong: Bytes) -> None:
    near, far = DictStore(), DictStore()
    near.put(PAGE, "k0-1", wrong)
    far.put(PAGE, "k0-1", pack_blob(make_blob()))
    tiers = Tiers([near, far])
    assert tiers.get(PAGE, "k0-1") is not None
    assert tiers.writer.flush(60)
    assert near.blobs == far.blobs
    assert read_counts(tiers) == {"damaged": 1, "written": 1} and read_counts(tiers, 1) == {
        "hits": 1
    }


@pytest.mark.parametrize(("writer", "reader"), [(b"a", b"b"), (b"a", None), (None, b"b")])
def test_another_secret_is_a_miss(writer: bytes | None, reader: bytes | None) -> None:
    store = DictStore()
    Tiers([store], writer).put(make_blob())
    tiers = Tiers([store], reader)
    assert tiers.get(PAGE, "k0-1") is None
    assert read_counts(tiers) == {"damaged": 1}


def test_empty_tiers_and_missing_secret_are_refused() -> None:
    with pytest.raises(CacheError, match="no stores"):
        Tiers([])
    with pytest.raises(CacheError, match="an empty secret"):
        Tiers([DictStore()], b"")


# ---- failing stores


@pytest.mark.parametrize(
    "error", [OSError(28, "full"), ValueError("x"), TimeoutError(), KeyError()]
)
def test_store_error_is_a_miss(error: Exception) -> None:
    bad, good = DictStore(error), DictStore()
    tiers = Tiers([bad, good])
    tiers.put(make_blob())
    assert tiers.has([PAGE, OTHER]) == [{"k0-1"}, frozenset()]
    assert tiers.get(PAGE, "k0-1") is not None
    tiers.drop(PAGE, "k0-1")
    assert tiers.get(PAGE, "k0-1") is None
    assert tiers.writer.flush(60)
    assert read_counts(tiers)["errors"] >= MAX_FAILURES_IN_A_ROW and "written" not in read_counts(
        tiers
    )
    single = Tiers([bad])
    assert single.has([PAGE, OTHER]) == [frozenset()] * 2 and single.get(PAGE, "k0-1") is None


def test_five_consecutive_failures_open_the_circuit(clock: Clock) -> None:
    store = DictStore(OSError("gone"))
    tiers = Tiers([store])
    for number in range(MAX_FAILURES_IN_A_ROW):
        assert not tiers.stats()["stores"][0]["resting"]
        assert tiers.get(PAGE, "k0-1") is None
        assert store.calls == number + 1
    expected = {
        "errors": MAX_FAILURES_IN_A_ROW,
        "misses": MAX_FAILURES_IN_A_ROW,
        "rests": 1,
        "resting": True,
    }
    assert read_counts(tiers) == expected
    clock.now += CIRCUIT_OPEN_S - 0.01
    for call in (
        lambda: tiers.has([PAGE]),
        lambda: tiers.get(PAGE, "k0-1"),
        lambda: tiers.put(make_blob()),
        lambda: tiers.drop(PAGE, "k0-1"),
    ):
        call()
    assert store.calls == MAX_FAILURES_IN_A_ROW and read_counts(tiers)["skipped"] == 4
    clock.now += 0.01
    tiers.get(PAGE, "k0-1")  # once more, and its circuit opens again
    assert store.calls == MAX_FAILURES_IN_A_ROW + 1 and read_counts(tiers)["rests"] == 2
    tiers.get(PAGE, "k0-1")
    assert store.calls == MAX_FAILURES_IN_A_ROW + 1
    clock.now += CIRCUIT_OPEN_S
    store.error = None
    tiers.put(make_blob())
    assert tiers.get(PAGE, "k0-1") is not None
    store.error = OSError("gone")
    tiers.get(PAGE, "k0-1")  # the first of five
    assert not tiers.stats()["stores"][0]["resting"]


def test_success_between_failures_resets_the_count(clock: Clock) -> None:
    store = DictStore()
    tiers = Tiers([store])
    for number in range(4 * MAX_FAILURES_IN_A_ROW):
        store.error = OSError("gone") if number % MAX_FAILURES_IN_A_ROW else None
        tiers.has([PAGE])
    assert "rests" not in read_counts(tiers)


def test_failed_writes_leave_a_store_readable(clock: Clock) -> None:
    """Regression: five refused writes of a full disk ended the reads of what it has."""
    store = DictStore()
    tiers = Tiers([store])
    tiers.put(make_blob())
    store.error = OSError(28, "full")
    for number in range(MAX_FAILURES_IN_A_ROW):
        tiers.put(make_blob(part=f"k0-{number + 2}"))
    assert read_counts(tiers)["rests"] == 1 and read_counts(tiers)["resting"]
    store.error = None
    assert tiers.has([PAGE]) == [{"k0-1"}] and tiers.get(PAGE, "k0-1") is not None
    calls = store.calls
    tiers.put(make_blob(part="k0-9"))
    assert store.calls == calls


# ---- unresponsive stores


class HangingStore(DictStore):
    """A store whose calls block until released."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = Event(), Event()

    def _called(self) -> None:
        super()._called()
        self.asked.set()
        assert self.go.wait(60)


def test_unresponsive_store_gets_no_further_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = HangingStore(), DictStore()
    tiers, results = Tiers([near, far]), list[Any]()
    tiers.stores[1].put(PAGE, "k0-1", pack_blob(make_blob()))
    thread = Thread(target=lambda: results.append(tiers.has([PAGE])), daemon=True)
    thread.start()
    assert near.asked.wait(60)
    assert "hanging" not in read_counts(tiers)
    monkeypatch.setattr(module, "HANG_TIMEOUT_S", 0.0)
    assert tiers.has([PAGE]) == [{"k0-1"}] and tiers.get(PAGE, "k0-1") is not None
    assert (near.calls, read_counts(tiers)["hanging"], read_counts(tiers)["resting"]) == (
        1,
        1,
        True,
    )
    assert read_counts(tiers)["skipped"] >= 2
    near.go.set()
    thread.join(60)
    assert results == [[{"k0-1"}]] and "hanging" not in read_counts(tiers)
    tiers.has([PAGE])
    assert near.calls > 1


def test_reads_do_not_wait_for_stalled_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HangingStore()
    tiers = Tiers([store])
    for _ in range(3):
        assert tiers.writer.add(10, lambda: [int(tiers.put(make_blob()))])
    assert store.asked.wait(60)
    assert not tiers.flush(0.01)
    monkeypatch.setattr(module, "HANG_TIMEOUT_S", 0.0)
    assert not tiers.flush()
    tiers.close()
    assert tiers.stats()["dropped"] == 2 and not tiers.writer.add(1, list[int])
    store.go.set()
    assert tiers.writer.flush(60)


def test_refused_blob_leaves_the_queue() -> None:
    tiers = Tiers([DictStore(OSError("no space left"))])
    assert tiers.writer.add(10, lambda: [int(tiers.put(make_blob()))])
    assert tiers.flush(60)
    assert (read_counts(tiers)["unwritten"], read_counts(tiers).get("written", 0)) == (1, 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_process_can_call_a_store_during_a_call_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the call of a thread that the child lacks was pending for ever."""
    store = HangingStore()
    tiers = Tiers([store])
    call = Thread(target=tiers.has, args=([PAGE],), daemon=True)
    call.start()
    assert store.asked.wait(60)
    monkeypatch.setattr(module, "HANG_TIMEOUT_S", 0.0)
    child = os.fork()
    if not child:
        try:
            store.go = Event()  # the parent may hold its lock
            store.go.set()
            tiers.has([PAGE])
            os._exit(0 if store.calls == 2 and not tiers.stores[0].hung_threads else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert tiers.stores[0].hung_threads  # the parent's call is still pending
    store.go.set()
    call.join(60)


# ---- background writes


def test_writes_go_on_after_a_thread_could_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    store, start = HangingStore(), Thread.start
    store.go.set()
    tiers, refused = Tiers([store]), RuntimeError("can't start new thread")

    def refuse(thread: Thread) -> None:
        raise refused

    monkeypatch.setattr(Thread, "start", refuse)
    assert not tiers.writer.add(1, lambda: [1])
    assert tiers.flush() and tiers.writer.stats() == {"nbytes_waiting": 0, "dropped": 1}
    monkeypatch.setattr(Thread, "start", start)
    assert tiers.writer.add(1, lambda: [1]) and tiers.flush()
    tiers.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_process_writes_in_a_thread_of_its_own() -> None:
    writer, done = BackgroundWriter(10), list[int]()
    assert writer.add(1, lambda: [1]) and writer.flush(60)
    child = os.fork()
    if not child:
        try:
            written = writer.add(1, lambda: [done.append(1) or 1]) and writer.flush(60)
            os._exit(0 if written and done and not writer.nbytes else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    writer.close(60)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_flush_ends_if_no_thread_can_write(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HangingStore()
    tiers = Tiers([store])
    tiers.writer.add(1, lambda: [len(tiers.has([PAGE]))])
    assert store.asked.wait(60)
    child = os.fork()
    if not child:
        try:

            def refuse(thread: Thread) -> None:
                raise RuntimeError("can't start new thread")

            monkeypatch.setattr(Thread, "start", refuse)
            os._exit(1 if tiers.flush() else 0)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    store.go.set()
    tiers.close(60)


class BlockedQueue:
    """A queue whose thread is blocked in its first call."""

    def __init__(self, limit: int, nbytes: int = 10) -> None:
        self.writer, self.done = BackgroundWriter(limit), list[Any]()
        self.go, self.begun = Event(), Event()
        assert self.writer.add(nbytes, self._first)
        assert self.begun.wait(60)

    def _first(self) -> list[int]:
        self.begun.set()
        assert self.go.wait(60)
        return [self.done.append("first") or 0]

    def add(self, nbytes: int, entry: Any) -> bool:
        return self.writer.add(nbytes, lambda: [self.done.append(entry) or 0])


def test_queue_is_bounded_in_bytes_and_ordered() -> None:
    queue = BlockedQueue(100, 40)
    assert queue.add(30, 1) and queue.add(30, 2)
    assert not queue.add(1, 3)
    assert queue.writer.stats() == {"nbytes_waiting": 100, "dropped": 1}
    queue.go.set()
    assert queue.writer.flush(60)
    assert queue.done == ["first", 1, 2]
    assert queue.writer.stats() == {"nbytes_waiting": 0, "dropped": 1}
    assert queue.add(100, 4) and queue.writer.flush(60) and queue.done[-1] == 4


def test_entry_larger_than_the_bound_is_queued_alone() -> None:
    queue = BlockedQueue(100, 1000)
    assert not queue.add(1, 1)
    queue.go.set()
    assert queue.writer.flush(60) and queue.done == ["first"]
    assert queue.add(1000, 2) and queue.writer.flush(60) and queue.done == ["first", 2]


def test_wait_times_out() -> None:
    queue = BlockedQueue(100)
    assert not queue.writer.flush(0.001)
    queue.go.set()
    assert queue.writer.flush(60)


def test_close_drains_the_queue_and_rejects_new_entries() -> None:
    queue = BlockedQueue(100)
    queue.add(1, 1)
    queue.go.set()
    queue.writer.close(60)
    assert queue.done == ["first", 1]
    assert not queue.add(1, 2)
    assert queue.writer.stats() == {"nbytes_waiting": 0, "dropped": 1}


def test_immediate_close_drops_the_queue() -> None:
    queue = BlockedQueue(100)
    queue.add(1, 1)
    queue.add(1, 2)
    queue.writer.close(0.001)
    assert queue.writer.stats() == {"nbytes_waiting": 10, "dropped": 2}
    queue.go.set()
    assert queue.writer.flush(60)
    assert queue.done == ["first"]
    assert queue.writer.stats() == {"nbytes_waiting": 0, "dropped": 2}
    queue.writer.close(60)


class ThreePieceWork:
    """Work of three pieces that signals when the first and the last of them are done."""

    def __init__(self) -> None:
        self.done, self.first, self.last = list[int](), Event(), Event()

    def __call__(self) -> Iterator[int]:
        for number in range(3):
            sum(range(10_000))
            self.done.append(number)
            self.first.set()
            yield 1
        self.last.set()


def test_writer_runs_part_time_until_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITER_CPU_SHARE", 1e-9)  # the first pause would last years
    monkeypatch.setattr(module, "IDLE_CPU_SHARE", 0.0)  # pretends that a forward is running
    writer, work = BackgroundWriter(10), ThreePieceWork()
    writer.add(1, work)
    assert work.first.wait(60) and not work.last.wait(0.1) and work.done == [0]
    assert writer.flush(60) and work.done == [0, 1, 2]


def test_writer_does_not_pause_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITER_CPU_SHARE", 1e-9)
    writer, work = BackgroundWriter(10), ThreePieceWork()
    writer.add(1, work)
    assert work.last.wait(60) and work.done == [0, 1, 2]


def test_background_error_does_not_stop_the_writer() -> None:
    queue = BlockedQueue(100)
    queue.writer.add(1, lambda: [{}["nothing"]])
    queue.add(1, 1)
    queue.go.set()
    assert queue.writer.flush(60) and queue.done == ["first", 1]


def test_an_unused_queue_closes() -> None:
    writer = BackgroundWriter(10)
    assert writer.flush(60)
    writer.close(60)
    assert not writer.add(1, list[int])
