"""Nothing goes wrong with tiers: whatever a store does is a hit or a miss, and counted."""

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


class Shelf:
    """A store in a dict, which can be told to fail."""

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


def blob(page: str = PAGE, part: str = "k0-1") -> Blob:
    return Blob(page, part, OTHER, (1, 2), BlobPayload.from_fields({"0/keys": torch.ones(3)}))


def counts(tiers: Tiers, place: int = 0) -> dict[str, int]:
    """What was counted of a store, without what was not."""
    stats = tiers.stats()["stores"][place]
    return {name: count for name, count in stats.items() if name != "url" and count}


# ---- several stores


def test_the_nearest_is_asked_first_and_gets_what_a_far_one_has() -> None:
    near, middle, far = Shelf(), Shelf(), Shelf()
    far.put(PAGE, "k0-1", pack_blob(blob()))
    tiers = Tiers([near, middle, far])
    assert tiers.get(PAGE, "k0-1") is not None
    assert tiers.writer.flush(60)
    assert near.blobs == middle.blobs == far.blobs
    asked = far.calls
    assert tiers.get(PAGE, "k0-1") is not None and far.calls == asked
    assert counts(tiers) == {"hits": 1, "misses": 1, "written": 1}
    assert counts(tiers, 2) == {"hits": 1}


def test_what_is_put_is_put_into_all() -> None:
    stores = [Shelf(), Shelf()]
    tiers = Tiers(stores)
    tiers.put(blob())
    assert [list(store.blobs) for store in stores] == [[(PAGE, "k0-1")]] * 2
    tiers.drop(PAGE, "k0-1")
    assert [list(store.blobs) for store in stores] == [[], []]


def test_parts_of_a_page_may_lie_in_several() -> None:
    stores = [Shelf(), Shelf()]
    stores[0].put(PAGE, "k0-1", b"x")
    stores[1].put(PAGE, "k1-1", b"x")
    stores[1].put(OTHER, "k0-2", b"x")
    assert Tiers(stores).has([PAGE, OTHER]) == [{"k0-1", "k1-1"}, {"k0-2"}]


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"no blob",
        pack_blob(blob())[:-1],
        pack_blob(blob(OTHER)),
        pack_blob(blob(PAGE, "k0-2")),
        pack_blob(blob(), b"of others"),
    ],
)
def test_what_is_damaged_is_dropped_and_the_next_one_is_asked(wrong: Bytes) -> None:
    near, far = Shelf(), Shelf()
    near.put(PAGE, "k0-1", wrong)
    far.put(PAGE, "k0-1", pack_blob(blob()))
    tiers = Tiers([near, far])
    assert tiers.get(PAGE, "k0-1") is not None
    assert tiers.writer.flush(60)
    assert near.blobs == far.blobs
    assert counts(tiers) == {"damaged": 1, "written": 1} and counts(tiers, 1) == {"hits": 1}


@pytest.mark.parametrize(("writer", "reader"), [(b"a", b"b"), (b"a", None), (None, b"b")])
def test_another_secret_is_a_miss(writer: bytes | None, reader: bytes | None) -> None:
    store = Shelf()
    Tiers([store], writer).put(blob())
    tiers = Tiers([store], reader)
    assert tiers.get(PAGE, "k0-1") is None
    assert counts(tiers) == {"damaged": 1}


def test_no_store_and_no_secret_are_refused() -> None:
    with pytest.raises(CacheError, match="no stores"):
        Tiers([])
    with pytest.raises(CacheError, match="a secret of no bytes"):
        Tiers([Shelf()], b"")


# ---- a store that fails


@pytest.mark.parametrize(
    "error", [OSError(28, "full"), ValueError("x"), TimeoutError(), KeyError()]
)
def test_an_error_of_a_store_is_a_miss(error: Exception) -> None:
    bad, good = Shelf(error), Shelf()
    tiers = Tiers([bad, good])
    tiers.put(blob())
    assert tiers.has([PAGE, OTHER]) == [{"k0-1"}, frozenset()]
    assert tiers.get(PAGE, "k0-1") is not None
    tiers.drop(PAGE, "k0-1")
    assert tiers.get(PAGE, "k0-1") is None
    assert tiers.writer.flush(60)
    assert counts(tiers)["errors"] >= MAX_FAILURES_IN_A_ROW and "written" not in counts(tiers)
    alone = Tiers([bad])
    assert alone.has([PAGE, OTHER]) == [frozenset()] * 2 and alone.get(PAGE, "k0-1") is None


