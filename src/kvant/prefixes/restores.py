"""What restores took: how soon may a store have so many tokens here?"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

LATELY = 0.5  # the weight of the newest one beside those before
FORGIVEN = 1.5  # times as fast a store is taken to be when it was not asked


class Took(NamedTuple):
    tokens: float
    seconds: float

    def least(self, count: int) -> float:
        """What so many take at least: more take no less, and fewer no less a token."""
        return self.seconds * min(1.0, count / self.tokens)


class Restores:
    """What some lengths took, and what that says of others; for any number of threads.

    A few tokens that came slowly say nothing of how fast many would come: the time may be that of
    a connection. Many that came slowly say nothing of what one request costs. So each length
    bounds the others from below, and the largest bound is the estimate.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, Took] = {}  # by powers of two
        self._lock = Lock()

    def came(self, count: int, seconds: float) -> None:
        """So many tokens were there in so long."""
        new, size = Took(count, seconds), count.bit_length()
        with self._lock:
            old = self._by_size.get(size, new)
            mixed = (LATELY * a + (1 - LATELY) * b for a, b in zip(new, old, strict=True))
            self._by_size[size] = Took(*mixed)

    def late(self, count: int, seconds: float) -> None:
        """So many were not there in so long."""
        with self._lock:
            if self._least(count) < seconds:
                self._by_size[count.bit_length()] = Took(count, seconds)

    def least(self, count: int) -> float:
        """The seconds that so many will take at least; none, before anybody knows."""
        with self._lock:
            return self._least(count)

    def likely(self, count: int, seconds: float) -> bool:
        """Will so many tokens be there by then?

        Every no makes the next one less likely: what was slow once is tried again some day.
        """
        with self._lock:
            if self._least(count) <= seconds:
                return True
            for size, took in self._by_size.items():
                self._by_size[size] = took._replace(seconds=took.seconds / FORGIVEN)
            return False

    def _least(self, count: int) -> float:
        return max((took.least(count) for took in self._by_size.values()), default=0.0)
