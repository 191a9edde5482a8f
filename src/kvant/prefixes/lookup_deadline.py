"""Limit the time of a store lookup, and free its memory when it is cancelled."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from threading import Lock
from typing import Protocol, TypeVar

log = logging.getLogger("kvant")

STORE_TIMEOUT_S = 10.0  # seconds that a prompt waits for a store


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
