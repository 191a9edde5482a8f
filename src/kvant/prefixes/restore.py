"""Parts of a restore from a store: time estimates, a deadline, parallel reads, daemon threads.

RestoreTimes     estimates whether a restore is faster than a prefill
LookupDeadline   says when the request gives up; frees the memory of a cancelled lookup
PageReader       reads runs of consecutive pages in parallel
start_daemon     runs a call that a store may block, in a daemon thread

A store that never answers must not keep a process alive. `concurrent.futures` would: it joins its
threads at exit without a timeout. The threads here are daemons, joined at exit for a short time
only. Without this join, exit could kill a thread inside torch, which aborts the process.
"""

from __future__ import annotations

import atexit
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock, RLock, Thread
from typing import NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import numpy as np
import torch

from kvant.cache.transfer import PageId, RestoreBuffer
from kvant.pages.storage import find_runs
from kvant.platform.c_libraries import use_one_thread
from kvant.stores import Blob, BlobLayout

log = logging.getLogger("kvant")

STORE_TIMEOUT_S = 10.0  # seconds that a prompt waits for a store
DEADLINE_POLL_S = 0.1  # seconds between checks of the deadline
TIME_SMOOTHING = 0.5  # weight of the newest time in the mean
RETRY_SPEEDUP = 1.5  # each skipped restore divides the estimated times by this
MAX_RESTORE_THREADS = 4  # for one prefix
JOIN_TIMEOUT_S = 0.5  # seconds that exit waits for all threads
MAX_RUN_PAGES, MAX_RUN_BYTES = 8, 32 << 20  # of a run, which is copied to the device in one call

T = TypeVar("T")
GetPage = Callable[[PageId], "Blob | None"]  # a checked page from a store


class TimedRestore(NamedTuple):
    """The mean size and time of some restores."""

    num_tokens: float
    seconds: float


