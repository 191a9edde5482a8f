"""One sequence among many, and the table of all: who is in use, and what each may take."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from reprlib import repr as short
from threading import Condition, Thread, current_thread
from time import monotonic

from kvant.cache.cache import Cache
from kvant.errors import CacheError, CapacityError, UnknownSequence
from kvant.recipes import CacheSpec

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


POLL = 0.05  # seconds: a thread that dies tells nobody


class Books:
    """Sequences by name, the least recently used first."""

    def __init__(self, spec: CacheSpec, max_bytes: int | None, patience: float) -> None:
        self.spec = spec
        self.max_bytes = max_bytes
        self.patience = patience
        self._lock = Condition()  # told of each sequence that becomes free
        self._by_name: OrderedDict[Hashable, Sequence] = OrderedDict()
        self._past: Counter[str] = Counter()  # what happened to those that are gone

    def ids(self) -> list[Hashable]:
        with self._lock:
            return list(self._by_name)

    def find(self, name: Hashable) -> Sequence | None:
        return self._by_name.get(name)

    def living(self) -> tuple[list[Sequence], Counter[str]]:
        """All there are, and what happened to those that are gone."""
        with self._lock:
            return list(self._by_name.values()), self._past.copy()

    def nbytes(self) -> tuple[int, int]:
        """Bytes allocated, and those of rows, at one moment: nobody comes or goes meanwhile."""
        with self._lock:
            caches = [sequence.cache for sequence in self._by_name.values()]
            return sum(c.nbytes for c in caches), sum(c.nbytes_used for c in caches)

    def ask(self, name: Hashable) -> Cache:
        """The cache of a sequence that is asked for."""
        with self._lock:
            sequence = self._by_name.get(name) or self._begin(name)
            sequence.wanted = True
            self._end_request(sequence)
            self._use(name, sequence)
            return sequence.cache

    def clear(self, name: Hashable) -> None:
        with self._lock:
            sequence = self._free(name, Sequence.writable)
            if sequence is not None:
                self._end_request(sequence)
                sequence.cache.clear()
                sequence.length = 0
                self._settle(sequence)
            self._bring_under()

    def remove(self, name: Hashable) -> None:
        with self._lock:
            if self._free(name, Sequence.writable) is not None:
                self._forget(name)
            self._bring_under()

    @contextmanager
    def holding(self, name: Hashable) -> Iterator[Sequence]:
        """A sequence, a new one if need be, that no other thread is at."""
        me = current_thread()
        with self._lock:
            sequence = self._free(name, Sequence.writable) or self._begin(name)
            orphaned = sequence.orphaned
            sequence.holds = 1 if orphaned else sequence.holds + 1
            sequence.owner = me
        try:
            if orphaned:
                sequence.cache.rollback()
            yield sequence
        finally:
            with self._lock:
                if sequence.owner is me:  # and no other thread's, because this one had died
                    sequence.holds -= 1
                    self._settle(sequence)
                if not sequence.wanted and self._by_name.get(name) is sequence:
                    self._forget(name)

    @contextmanager
    def reading(self, name: Hashable) -> Iterator[Cache]:
        """The cache of a sequence in which nobody is storing rows."""
        with self._lock:
            sequence = self._free(name, Sequence.readable)
            if sequence is None:
                raise UnknownSequence(
                    f"sequence {short(name)} is not there: it never was, was removed, or was "
                    "evicted (max_bytes); append its rows first"
                )
            self._use(name, sequence)
            sequence.readers += 1
        try:
            yield sequence.cache
        finally:
            with self._lock:
                sequence.readers -= 1
                self._lock.notify_all()

    def use(self, name: Hashable, sequence: Sequence) -> None:
        """It is the last one used, and all of them are under the limit again."""
        with self._lock:
            self._use(name, sequence)

    def check_size(self, name: Hashable, sequence: Sequence) -> None:
        """Refuse one that outgrew the limit by itself; it is there, to be made smaller."""
        if self.max_bytes is not None and sequence.nbytes > self.max_bytes:
            raise CapacityError(self._refusal(name, sequence.nbytes))

    def make_room(self, name: Hashable, sequence: Sequence, more: int) -> None:
        """Count bytes that are to come; evict for them, or refuse and evict none."""
        with self._lock:
            over = self._over(more)
            victims = self._victims(sequence, over)
            if sum(self._by_name[victim].nbytes for victim in victims) < over:
                raise CapacityError(self._refusal(name, sequence.nbytes + more))
            self._evict(victims)
            sequence.expect(more)
            self._touch(name, sequence)

    # What follows is called with the lock held.

    def _begin(self, name: Hashable) -> Sequence:
        self._by_name[name] = sequence = Sequence(Cache(spec=self.spec))
        return sequence

    def _free(self, name: Hashable, free: Callable[[Sequence], bool]) -> Sequence | None:
        """A sequence once it is free for this thread; None where there is none."""
        deadline = monotonic() + self.patience
        while (sequence := self._by_name.get(name)) is not None and not free(sequence):
            left = deadline - monotonic()
            if left <= 0:
                raise CacheError(
                    f"sequence {short(name)} is not free after patience={self.patience} seconds: "
                    f"{sequence.user} is at it; let that end its forward or its `writing` block "
                    "(a forward that may raise belongs into one), or give more patience"
                )
            self._lock.wait(min(left, POLL))
        return sequence

    def _settle(self, sequence: Sequence) -> None:
        """Something was done to it; once it is whole and not held, anyone may write to it."""
        if self.max_bytes is not None:
            sequence.weigh()
        if sequence.holds == 0 and sequence.cache.whole:
            sequence.owner = None
        self._lock.notify_all()

    def _use(self, name: Hashable, sequence: Sequence) -> None:
        self._touch(name, sequence)
        self._bring_under(sequence)

    def _touch(self, name: Hashable, sequence: Sequence) -> None:
        if self._by_name.get(name) is sequence:  # not removed by the thread that holds it
            self._by_name.move_to_end(name)

    def _bring_under(self, sequence: Sequence | None = None) -> None:
        """Evict, other than this one, what direct use of the caches made too much."""
        self._evict(self._victims(sequence, self._over()))

    def _over(self, more: int = 0) -> int:
        """Bytes above the limit, with so many more."""
        if self.max_bytes is None:
            return 0
        for sequence in self._by_name.values():
            sequence.weigh()
        return sum(sequence.nbytes for sequence in self._by_name.values()) + more - self.max_bytes

    def _victims(self, spared: Sequence | None, over: int) -> list[Hashable]:
        """Who goes for so many bytes, or for as many of them as can be had."""
        victims: list[Hashable] = []
        if self.max_bytes is None or over <= 0:
            return victims
        limit = self.max_bytes
        free = [
            (name, sequence.nbytes)
            for name, sequence in self._by_name.items()
            if sequence.nbytes and sequence is not spared and sequence.evictable()
        ]
        free.sort(key=lambda pair: pair[1] <= limit)  # first what alone does not fit
        for name, nbytes in free:
            if over <= 0:
                break
            victims.append(name)
            over -= nbytes
        return victims

    def _evict(self, victims: list[Hashable]) -> None:
        for name in victims:
            self._forget(name)
            self._past["evictions"] += 1

    def _end_request(self, sequence: Sequence) -> None:
        self._past += sequence.requested()
        sequence.length = sequence.cache.length

    def _forget(self, name: Hashable) -> None:
        sequence = self._by_name.pop(name)
        self._past += sequence.events() + sequence.requested()
        self._lock.notify_all()

    def _refusal(self, name: Hashable, nbytes: int) -> str:
        held = sum(
            sequence.nbytes
            for other, sequence in self._by_name.items()
            if other != name and not sequence.evictable()
        )
        return (
            f"sequence {short(name)} needs {nbytes} bytes, and {held} are in others that are being "
            f"written, with max_bytes={self.max_bytes}: give more, a smaller format or a window, "
            "clear or remove a sequence, or write to fewer at a time"
        )
