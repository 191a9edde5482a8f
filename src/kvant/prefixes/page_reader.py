"""Read the missing pages of a prefix from a store: runs of consecutive pages, in parallel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from kvant.cache.page_set import PageId
from kvant.cache.restore_buffer import RestoreBuffer
from kvant.pages.storage import find_runs
from kvant.prefixes.lookup_deadline import LookupDeadline
from kvant.prefixes.threads import DaemonExecutor
from kvant.stores import Blob, BlobLayout

MAX_RESTORE_THREADS = 4  # for one prefix
MAX_RUN_PAGES, MAX_RUN_BYTES = 8, 32 << 20  # of a run, which is copied to the device at once
DEADLINE_POLL_S = 0.1  # seconds between checks of the deadline

PageRun = tuple[int, range]  # a layer group, and numbers of consecutive pages
GetPage = Callable[[PageId], "Blob | None"]  # a page from a store


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
