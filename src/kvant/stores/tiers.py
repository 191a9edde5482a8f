"""Several stores as one, of which nothing can go wrong: they are read in order, and written behind.

Any failure is a miss: an error, a time that is up, bytes that are damaged, which are dropped. It is
counted, and nobody is told but `stats`. A store that failed five times in a row rests for half a
minute, and again if the next call fails, too. While a call is unanswered for long, a store gets no
others, and nothing waits for it. What is written waits in a queue that is bounded by
bytes; what does not fit is not written.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from threading import Condition, Thread, current_thread, get_ident
from typing import Any, TypeVar

from kvant.errors import BlobError, CacheError
from kvant.openmp import use_one_thread
from kvant.stores.blob import Blob, pack_blob, parse_named_blob
from kvant.stores.contract import Bytes, Store

log = logging.getLogger("kvant")

T = TypeVar("T")
Check = Callable[[Blob], None]  # raises a `BlobError` where a blob does not fit
Work = Callable[[], Iterable[int]]  # done as it is gone through: the bytes of each piece
MAX_FAILURES_IN_A_ROW = 5  # failures, after which a store rests
CIRCUIT_OPEN_S = 30.0  # seconds
UNANSWERED = 10.0  # seconds, after which a call is taken to hang
LOOK_AGAIN = 0.1  # seconds: how often it is looked whether one does
REMEMBERED = 1 << 12  # blobs that could not be dropped
MAX_QUEUED_BYTES = 256 << 20  # bytes of what is to be written, at most
WRITER_CPU_SHARE = 0.01  # of all processors' time, that is for writing while nobody waits for it
FULL_QUEUE_BOOST = (
    50.0  # times as much besides, where as much waits as may: else it would be dropped
)
CPU_POLL_S = 0.02  # seconds, after which it looks whether anybody computes
WRITER_NICE = 10  # more than others: it gets a tenth of what they get of a processor
IDLE_CPU_SHARE = 0.1  # of one processor: who takes less than that is not disturbed


class CircuitBreaker:
    """A store that never raises."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.counts: Counter[str] = Counter()
        self._damaged: set[tuple[str, str]] = set()  # blobs that could not be dropped
        # When each unanswered call began, by process and thread: a fork copies those of its parent.
        self._calls: dict[tuple[int, int], float] = {}
        self._failures_in_a_row = 0
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        return time.monotonic() < self._open_until or bool(self.hanging)

    @property
    def hanging(self) -> list[int]:
        """The threads whose calls are unanswered for so long that no more are made."""
        since, here = time.monotonic() - UNANSWERED, os.getpid()
        calls = [*self._calls.items()]
        return [thread for (pid, thread), began in calls if pid == here and began <= since]

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        found = self._attempt(lambda: self.store.has(pages)) or [frozenset()] * len(pages)
        if not self._damaged:
            return found
        return [
            frozenset(part for part in parts if (page, part) not in self._damaged)
            for page, parts in zip(pages, found, strict=True)
        ]

    def get(self, page: str, part: str, opens: Callable[[Bytes], T]) -> T | None:
        """What `opens` makes of a blob; None where it is missing, or damaged: then it is dropped.

        Where it cannot be dropped, it is not read again until it is written.
        """

        def read() -> T | None:
            data = self.store.get(page, part)
            return None if data is None else opens(data)

        found = None
        if (page, part) not in self._damaged:
            try:
                found = self._attempt(read)
            except BlobError as error:
                log.info("%s: %s %s: %s", self.store.url, page, part, error)
                self.counts["damaged"] += 1
                if not self.drop(page, part) and len(self._damaged) < REMEMBERED:
                    self._damaged.add((page, part))
                return None
        self.counts["misses" if found is None else "hits"] += 1
        return found

    def put(self, page: str, part: str, blob: Bytes) -> bool:
        def write() -> bool:
            self.store.put(page, part, blob)
            return True

        written = self._attempt(write) is not None
        self.counts["written" if written else "unwritten"] += 1
        if written:
            self._damaged.discard((page, part))
        return written

    def drop(self, page: str, part: str) -> bool:
        """Forget a blob; False where that failed."""

        def forget() -> bool:
            self.store.drop(page, part)
            return True

        return self._attempt(forget) is not None

    def _attempt(self, call: Callable[[], T]) -> T | None:
        """What a call gives; None where it fails."""
        if self.is_open:
            self.counts["skipped"] += 1
            return None
        caller = os.getpid(), get_ident()
        self._calls[caller] = time.monotonic()
        try:
            found = call()
        except BlobError:  # the store answered
            self._failures_in_a_row = 0
            raise
        except Exception as error:
            self.counts["errors"] += 1
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                self._open_until = time.monotonic() + CIRCUIT_OPEN_S
                self.counts["rests"] += 1
                log.warning("%s rests for %.0f seconds: %r", self.store.url, CIRCUIT_OPEN_S, error)
            else:
                log.info("%s: %r", self.store.url, error)
            return None
        finally:
            del self._calls[caller]
        self._failures_in_a_row = 0
        return found

    def stats(self) -> dict[str, Any]:
        names = ("hits", "misses", "written", "unwritten", "damaged", "errors", "skipped", "rests")
        told = {name: self.counts[name] for name in names}
        return {
            "url": self.store.url,
            **told,
            "hanging": len(self.hanging),
            "resting": self.is_open,
        }