class RestoreTimes:
    """Lower bounds on restore times by length; for any number of threads.

    A short restore may only measure the latency of the store, and a long one only its bandwidth.
    So the time of one length does not predict the times of others, but it bounds them from below.
    The largest of these bounds is the estimate.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, TimedRestore] = {}  # by the bit length of the number of tokens
        self._lock = RLock()

    def record_time(self, count: int, seconds: float) -> None:
        """Add a finished restore to the means."""
        new, size = TimedRestore(count, seconds), count.bit_length()
        with self._lock:
            mean = self._by_size.get(size, new)
            pairs = zip(new, mean, strict=True)
            smoothed = (TIME_SMOOTHING * a + (1 - TIME_SMOOTHING) * b for a, b in pairs)
            self._by_size[size] = TimedRestore(*smoothed)

    def record_timeout(self, count: int, seconds: float) -> None:
        """Raise the bound after a restore that did not finish in `seconds`."""
        with self._lock:
            if self.bound_seconds(count) < seconds:
                self._by_size[count.bit_length()] = TimedRestore(count, seconds)

    def bound_seconds(self, count: int) -> float:
        """Return a lower bound on the seconds for `count` tokens; 0 before any measurement.

        Assume that a longer restore takes no less time, and a shorter one no less per token.
        """
        with self._lock:
            means = self._by_size.values()
            bounds = [mean.seconds * min(1.0, count / mean.num_tokens) for mean in means]
            return max(bounds, default=0.0)

    def can_restore_within(self, count: int, seconds: float) -> bool:
        """Return whether `count` tokens may be restored in `seconds`.

        Each False answer lowers the estimates, so that a store that was slow once is tried again.
        """
        with self._lock:
            if self.bound_seconds(count) <= seconds:
                return True
            for size, mean in self._by_size.items():
                self._by_size[size] = mean._replace(seconds=mean.seconds / RETRY_SPEEDUP)
            return False


class Clearable(Protocol):
    """A cache or buffer that can free its memory."""

    def clear(self) -> None: ...


ClearableT = TypeVar("ClearableT", bound=Clearable)


class LookupDeadline:
    """The deadline of one store lookup, and the memory allocated for it; thread-safe.

    `cancel` frees this memory at once, even if the store never answers.
    """

    def __init__(self, get_seconds_left: Callable[[], float] = lambda: math.inf) -> None:
        """`get_seconds_left` returns the seconds that the request still waits."""
        self.end_time = math.inf  # monotonic seconds, at which a prefill would be done
        self.is_cancelled = False
        self._get_seconds_left = get_seconds_left
        self._lock = Lock()
        self._allocations: list[Clearable] = []

    def compute_seconds_left(self) -> float:
        """Return the seconds until the request gives up or `end_time`; 0 after a cancel."""
        if self.is_cancelled:
            return 0.0
        return min(self._get_seconds_left(), self.end_time - time.monotonic())

    def allocate(self, make: Callable[[], ClearableT]) -> ClearableT | None:
        """Allocate memory for the lookup; None after a cancel."""
        with self._lock:
            if self.is_cancelled:
                return None
            self._allocations.append(allocation := make())
            return allocation

    def release(self, allocation: Clearable) -> None:
        """Free an allocation, unless `cancel` already freed it."""
        with self._lock:
            if allocation in self._allocations:
                self._allocations.remove(allocation)
                allocation.clear()

    def cancel(self) -> None:
        """End the wait and free all allocations."""
        with self._lock:
            self.is_cancelled = True
            allocations, self._allocations = self._allocations, []
            for allocation in allocations:
                try:
                    allocation.clear()
                except Exception as error:  # the request continues
                    text = repr(error)  # a log handler may keep the error, and its traceback
                    log.warning("memory of a cancelled lookup was not freed: %s", text)


class RestoreProgress(NamedTuple):
    """How many tokens of a prefix were read."""

    length: int  # no page before this length is missing
    num_prefilled: int  # leading tokens that were prefilled, according to the pages read
    is_late: bool = False  # the deadline passed


@dataclass(frozen=True)
class PageReader:
    """Read the pages that a buffer for a prefix of `length` tokens still lacks."""

    buffer: RestoreBuffer
    length: int
    page_sizes: Sequence[int]  # in tokens, by layer group
    layouts: Mapping[int, BlobLayout]
    get_page: GetPage
    device: torch.device

    def read_all(self, deadline: LookupDeadline) -> RestoreProgress:
        """Read the missing pages; stop at the deadline or at the first that cannot be read."""
        runs = self._list_runs()
        futures = [Future[RestoreProgress]() for _ in runs]
        queue = deque(zip(runs, futures, strict=True))

        def read_runs() -> None:
            with suppress(IndexError):  # the queue is empty
                while True:
                    run, future = queue.popleft()
                    _complete(future, partial(self.read_run, *run))

        length = num_prefilled = self.length
        try:
            if runs:
                start_daemon(read_runs, "kvant-restore")
            with suppress(RuntimeError):  # no more threads allowed: the running ones suffice
                for _ in runs[1:MAX_RESTORE_THREADS]:
                    start_daemon(read_runs, "kvant-restore")
            for (group, numbers), future in zip(runs, futures, strict=True):
                begin = numbers[0] * self.page_sizes[group]
                if begin >= length:
                    break
                progress = _await_result(future, deadline)
                if progress is None:
                    return RestoreProgress(begin, num_prefilled, is_late=True)
                length = min(length, progress.length)
                num_prefilled = min(num_prefilled, progress.num_prefilled)
        finally:
            queue.clear()
        return RestoreProgress(length, num_prefilled)

    def read_run(self, group: int, numbers: range) -> RestoreProgress:
        """Read a run of pages; stop at the first that cannot be read."""
        layout, size, count = self.layouts[group], self.page_sizes[group], 0
        num_prefilled = self.length
        data = torch.empty(len(numbers), layout.nbytes, dtype=torch.uint8)
        for number in numbers:
            blob = self.get_page((group, number))
            if blob is None:
                break
            data[count] = blob.payload.data
            count += 1
            if blob.num_prefilled < (number + 1) * size:  # the page has decoded tokens
                num_prefilled = min(num_prefilled, number * size)
        if count:
            fields = layout.view_fields(data[:count].to(self.device))
            self.buffer.write_pages(group, numbers[:count], fields)
        length = self.length if count == len(numbers) else numbers[count] * size
        return RestoreProgress(length, num_prefilled)

    def _list_runs(self) -> list[tuple[int, range]]:
        """Return runs of consecutive missing pages, and their groups, in the order of positions."""
        runs = []
        for group, slots_by_number in self.buffer.missing_slots.items():
            max_pages = MAX_RUN_BYTES // max(self.layouts[group].nbytes, 1)
            max_pages = min(MAX_RUN_PAGES, max(1, max_pages))
            numbers = np.array(list(slots_by_number), np.int64)
            for run, _ in find_runs(numbers, numbers):  # slice(first page number, last + 1)
                for begin in range(run.start, run.stop, max_pages):
                    runs.append((group, range(begin, min(begin + max_pages, run.stop))))
        return sorted(runs, key=lambda run: (run[1][0] * self.page_sizes[run[0]], run[0]))


def _await_result(
    future: Future[RestoreProgress], deadline: LookupDeadline
) -> RestoreProgress | None:
    """Return the result of a run; None after the deadline."""
    while True:
        seconds = deadline.compute_seconds_left()
        try:
            return future.result(min(max(seconds, 0.0), DEADLINE_POLL_S))
        except TimeoutError:
            if seconds <= 0:
                return None


_threads: WeakSet[Thread] = WeakSet()


def start_daemon(call: Callable[[], T], name: str) -> Future[T]:
    """Run a call in a new daemon thread, in which torch computes single-threaded."""
    future: Future[T] = Future()

    def run() -> None:
        use_one_thread()
        _complete(future, call)

    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    _threads.add(thread)
    return future


def _complete(future: Future[T], call: Callable[[], T]) -> None:
    """Run a call, and set its result or its error on the future."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


@atexit.register
def _join() -> None:
    end_time = time.monotonic() + JOIN_TIMEOUT_S
    for thread in [*_threads]:
        thread.join(max(0.0, end_time - time.monotonic()))
