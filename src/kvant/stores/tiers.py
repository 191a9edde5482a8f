"""Combine stores into tiers: read the nearest first, write in the background, and never raise.

Every failure is a miss: an error, a timeout, or a corrupt blob, which is dropped. Failures are
logged and counted in `stats`. After five failed reads in a row, a store is skipped for half a
minute, and for another if the next read fails. After five failed writes in a row, only writes to it
are skipped: a full disk can still be read. A store is also skipped while a call has no answer for
ten seconds. Writes are queued up to a limit of bytes; a write that does not fit is dropped.
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
from kvant.platform.c_libraries import use_one_thread
from kvant.stores.blob import Blob, pack_blob, parse_named_blob
from kvant.stores.contract import Bytes, Store

log = logging.getLogger("kvant")

T = TypeVar("T")
Check = Callable[[Blob], None]  # raises a `BlobError` where a blob does not fit
Work = Callable[[], Iterable[int]]  # a generator; yields the number of bytes of each piece
MAX_FAILURES_IN_A_ROW = 5  # then the circuit is open
CIRCUIT_OPEN_S = 30.0
HANG_TIMEOUT_S = 10.0  # after which an unanswered call counts as hung
HANG_POLL_S = 0.1  # between checks for hung calls
MAX_CORRUPT_BLOBS = 1 << 12  # names of corrupt blobs that could not be dropped
MAX_QUEUED_BYTES = 256 << 20
WRITER_CPU_SHARE = 0.01  # of all CPU time, while other threads compute
FULL_QUEUE_BOOST = 50.0  # a full queue multiplies this share by 1 + 50
CPU_POLL_S = 0.02  # between checks whether other threads compute
WRITER_NICE = 10  # about a tenth of the time of a normal thread
IDLE_CPU_SHARE = 0.1  # of one processor: a process below it counts as idle


class Circuit:
    """Opens for a while after several failures in a row: calls are skipped."""

    def __init__(self) -> None:
        self._failures_in_a_row = 0
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        return time.monotonic() < self._open_until

    def record_success(self) -> None:
        self._failures_in_a_row = 0

    def record_failure(self) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            self._open_until = time.monotonic() + CIRCUIT_OPEN_S


class CircuitBreaker:
    """A wrapper that turns failures of a store into misses, and skips it after several."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.counts: Counter[str] = Counter()
        self._corrupt: set[tuple[str, str]] = set()  # blobs that could not be dropped
        # Start of each open call, by process and thread: os.fork copies the calls of the parent.
        self._calls: dict[tuple[int, int], float] = {}
        self._reads, self._writes = Circuit(), Circuit()

    @property
    def hung_threads(self) -> list[int]:
        """Threads whose calls are unanswered for `HANG_TIMEOUT_S`."""
        latest, process = time.monotonic() - HANG_TIMEOUT_S, os.getpid()
        calls = [*self._calls.items()]
        return [thread for (pid, thread), start in calls if pid == process and start <= latest]

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        """Return the stored parts of each page; none if the store fails."""
        [parts_of] = self._attempt(self._reads, lambda: self.store.has(pages)) or (
            [frozenset()] * len(pages),
        )
        if not self._corrupt:
            return parts_of
        return [
            frozenset(part for part in parts if (page, part) not in self._corrupt)
            for page, parts in zip(pages, parts_of, strict=True)
        ]

    def get(self, page: str, part: str, parse: Callable[[Bytes], T]) -> T | None:
        """Return a parsed blob; None if it is missing or corrupt.

        A corrupt blob is dropped. If that fails, it is not read again until it is written.
        """

        def read() -> T | None:
            data = self.store.get(page, part)
            return None if data is None else parse(data)

        parsed = None
        if (page, part) not in self._corrupt:
            try:
                [parsed] = self._attempt(self._reads, read) or (None,)
            except BlobError as error:
                log.info("%s: %s %s: %s", self.store.url, page, part, error)
                self.counts["damaged"] += 1
                if not self.drop(page, part) and len(self._corrupt) < MAX_CORRUPT_BLOBS:
                    self._corrupt.add((page, part))
                return None
        self.counts["misses" if parsed is None else "hits"] += 1
        return parsed

    def put(self, page: str, part: str, blob: Bytes) -> bool:
        """Store a blob; return whether that succeeded."""
        written = self._attempt(self._writes, lambda: self.store.put(page, part, blob)) is not None
        self.counts["written" if written else "unwritten"] += 1
        if written:
            self._corrupt.discard((page, part))
        return written

    def drop(self, page: str, part: str) -> bool:
        """Delete a blob; return whether that succeeded."""
        return self._attempt(self._writes, lambda: self.store.drop(page, part)) is not None

    def _attempt(self, circuit: Circuit, call: Callable[[], T]) -> tuple[T] | None:
        """Return the result of a call as a tuple; None if it failed or was skipped.

        A BlobError is raised.
        """
        if self._reads.is_open or circuit.is_open or self.hung_threads:
            self.counts["skipped"] += 1
            return None
        caller = os.getpid(), get_ident()
        self._calls[caller] = time.monotonic()
        try:
            result = call()
        except BlobError:  # the store answered
            circuit.record_success()
            raise
        except Exception as error:
            self.counts["errors"] += 1
            circuit.record_failure()
            if circuit.is_open:
                self.counts["rests"] += 1
                log.warning(
                    "%s: skipped for %.0f seconds: %r", self.store.url, CIRCUIT_OPEN_S, error
                )
            else:
                log.info("%s: %r", self.store.url, error)
            return None
        finally:
            del self._calls[caller]
        circuit.record_success()
        return (result,)

    def stats(self) -> dict[str, Any]:
        names = ("hits", "misses", "written", "unwritten", "damaged", "errors", "skipped", "rests")
        return {
            "url": self.store.url,
            **{name: self.counts[name] for name in names},
            "hanging": len(self.hung_threads),
            "resting": self._reads.is_open or self._writes.is_open or bool(self.hung_threads),
        }


