"""One sequence among many: its cache, what that may take, and who is at it.

A forward belongs to the thread that began it until every layer has its rows; the owner may hold the
sequence beyond that, for writing. Reading goes on beside a forward that is under way, but not while
rows are being stored. Who changes what is here holds the lock of the books.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from threading import Thread, current_thread

from kvant.cache import Cache

EVENTS = ("appends", "rewinds_exact", "rewinds_decoded", "abandoned", "recodes", "clamped")
BY_BACKEND = ("attended", "sealed")
COMING = -1  # in place of a number of changes: rows are on their way, but counted
UNSURE = -2  # it was weighed while its owner was changing it


@dataclass(eq=False)
class Sequence:
    """One of them: its cache, what that may take, and who is at it."""

    cache: Cache
    wanted: bool = False  # else it is forgotten if its first append fails
    nbytes: int = 0  # with rows that are on their way
    weighed: int = 0  # the `changes` of the cache that `nbytes` knows of
    length: int = 0  # when it was last asked for
    owner: Thread | None = None  # writes to it, or began a forward that is not whole yet
    holds: int = 0  # how many times, one within the other, the owner holds it for writing
    readers: int = 0

    @property
    def orphaned(self) -> bool:
        return self.owner is not None and not self.owner.is_alive()

    @property
    def mine(self) -> bool:
        return self.owner is current_thread()

    def readable(self) -> bool:
        return self.holds == 0 or self.mine or self.orphaned

    def writable(self) -> bool:
        free = self.owner is None or self.mine or self.orphaned
        return free and self.readers == 0

    def evictable(self) -> bool:
        return self.orphaned or (self.owner is None and self.cache.whole)

    def weigh(self) -> None:
        """Count what was done to the cache, by whomever."""
        still, changes = self.holds == 0 or self.mine, self.cache.changes
        if changes != self.weighed and (still or self.weighed != COMING):
            self.nbytes, self.weighed = self.cache.nbytes, changes if still else UNSURE

    def expect(self, more: int) -> None:
        """Count rows that are on their way."""
        self.nbytes += more
        self.weighed = COMING

    def arrive(self) -> None:
        """They are there; a commit may have let others go."""
        if not self.cache.whole:
            self.weighed = self.cache.changes

    @property
    def user(self) -> str:
        """Who is at it, in words."""
        return "a reader" if self.owner is None else f"thread {self.owner.name!r}"

    def events(self) -> Counter[str]:
        """What happened to its cache, for `stats()`."""
        stats = self.cache.stats()
        events = Counter({name: stats[name] for name in EVENTS})
        for kind in BY_BACKEND:
            events.update({f"{kind}.{name}": count for name, count in stats[kind].items()})
        return events

    def requested(self) -> Counter[str]:
        """Tokens of the request that ends here, and those of them that were there before it."""
        length = self.cache.length
        new = max(0, length - self.length)
        reused = self.length if new > 1 else 0
        return Counter(tokens_asked=new + reused, tokens_reused=reused)