def test_who_fails_five_times_in_a_row_rests(clock: Clock) -> None:
    store = Shelf(OSError("gone"))
    tiers = Tiers([store])
    for number in range(MAX_FAILURES_IN_A_ROW):
        assert not tiers.stats()["stores"][0]["resting"]
        assert tiers.get(PAGE, "k0-1") is None
        assert store.calls == number + 1
    told = {
        "errors": MAX_FAILURES_IN_A_ROW,
        "misses": MAX_FAILURES_IN_A_ROW,
        "rests": 1,
        "resting": True,
    }
    assert counts(tiers) == told
    clock.now += CIRCUIT_OPEN_S - 0.01
    for call in (
        lambda: tiers.has([PAGE]),
        lambda: tiers.get(PAGE, "k0-1"),
        lambda: tiers.put(blob()),
        lambda: tiers.drop(PAGE, "k0-1"),
    ):
        call()
    assert store.calls == MAX_FAILURES_IN_A_ROW and counts(tiers)["skipped"] == 4
    clock.now += 0.01
    tiers.get(PAGE, "k0-1")  # once more, and it rests again
    assert store.calls == MAX_FAILURES_IN_A_ROW + 1 and counts(tiers)["rests"] == 2
    tiers.get(PAGE, "k0-1")
    assert store.calls == MAX_FAILURES_IN_A_ROW + 1
    clock.now += CIRCUIT_OPEN_S
    store.error = None
    tiers.put(blob())
    assert tiers.get(PAGE, "k0-1") is not None
    store.error = OSError("gone")
    tiers.get(PAGE, "k0-1")  # the first of five
    assert not tiers.stats()["stores"][0]["resting"]


def test_what_succeeds_between_failures_counts(clock: Clock) -> None:
    store = Shelf()
    tiers = Tiers([store])
    for number in range(4 * MAX_FAILURES_IN_A_ROW):
        store.error = OSError("gone") if number % MAX_FAILURES_IN_A_ROW else None
        tiers.has([PAGE])
    assert "rests" not in counts(tiers)


# ---- a store that does not answer


