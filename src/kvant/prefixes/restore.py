"""Restore prefixes from a store in parallel, until a deadline, if a prefill would take longer.

RestoreTimes     before: is the restore expected to beat the prefill?
LookupDeadline   meanwhile: when the request gives up; frees the memory of a cancelled lookup
PageReader       the reading: runs of consecutive pages, in parallel
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from threading import Lock
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from kvant.cache.page_set import PageId
from kvant.cache.restore_buffer import RestoreBuffer
from kvant.pages.storage import find_runs
from kvant.prefixes.threads import DaemonExecutor
from kvant.stores import Blob, BlobLayout

log = logging.getLogger("kvant")

STORE_TIMEOUT_S = 10.0  # seconds that a prompt waits for a store
DEADLINE_POLL_S = 0.1  # seconds between checks of the deadline
TIME_SMOOTHING = 0.5  # weight of the newest time in the mean
RETRY_SPEEDUP = 1.5  # each skipped restore divides the estimated times by this
MAX_RESTORE_THREADS = 4  # for one prefix
MAX_RUN_PAGES, MAX_RUN_BYTES = 8, 32 << 20  # of a run, which is copied to the device at once

PageRun = tuple[int, range]  # a layer group, and numbers of consecutive pages
GetPage = Callable[[PageId], "Blob | None"]  # a page from a store


class TimedRestore(NamedTuple):
    """The mean size and time of some restores."""

    num_tokens: float
    seconds: float

    def bound_seconds(self, count: int) -> float:
        """Return a lower bound on the seconds to restore `count` tokens.

        Assume that a longer restore is not faster, and a shorter one not faster per token.
        """
        return self.seconds * min(1.0, count / self.num_tokens)


class RestoreTimes:
    """Lower bounds on restore times by length; for any number of threads.

    A short restore may only measure the latency of the store, and a long one only its bandwidth.
    So no measured length predicts the others, but each gives a lower bound on their times. The
    largest of these bounds is the estimate.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, TimedRestore] = {}  # by the bit length of the number of tokens
        self._lock = Lock()

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
            if self._bound_seconds(count) < seconds:
                self._by_size[count.bit_length()] = TimedRestore(count, seconds)

    def bound_seconds(self, count: int) -> float:
        """Return a lower bound on the seconds for `count` tokens; 0 before any measurement."""
        with self._lock:
            return self._bound_seconds(count)

    def can_restore_within(self, count: int, seconds: float) -> bool:
        """Return whether `count` tokens may be restored in `seconds`.

        Each False answer lowers the estimates, so that a store that was slow once is tried again.
        """
        with self._lock:
            if self._bound_seconds(count) <= seconds:
                return True
            for size, mean in self._by_size.items():
                self._by_size[size] = mean._replace(seconds=mean.seconds / RETRY_SPEEDUP)
            return False

    def _bound_seconds(self, count: int) -> float:
        return max((mean.bound_seconds(count) for mean in self._by_size.values()), default=0.0)


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
                    # Logged as text: a log handler may keep an error, whose traceback references
                    # the memory.
                    text = repr(error)
                    log.warning("memory of a cancelled lookup was not freed: %s", text)


class RestoreProgress(NamedTuple):
    """How many tokens of a prefix were read."""

    length: int  # no page before this length is missing
    num_prefilled: int  # first tokens that were prefilled, as far as the read pages tell


class PageReader:
    """A reader of the missing pages of a prefix of `length` tokens into a buffer."""

    def __init__(
        self,
        buffer: RestoreBuffer,
        length: int,
        page_sizes: Sequence[int],
        layouts: Mapping[int, BlobLayout],
        get_page: GetPage,
        device: torch.device,
    ) -> None:
        """`page_sizes` are in tokens, by layer group; `get_page` returns a checked blob or None."""
        self.buffer = buffer
        self.length = length
        self.page_sizes = page_sizes
        self.layouts = layouts
        self.get_page = get_page
        self.device = device
        self.is_late = False  # whether the deadline passed

    def read_all(self, executor: DaemonExecutor, deadline: LookupDeadline) -> RestoreProgress:
        """Read the missing pages; stop at the deadline or at the first that cannot be read."""
        runs = iter(self._list_runs())

        def submit(count: int) -> Iterator[tuple[PageRun, Future[RestoreProgress]]]:
            for group, numbers in islice(runs, count):
                yield (group, numbers), executor.submit(self.read_run, group, numbers)

        length = num_prefilled = self.length
        pending = deque(submit(MAX_RESTORE_THREADS + 1))
        try:
            while pending:
                (group, numbers), future = pending.popleft()
                begin = numbers[0] * self.page_sizes[group]
                if begin >= length:
                    break
                progress = self._await_result(future, deadline)
                if progress is None:
                    progress = RestoreProgress(begin, num_prefilled)
                length = min(length, progress.length)
                num_prefilled = min(num_prefilled, progress.num_prefilled)
                if not self.is_late:
                    pending += submit(1)
        finally:
            for _, future in pending:
                future.cancel()
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

    def _list_runs(self) -> list[PageRun]:
        """Return the runs of missing pages in the order of positions."""
        runs = []
        for group, numbers in self.buffer.missing_slots.items():
            max_pages = MAX_RUN_BYTES // max(self.layouts[group].nbytes, 1)
            max_pages = min(MAX_RUN_PAGES, max(1, max_pages))
            runs += [(group, run) for run in split_runs(numbers, max_pages)]
        return sorted(runs, key=lambda run: (run[1][0] * self.page_sizes[run[0]], run[0]))

    def _await_result(
        self, future: Future[RestoreProgress], deadline: LookupDeadline
    ) -> RestoreProgress | None:
        """Return the result of a run; None after the deadline."""
        while True:
            seconds = deadline.compute_seconds_left()
            try:
                return future.result(min(max(seconds, 0.0), DEADLINE_POLL_S))
            except TimeoutError:
                if seconds <= 0:
                    self.is_late = True
                    return None


def split_runs(numbers: Iterable[int], max_pages: int) -> Iterator[range]:
    """Split numbers into consecutive runs of at most `max_pages`."""
    array = np.array(list(numbers), np.int64)
    for run, _ in find_runs(array, array):
        for begin in range(run.start, run.stop, max_pages):
            yield range(begin, min(begin + max_pages, run.stop))
