"""The pages of a text on their way from a store into memory, some at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from kvant.cache.page_set import PageId
from kvant.cache.restore_buffer import RestoreBuffer
from kvant.cache.storage import find_runs
from kvant.prefixes.lookup_deadline import LookupDeadline
from kvant.prefixes.threads import Daemons
from kvant.stores import Blob, BlobLayout

MAX_RESTORE_THREADS = 4  # threads that read
MAX_RUN_PAGES, MAX_RUN_BYTES = 8, 32 << 20  # pages that are put into memory at once, at most
DEADLINE_POLL_S = 0.1  # seconds: how often it is looked whether somebody still waits

PageRun = tuple[int, range]  # pages of a kind that follow one another
GetPage = Callable[[PageId], "Blob | None"]  # a page from a store


class RestoreProgress(NamedTuple):
    """How far the pages go that were had."""

    length: int  # up to here, none is missing
    num_prefilled: int  # of all tokens, so many at most were read as prompts


class PageReader:
    """Pages that are missing of a text of so many tokens."""

    def __init__(
        self,
        buffer: RestoreBuffer,
        length: int,
        page_sizes: Sequence[int],
        layouts: Mapping[int, BlobLayout],
        get_page: GetPage,
        device: torch.device,
    ) -> None:
        """`sizes` are the tokens of a page of each kind, and `get` gives such as lie so."""
        self.buffer = buffer
        self.length = length
        self.page_sizes = page_sizes
        self.layouts = layouts
        self.get_page = get_page
        self.device = device
        self.is_late = False  # did some come too late?

    def read_all(self, executor: Daemons, deadline: LookupDeadline) -> RestoreProgress:
        """Put all into memory, in time, up to the first that is not had."""
        coming = iter(self._list_runs())

        def ask(count: int) -> Iterator[tuple[PageRun, Future[RestoreProgress]]]:
            for kind, numbers in islice(coming, count):
                yield (kind, numbers), executor.submit(self.read_run, kind, numbers)

        length = prompt = self.length
        asked = deque(ask(MAX_RESTORE_THREADS + 1))
        try:
            while asked:
                (kind, numbers), future = asked.popleft()
                if numbers[0] * self.page_sizes[kind] >= length:
                    break
                reached = self._await_result(future, deadline)
                if reached is None:
                    reached = RestoreProgress(numbers[0] * self.page_sizes[kind], prompt)
                length, prompt = min(length, reached.length), min(prompt, reached.num_prefilled)
                if not self.is_late:
                    asked += ask(1)
        finally:
            for _, future in asked:
                future.cancel()
        return RestoreProgress(length, prompt)

    def read_run(self, group: int, numbers: range) -> RestoreProgress:
        """Put some into memory, up to the first that is not had."""
        layout, size, count, prompt = self.layouts[group], self.page_sizes[group], 0, self.length
        data = torch.empty(len(numbers), layout.nbytes, dtype=torch.uint8)
        for number in numbers:
            blob = self.get_page((group, number))
            if blob is None:
                break
            data[count] = blob.payload.data
            count += 1
            if (
                blob.num_prefilled < (number + 1) * size
            ):  # of all tokens, so many were read as prompts
                prompt = min(prompt, number * size)
        if count:
            self.buffer.write_pages(
                group, numbers[:count], layout.view_fields(data[:count].to(self.device))
            )
        return RestoreProgress(
            self.length if count == len(numbers) else numbers[count] * size, prompt
        )

    def _list_runs(self) -> list[PageRun]:
        """What is missing, in the order of positions."""
        found = [
            (kind, run)
            for kind, numbers in self.buffer.missing_slots.items()
            for run in split_runs(
                numbers,
                min(MAX_RUN_PAGES, max(1, MAX_RUN_BYTES // max(self.layouts[kind].nbytes, 1))),
            )
        ]
        return sorted(found, key=lambda run: (run[1][0] * self.page_sizes[run[0]], run[0]))

    def _await_result(
        self, future: Future[RestoreProgress], deadline: LookupDeadline
    ) -> RestoreProgress | None:
        """None where nobody waits any more."""
        while True:
            seconds = deadline.compute_seconds_left()
            try:
                return future.result(min(max(seconds, 0.0), DEADLINE_POLL_S))
            except Late:
                if seconds <= 0:
                    self.is_late = True
                    return None


def split_runs(numbers: Iterable[int], max_pages: int) -> Iterator[range]:
    """Numbers that follow one another, so many at most."""
    every = np.array(list(numbers), np.int64)
    for found, _ in find_runs(every, every):
        for begin in range(found.start, found.stop, max_pages):
            yield range(begin, min(begin + max_pages, found.stop))