class Hanging(Shelf):
    """A store whose calls end once it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = Event(), Event()

    def _called(self) -> None:
        super()._called()
        self.asked.set()
        assert self.go.wait(60)


def test_a_store_that_does_not_answer_gets_no_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = Hanging(), Shelf()
    tiers, found = Tiers([near, far]), list[Any]()
    tiers.stores[1].put(PAGE, "k0-1", pack_blob(blob()))
    asking = Thread(target=lambda: found.append(tiers.has([PAGE])), daemon=True)
    asking.start()
    assert near.asked.wait(60)
    assert "hanging" not in counts(tiers)
    monkeypatch.setattr(module, "UNANSWERED", 0.0)
    assert tiers.has([PAGE]) == [{"k0-1"}] and tiers.get(PAGE, "k0-1") is not None
    assert (near.calls, counts(tiers)["hanging"], counts(tiers)["resting"]) == (1, 1, True)
    assert counts(tiers)["skipped"] >= 2
    near.go.set()
    asking.join(60)
    assert found == [[{"k0-1"}]] and "hanging" not in counts(tiers)
    tiers.has([PAGE])
    assert near.calls > 1


def test_nothing_waits_for_a_store_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Hanging()
    tiers = Tiers([store])
    for _ in range(3):
        assert tiers.writer.add(10, lambda: [int(tiers.put(blob()))])
    assert store.asked.wait(60)
    assert not tiers.flush(0.01)
    monkeypatch.setattr(module, "UNANSWERED", 0.0)
    assert not tiers.flush()
    tiers.close()
    assert tiers.stats()["dropped"] == 2 and not tiers.writer.add(1, list[int])
    store.go.set()
    assert tiers.writer.flush(60)


def test_a_blob_that_a_store_refused_waits_no_more() -> None:
    tiers = Tiers([Shelf(OSError("no space left"))])
    assert tiers.writer.add(10, lambda: [int(tiers.put(blob()))])
    assert tiers.flush(60)
    assert (counts(tiers)["unwritten"], counts(tiers).get("written", 0)) == (1, 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_calls_a_store_during_a_call_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call of a thread that the child does not have was unanswered for ever."""
    store = Hanging()
    tiers = Tiers([store])
    call = Thread(target=tiers.has, args=([PAGE],), daemon=True)
    call.start()
    assert store.asked.wait(60)
    monkeypatch.setattr(module, "UNANSWERED", 0.0)
    child = os.fork()
    if not child:
        try:
            store.go = Event()  # the lock of the other one may be held
            store.go.set()
            tiers.has([PAGE])
            os._exit(0 if store.calls == 2 and not tiers.stores[0].hanging else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert tiers.stores[0].hanging  # that of the parent still is
    store.go.set()
    call.join(60)


# ---- behind


class Held:
    """A queue whose thread is in the middle of its first call."""

    def __init__(self, most: int, nbytes: int = 10) -> None:
        self.behind, self.done = BackgroundWriter(most), list[Any]()
        self.go, self.begun = Event(), Event()
        assert self.behind.add(nbytes, self._first)
        assert self.begun.wait(60)

    def _first(self) -> list[int]:
        self.begun.set()
        assert self.go.wait(60)
        return [self.done.append("first") or 0]

    def add(self, nbytes: int, what: Any) -> bool:
        return self.behind.add(nbytes, lambda: [self.done.append(what) or 0])


def test_what_waits_is_bounded_by_bytes_and_done_in_order() -> None:
    held = Held(100, 40)
    assert held.add(30, 1) and held.add(30, 2)
    assert not held.add(1, 3)
    assert held.behind.stats() == {"nbytes_waiting": 100, "dropped": 1}
    held.go.set()
    assert held.behind.flush(60)
    assert held.done == ["first", 1, 2]
    assert held.behind.stats() == {"nbytes_waiting": 0, "dropped": 1}
    assert held.add(100, 4) and held.behind.flush(60) and held.done[-1] == 4


def test_what_is_greater_than_the_bound_goes_alone() -> None:
    held = Held(100, 1000)
    assert not held.add(1, 1)
    held.go.set()
    assert held.behind.flush(60) and held.done == ["first"]
    assert held.add(1000, 2) and held.behind.flush(60) and held.done == ["first", 2]


def test_waiting_ends_after_its_time() -> None:
    held = Held(100)
    assert not held.behind.flush(0.001)
    held.go.set()
    assert held.behind.flush(60)


def test_who_closes_waits_for_what_waits_and_takes_no_more() -> None:
    held = Held(100)
    held.add(1, 1)
    held.go.set()
    held.behind.close(60)
    assert held.done == ["first", 1]
    assert not held.add(1, 2)
    assert held.behind.stats() == {"nbytes_waiting": 0, "dropped": 1}


def test_who_closes_in_a_hurry_drops_what_waits() -> None:
    held = Held(100)
    held.add(1, 1)
    held.add(1, 2)
    held.behind.close(0.001)
    assert held.behind.stats() == {"nbytes_waiting": 10, "dropped": 2}
    held.go.set()
    assert held.behind.flush(60)
    assert held.done == ["first"]
    assert held.behind.stats() == {"nbytes_waiting": 0, "dropped": 2}
    held.behind.close(60)


class Pieces:
    """Work of three pieces, which says when the first and the last of them are done."""

    def __init__(self) -> None:
        self.done, self.first, self.last = list[int](), Event(), Event()

    def __call__(self) -> Iterator[int]:
        for number in range(3):
            sum(range(10_000))
            self.done.append(number)
            self.first.set()
            yield 1
        self.last.set()


def test_it_works_a_part_of_the_time_until_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITER_CPU_SHARE", 1e-9)  # the first pause would take years
    monkeypatch.setattr(module, "IDLE_CPU_SHARE", 0.0)  # somebody computes, it is taken to be
    behind, work = BackgroundWriter(10), Pieces()
    behind.add(1, work)
    assert work.first.wait(60) and not work.last.wait(0.1) and work.done == [0]
    assert behind.flush(60) and work.done == [0, 1, 2]


def test_it_pauses_for_nobody_where_nobody_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITER_CPU_SHARE", 1e-9)
    behind, work = BackgroundWriter(10), Pieces()
    behind.add(1, work)
    assert work.last.wait(60) and work.done == [0, 1, 2]


def test_an_error_behind_ends_nothing() -> None:
    held = Held(100)
    held.behind.add(1, lambda: [{}["nothing"]])
    held.add(1, 1)
    held.go.set()
    assert held.behind.flush(60) and held.done == ["first", 1]


def test_an_unused_queue_closes() -> None:
    behind = BackgroundWriter(10)
    assert behind.flush(60)
    behind.close(60)
    assert not behind.add(1, list[int])