class Tiers:
    """Stores as one, nearest first; a read from a far store is copied to the nearer ones."""

    def __init__(
        self,
        stores: Sequence[Store],
        secret: bytes | None = None,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        """With a `secret`, blobs that were written without it count as corrupt."""
        if not stores:
            raise CacheError("no stores given: one or more are needed")
        if secret == b"":
            raise CacheError("an empty secret protects nothing: give one, or None")
        self.stores = tuple(CircuitBreaker(store) for store in stores)
        self.secret = secret
        self.writer = BackgroundWriter(max_queued_bytes)

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        """Return the parts of each page that any store has."""
        parts_of = self.stores[0].has(pages)
        for store in self.stores[1:]:
            parts_of = [a | b for a, b in zip(parts_of, store.has(pages), strict=True)]
        return parts_of

    def get(self, page: str, part: str, check: Check | None = None) -> Blob | None:
        """Return the nearest valid blob that passes `check`; None if no store has one.

        A blob that fails is dropped from its store, and the next store is read.
        """

        def parse(data: Bytes) -> tuple[Blob, Bytes]:
            blob = parse_named_blob(page, part, data, self.secret)
            if check is not None:
                check(blob)
            return blob, data

        for index, store in enumerate(self.stores):
            parsed = store.get(page, part, parse)
            if parsed is None:
                continue
            blob, data = parsed
            if index:
                self.writer.add(len(data), partial(self._copy_to_nearer, page, part, data, index))
            return blob
        return None

    def put(self, blob: Blob) -> bool:
        """Write a blob to all stores now; return whether all succeeded."""
        return self._write(blob.page, blob.part, pack_blob(blob, self.secret), len(self.stores))

    def drop(self, page: str, part: str) -> None:
        """Delete a blob from all stores."""
        for store in self.stores:
            store.drop(page, part)

    def flush(self, seconds: float | None = None) -> bool:
        """Wait for queued writes, for `seconds` at most; return whether the queue is empty.

        A call that is unanswered for `HANG_TIMEOUT_S` ends the wait. A failed write leaves the
        queue: `stats` counts it in `unwritten`.
        """
        end_time = math.inf if seconds is None else time.monotonic() + seconds
        while not self.writer.flush(max(0.0, min(HANG_POLL_S, end_time - time.monotonic()))):
            hung = [store for store in self.stores if self.writer.thread in store.hung_threads]
            if hung:
                log.warning("%s does not answer: writes stay pending", hung[0].store.url)
            if hung or time.monotonic() >= end_time or not self.writer.can_flush:
                return False
        return True

    def close(self, seconds: float | None = None) -> None:
        """Flush the queue as `flush` does, drop what is left, and accept no more writes."""
        self.writer.stop_accepting()
        self.flush(seconds)
        self.writer.close(0.0)

    def stats(self) -> dict[str, Any]:
        return {**self.writer.stats(), "stores": [store.stats() for store in self.stores]}

    def _copy_to_nearer(self, page: str, part: str, data: Bytes, num_stores: int) -> Iterable[int]:
        self._write(page, part, data, num_stores)
        yield len(data)

    def _write(self, page: str, part: str, data: Bytes, num_stores: int) -> bool:
        written = [store.put(page, part, data) for store in self.stores[:num_stores]]
        return all(written)


class BackgroundWriter:
    """A background thread with a queue of works, bounded in bytes.

    While other threads of the process compute, it works a small share of the time, and a larger
    one the fuller the queue is. On Linux it also has a lower priority: a parallel computation waits
    for its slowest thread, the one that shares a processor with the writer. Priority alone is not
    enough: while the writer waits for a processor, it may hold the interpreter's lock.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._queue: list[tuple[int, Work]] = []
        self._num_waiters = 0  # threads in flush()
        self._nbytes = 0  # queued and in progress
        self._num_dropped = 0
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_closed = False

    def add(self, nbytes: int, work: Work) -> bool:
        """Queue work; return False if it does not fit in the queue, or no thread can start."""
        with self._changed:
            is_full = bool(self._queue) and self._nbytes + nbytes > self.max_bytes
            if self._is_closed or is_full or not self._start_thread():
                self._num_dropped += 1
                return False
            self._queue.append((nbytes, work))
            self._nbytes += nbytes
            self._changed.notify_all()
            return True

    def flush(self, seconds: float | None = None) -> bool:
        """Wait for an empty queue, for `seconds` at most; return whether it is empty."""
        if current_thread() is self._thread:  # would wait for itself
            return False
        with self._changed:
            if self._queue and not self._start_thread():
                return False
            self._num_waiters += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._queue, seconds)
            finally:
                self._num_waiters -= 1

    def stop_accepting(self) -> None:
        """Accept no more work; queued work is still done."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self, seconds: float | None = None) -> None:
        """Flush the queue for `seconds` at most, drop what is left, and accept no more work."""
        self.stop_accepting()
        self.flush(seconds)
        with self._changed:  # work in progress is not interrupted
            self._num_dropped += len(self._queue[1:])
            self._nbytes -= sum(nbytes for nbytes, _ in self._queue[1:])
            del self._queue[1:]

    def _start_thread(self) -> bool:
        """Start the thread unless it runs; return False if the system refuses one.

        A forked process has no threads of its parent.
        """
        if self._thread is not None and self._thread.is_alive():
            return True
        thread = Thread(target=self._run, name="kvant-store", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("store writes cannot run: %s", error)
            return False
        self._thread = thread
        self._nbytes = sum(nbytes for nbytes, _ in self._queue)  # all of a work is done again
        return True

    @property
    def can_flush(self) -> bool:
        """Whether the thread runs, and is not the one that asks."""
        thread = self._thread
        return thread is not None and thread.is_alive() and thread is not current_thread()

    @property
    def thread(self) -> int | None:
        """Identifier of the thread; None before the first work."""
        return None if self._thread is None else self._thread.ident

    @property
    def nbytes(self) -> int:
        """Bytes queued and in progress."""
        with self._changed:
            return self._nbytes

    def stats(self) -> dict[str, int]:
        return {"nbytes_waiting": self.nbytes, "dropped": self._num_dropped}

    def _run(self) -> None:
        use_one_thread()
        if sys.platform == "linux":  # elsewhere it would apply to the whole process
            with suppress(OSError):  # not permitted
                os.nice(WRITER_NICE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                nbytes, work = self._queue[0]
            try:
                for piece_nbytes in self._run_throttled(work):
                    written = min(piece_nbytes, nbytes)
                    nbytes -= written
                    with self._changed:
                        self._nbytes -= written
            except Exception as error:
                text = repr(error)  # a handler may store the error, and with it the data
                log.warning("a store write failed: %s", text)
            with self._changed:
                del self._queue[0]
                self._nbytes -= nbytes
                self._changed.notify_all()
            del work  # frees the pages that it references

    def _run_throttled(self, work: Work) -> Iterable[int]:
        """Do work piece by piece, with pauses while other threads compute."""
        cpu_time = time.thread_time()
        for piece_nbytes in work():
            yield piece_nbytes
            with self._changed:  # queued bytes after the current work, as a fraction of the limit
                backlog = sum(nbytes for nbytes, _ in self._queue[1:]) / max(1, self.max_bytes)
            boost = 1 + FULL_QUEUE_BOOST * backlog
            share = min(1.0, WRITER_CPU_SHARE * (os.cpu_count() or 1) * boost)
            self._pause((time.thread_time() - cpu_time) * (1 / share - 1))
            cpu_time = time.thread_time()

    def _pause(self, seconds: float) -> None:
        """Wait, unless a thread flushes the queue or the process is idle."""
        end_time = time.monotonic() + seconds
        while (left := end_time - time.monotonic()) > 0:
            begin, cpu_time = time.monotonic(), time.process_time()
            with self._changed:
                if self._changed.wait_for(
                    lambda: self._num_waiters or self._is_closed, min(left, CPU_POLL_S)
                ):
                    return
            elapsed = time.monotonic() - begin
            if time.process_time() - cpu_time < IDLE_CPU_SHARE * elapsed:
                return
