"""Estimate the time to restore tokens from a store, from the times of earlier restores."""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

TIME_SMOOTHING = 0.5  # weight of the newest time in the mean
RETRY_SPEEDUP = 1.5  # each skipped restore divides the estimated times by this


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
