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


class Held(Protocol):
    """What has memory."""

    def clear(self) -> None: ...


Some = TypeVar("Some", bound=Held)


class Waiting:
    """For how long somebody waits, and the memory that was taken for them; for any thread.

    Once they left, nothing is held for them any more, however late a store is.
    """

    def __init__(self, left: Callable[[], float] = lambda: math.inf) -> None:
        """`left` tells the seconds for which they wait."""
        self.until = math.inf  # a time by the monotonic clock at which it is too late anyway
        self.over = False  # did they leave?
        self._left = left
        self._lock = Lock()
        self._held: list[Held] = []

    def left(self) -> float:
        """The seconds for which they wait."""
        return 0.0 if self.over else min(self._left(), self.until - time.monotonic())

    def hold(self, take: Callable[[], Some]) -> Some | None:
        """Take memory for them; None where they left."""
        with self._lock:
            if self.over:
                return None
            self._held.append(held := take())
            return held

    def drop(self, held: Held) -> None:
        """That is not needed any more."""
        with self._lock:
            if held in self._held:
                self._held.remove(held)
                held.clear()

    def leave(self) -> None:
        """Wait no longer, and hold nothing."""
        with self._lock:
            self.over = True
            every, self._held = self._held, []
            for held in every:
                try:
                    held.clear()
                except Exception as error:  # whoever leaves goes on
                    told = repr(error)  # and whoever keeps the error keeps the memory
                    log.warning("what came of a prompt was not let go of: %s", told)
