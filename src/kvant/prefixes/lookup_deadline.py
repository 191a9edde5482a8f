"""Somebody who waits for a store, and what is held for them meanwhile."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from threading import Lock
from typing import Protocol, TypeVar

log = logging.getLogger("kvant")

STORE_TIMEOUT_S = 10.0  # how long a prompt waits for a store at most


class Clearable(Protocol):
    """What has memory."""

    def clear(self) -> None: ...


ClearableT = TypeVar("ClearableT", bound=Clearable)


class LookupDeadline:
    """For how long somebody waits, and the memory that was taken for them; for any thread.

    Once they left, nothing is held for them any more, however late a store is.
    """

    def __init__(self, get_seconds_left: Callable[[], float] = lambda: math.inf) -> None:
        """`left` tells the seconds for which they wait."""
        self.end_time = math.inf  # a time by the monotonic clock at which it is too late anyway
        self.is_cancelled = False  # did they leave?
        self._get_seconds_left = get_seconds_left
        self._lock = Lock()
        self._allocations: list[Clearable] = []

    def compute_seconds_left(self) -> float:
        """The seconds for which they wait."""
        return (
            0.0
            if self.is_cancelled
            else min(self._get_seconds_left(), self.end_time - time.monotonic())
        )

    def allocate(self, make: Callable[[], ClearableT]) -> ClearableT | None:
        """Take memory for them; None where they left."""
        with self._lock:
            if self.is_cancelled:
                return None
            self._allocations.append(held := make())
            return held

    def release(self, allocation: Clearable) -> None:
        """That is not needed any more."""
        with self._lock:
            if allocation in self._allocations:
                self._allocations.remove(allocation)
                allocation.clear()

    def cancel(self) -> None:
        """Wait no longer, and hold nothing."""
        with self._lock:
            self.is_cancelled = True
            every, self._allocations = self._allocations, []
            for held in every:
                try:
                    held.clear()
                except Exception as error:  # whoever leaves goes on
                    told = repr(error)  # and whoever keeps the error keeps the memory
                    log.warning("what came of a prompt was not let go of: %s", told)
