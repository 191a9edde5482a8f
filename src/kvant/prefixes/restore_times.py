"""What restores took: how soon may a store have so many tokens here?"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

TIME_SMOOTHING = 0.5  # the weight of the newest one beside those before
RETRY_SPEEDUP = 1.5  # times as fast a store is taken to be when it was not asked


class RestoreTime(NamedTuple):
    num_tokens: float
    seconds: float

    def bound_seconds(self, count: int) -> float:
        """What so many take at least: more take no less, and fewer no less a token."""
        return self.seconds * min(1.0, count / self.num_tokens)


class RestoreTimes:
    """What some lengths took, and what that says of others; for any number of threads.

    A few tokens that came slowly say nothing of how fast many would come: the time may be that of
    a connection. Many that came slowly say nothing of what one request costs. So each length
    bounds the others from below, and the largest bound is the estimate.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, RestoreTime] = {}  # by powers of two
        self._lock = Lock()

    def record_time(self, count: int, seconds: float) -> None:
        """So many tokens were there in so long."""
        new, size = RestoreTime(count, seconds), count.bit_length()
        with self._lock:
            old = self._by_size.get(size, new)
            mixed = (
                TIME_SMOOTHING * a + (1 - TIME_SMOOTHING) * b for a, b in zip(new, old, strict=True)
            )
            self._by_size[size] = RestoreTime(*mixed)

    def record_timeout(self, count: int, seconds: float) -> None:
        """So many were not there in so long."""
        with self._lock:
            if self._bound_seconds(count) < seconds:
                self._by_size[count.bit_length()] = RestoreTime(count, seconds)

    def bound_seconds(self, count: int) -> float:
        """The seconds that so many will take at least; none, before anybody knows."""
        with self._lock:
            return self._bound_seconds(count)

    def can_restore_within(self, count: int, seconds: float) -> bool:
        """Will so many tokens be there by then?

        Every no makes the next one less likely: what was slow once is tried again some day.
        """
        with self._lock:
            if self._bound_seconds(count) <= seconds:
                return True
            for size, took in self._by_size.items():
                self._by_size[size] = took._replace(seconds=took.seconds / RETRY_SPEEDUP)
            return False

    def _bound_seconds(self, count: int) -> float:
        return max((took.bound_seconds(count) for took in self._by_size.values()), default=0.0)