class Tiers:
    """Stores, the nearest first; whoever reads from a far one writes to those before it."""

    def __init__(
        self,
        stores: Sequence[Store],
        secret: bytes | None = None,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        """With a `secret`, blobs of those who do not know it are as good as damaged."""
        if not stores:
            raise CacheError("a list of no stores: one or more are needed")
        if secret == b"":
            raise CacheError("a secret of no bytes is none")
        self.stores = tuple(CircuitBreaker(store) for store in stores)
        self.secret = secret
        self.writer = BackgroundWriter(max_queued_bytes)

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        """The parts that there are of each page."""
        found = self.stores[0].has(pages)
        for guarded in self.stores[1:]:
            found = [one | other for one, other in zip(found, guarded.has(pages), strict=True)]
        return found

    def get(self, page: str, part: str, check: Check | None = None) -> Blob | None:
        """The nearest blob whose checksum is right, and that passes a check; None: there is none.

        One that is wrong is dropped where it lies, and the next store is read.
        """

        def opens(data: Bytes) -> tuple[Blob, Bytes]:
            blob = parse_named_blob(page, part, data, self.secret)
            if check is not None:
                check(blob)
            return blob, data

        for place, guarded in enumerate(self.stores):
            found = guarded.get(page, part, opens)
            if found is None:
                continue
            blob, data = found
            if place:
                self.writer.add(len(data), partial(self._copy_to_nearer, page, part, data, place))
            return blob
        return None

    def put(self, blob: Blob) -> bool:
        """Write a blob to all of them, now; did they all take it?"""
        return self._write(blob.page, blob.part, pack_blob(blob, self.secret), len(self.stores))

    def drop(self, page: str, part: str) -> None:
        """Forget a blob."""
        for guarded in self.stores:
            guarded.drop(page, part)

    def flush(self, seconds: float | None = None) -> bool:
        """Write the queue for `seconds` at most; return whether nothing waits any more.

        A call of a store that is unanswered for `UNANSWERED` seconds ends the wait. A blob that
        a store refused waits no more: `stats` counts it in `unwritten`.
        """
        until = math.inf if seconds is None else time.monotonic() + seconds
        while not self.writer.flush(max(0.0, min(LOOK_AGAIN, until - time.monotonic()))):
            hanging = [one for one in self.stores if self.writer.thread in one.hanging]
            if hanging:
                log.warning("%s does not answer: it is not waited for", hanging[0].store.url)
            if hanging or time.monotonic() >= until or self.writer.thread == get_ident():
                return False
        return True

    def close(self, seconds: float | None = None) -> None:
        """Write the queue as `flush` does, drop the rest of it, and accept nothing more."""
        self.writer.end()
        self.flush(seconds)
        self.writer.close(0.0)

    def stats(self) -> dict[str, Any]:
        return {**self.writer.stats(), "stores": [guarded.stats() for guarded in self.stores]}

    def _copy_to_nearer(self, page: str, part: str, data: Bytes, num_stores: int) -> Iterable[int]:
        self._write(page, part, data, num_stores)
        yield len(data)

    def _write(self, page: str, part: str, data: Bytes, num_stores: int) -> bool:
        written = [guarded.put(page, part, data) for guarded in self.stores[:num_stores]]
        return all(written)


class BackgroundWriter:
    """A thread that does what nobody waits for, in order, while it fits into so many bytes.

    While others of its process compute it works a part of the time, to leave them the rest: a small
    one, and a larger one the more waits. On Linux it has a lower priority, too: threads that
    compute together wait for the one whose processor it takes. That alone would not do: who has
    little of a processor keeps the interpreter's lock while it waits for more.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._queue: list[tuple[int, Work]] = []
        self._num_waiters = 0  # how many wait for the end
        self._nbytes = 0  # of what waits, and of what is being done
        self._num_dropped = 0
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_closed = False

    def add(self, nbytes: int, work: Work) -> bool:
        """Do this later, piece by piece; False where it does not fit beside what waits."""
        with self._changed:
            if self._is_closed or (self._queue and self._nbytes + nbytes > self.max_bytes):
                self._num_dropped += 1
                return False
            self._queue.append((nbytes, work))
            self._nbytes += nbytes
            if self._thread is None:
                self._thread = Thread(target=self._run, name="kvant-store", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def flush(self, seconds: float | None = None) -> bool:
        """Wait for an empty queue, for `seconds` at most; return whether nothing waits any more."""
        if current_thread() is self._thread:  # it would wait for itself
            return False
        with self._changed:
            self._num_waiters += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._queue, seconds)
            finally:
                self._num_waiters -= 1

    def end(self) -> None:
        """Take nothing more; what waits is still done."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self, seconds: float | None = None) -> None:
        """Work on the queue for `seconds` at most, drop the rest of it, and accept nothing more."""
        self.end()
        self.flush(seconds)
        with self._changed:  # what is being done goes on
            self._num_dropped += len(self._queue[1:])
            self._nbytes -= sum(nbytes for nbytes, _ in self._queue[1:])
            del self._queue[1:]

    @property
    def thread(self) -> int | None:
        """The number of its thread; None before there is one."""
        return None if self._thread is None else self._thread.ident

    @property
    def nbytes(self) -> int:
        """Of what waits, and of what is being done."""
        with self._changed:
            return self._nbytes

    def stats(self) -> dict[str, int]:
        return {"nbytes_waiting": self.nbytes, "dropped": self._num_dropped}

    def _run(self) -> None:
        use_one_thread()
        if sys.platform == "linux":  # elsewhere it would be that of the whole process
            with suppress(OSError):  # somebody forbids it
                os.nice(WRITER_NICE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                nbytes, call = self._queue[0]
            try:
                for done in self._run_throttled(call):
                    nbytes -= self._record_written(min(done, nbytes))
            except Exception as error:
                told = repr(error)  # whoever keeps the error keeps what was to be written
                log.warning("it was not written: %s", told)
            with self._changed:
                del self._queue[0]
                self._nbytes -= nbytes
                self._changed.notify_all()
            del call  # and the pages that it holds

    def _run_throttled(self, work: Work) -> Iterable[int]:
        """Do one piece after the other, with pauses between while others compute."""
        worked = time.thread_time()
        for done in work():
            yield done
            share = min(
                1.0,
                WRITER_CPU_SHARE
                * (os.cpu_count() or 1)
                * (1 + FULL_QUEUE_BOOST * self._compute_backlog()),
            )
            self._pause((time.thread_time() - worked) * (1 / share - 1))
            worked = time.thread_time()

    def _pause(self, seconds: float) -> None:
        """So long, unless somebody waits for the end or nobody computes."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            begin, computed = time.monotonic(), time.process_time()
            with self._changed:
                if self._changed.wait_for(
                    lambda: self._num_waiters or self._is_closed, min(left, CPU_POLL_S)
                ):
                    return
            if time.process_time() - computed < IDLE_CPU_SHARE * (time.monotonic() - begin):
                return

    def _compute_backlog(self) -> float:
        """What waits behind that which is being done, as a part of what may wait."""
        with self._changed:
            return sum(nbytes for nbytes, _ in self._queue[1:]) / max(1, self.max_bytes)

    def _record_written(self, nbytes: int) -> int:
        with self._changed:
            self._nbytes -= nbytes
        return nbytes
