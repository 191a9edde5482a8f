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

from kvant.cache.arrival import Arrival
from kvant.cache.pieces import Page
from kvant.cache.storage import in_runs
from kvant.prefixes.threads import Daemons
from kvant.prefixes.waiting import Waiting
from kvant.stores import Blob, Layout

AT_ONCE = 4  # threads that read
RUN, RUN_BYTES = 8, 32 << 20  # pages that are put into memory at once, at most
LOOK = 0.1  # seconds: how often it is looked whether somebody still waits

Run = tuple[int, range]  # pages of a kind that follow one another
Get = Callable[[Page], "Blob | None"]  # a page from a store


class Reached(NamedTuple):
    """How far the pages go that were had."""

    length: int  # up to here, none is missing
    prompt: int  # of all tokens, so many at most were read as prompts


class Reading:
    """Pages that are missing of a text of so many tokens."""

    def __init__(
        self,
        arrival: Arrival,
        length: int,
        sizes: Sequence[int],
        layouts: Mapping[int, Layout],
        get: Get,
        device: torch.device,
    ) -> None:
        """`sizes` are the tokens of a page of each kind, and `get` gives such as lie so."""
        self.arrival = arrival
        self.length = length
        self.sizes = sizes
        self.layouts = layouts
        self.get = get
        self.device = device
        self.late = False  # did some come too late?

    def all(self, threads: Daemons, waiting: Waiting) -> Reached:
        """Put all into memory, in time, up to the first that is not had."""
        coming = iter(self._runs())

        def ask(count: int) -> Iterator[tuple[Run, Future[Reached]]]:
            for kind, numbers in islice(coming, count):
                yield (kind, numbers), threads.submit(self.put, kind, numbers)

        length = prompt = self.length
        asked = deque(ask(AT_ONCE + 1))
        try:
            while asked:
                (kind, numbers), future = asked.popleft()
                if numbers[0] * self.sizes[kind] >= length:
                    break
                reached = self._result(future, waiting)
                if reached is None:
                    reached = Reached(numbers[0] * self.sizes[kind], prompt)
                length, prompt = min(length, reached.length), min(prompt, reached.prompt)
                if not self.late:
                    asked += ask(1)
        finally:
            for _, future in asked:
                future.cancel()
        return Reached(length, prompt)

    def put(self, kind: int, numbers: range) -> Reached:
        """Put some into memory, up to the first that is not had."""
        layout, size, count, prompt = self.layouts[kind], self.sizes[kind], 0, self.length
        data = torch.empty(len(numbers), layout.nbytes, dtype=torch.uint8)
        for number in numbers:
            blob = self.get((kind, number))
            if blob is None:
                break
            data[count] = blob.payload.data
            count += 1
            if blob.prompt < (number + 1) * size:  # of all tokens, so many were read as prompts
                prompt = min(prompt, number * size)
        if count:
            self.arrival.put(kind, numbers[:count], layout.fields(data[:count].to(self.device)))
        return Reached(self.length if count == len(numbers) else numbers[count] * size, prompt)

    def _runs(self) -> list[Run]:
        """What is missing, in the order of positions."""
        found = [
            (kind, run)
            for kind, numbers in self.arrival.missing.items()
            for run in runs(
                numbers, min(RUN, max(1, RUN_BYTES // max(self.layouts[kind].nbytes, 1)))
            )
        ]
        return sorted(found, key=lambda run: (run[1][0] * self.sizes[run[0]], run[0]))

    def _result(self, future: Future[Reached], waiting: Waiting) -> Reached | None:
        """None where nobody waits any more."""
        while True:
            seconds = waiting.left()
            try:
                return future.result(min(max(seconds, 0.0), LOOK))
            except Late:
                if seconds <= 0:
                    self.late = True
                    return None


def runs(numbers: Iterable[int], most: int) -> Iterator[range]:
    """Numbers that follow one another, so many at most."""
    every = np.array(list(numbers), np.int64)
    for found, _ in in_runs(every, every):
        for begin in range(found.start, found.stop, most):
            yield range(begin, min(begin + most, found.stop))
