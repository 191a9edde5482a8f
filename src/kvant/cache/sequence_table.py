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

EVENT_STATS = ("appends", "rewinds_exact", "rewinds_decoded", "abandoned", "recodes", "clamped")
BACKEND_STATS = ("attended", "sealed")
APPEND_PENDING = -1  # in place of a number of changes: rows are on their way, but counted
MEASURED_DURING_WRITE = -2  # it was weighed while its owner was changing it


@dataclass(eq=False)
class SequenceEntry:
    """One of them: its cache, what that may take, and who is at it."""

    cache: Cache
    is_persistent: bool = False  # else it is forgotten if its first append fails
    nbytes: int = 0  # with rows that are on their way
    measured_changes: int = 0  # the `changes` of the cache that `nbytes` knows of
    request_length: int = 0  # when it was last asked for
    owner: Thread | None = None  # writes to it, or began a forward that is not whole yet
    lock_depth: int = 0  # how many times, one within the other, the owner holds it for writing
    num_readers: int = 0

    @property
    def is_orphaned(self) -> bool:
        return self.owner is not None and not self.owner.is_alive()

    @property
    def is_owned_by_caller(self) -> bool:
        return self.owner is current_thread()

    def can_read(self) -> bool:
        return self.lock_depth == 0 or self.is_owned_by_caller or self.is_orphaned

    def can_write(self) -> bool:
        free = self.owner is None or self.is_owned_by_caller or self.is_orphaned
        return free and self.num_readers == 0

    def can_evict(self) -> bool:
        return self.is_orphaned or (self.owner is None and self.cache.is_complete)

    def measure(self) -> None:
        """Count what was done to the cache, by whomever."""
        still, changes = self.lock_depth == 0 or self.is_owned_by_caller, self.cache.num_changes
        if changes != self.measured_changes and (still or self.measured_changes != APPEND_PENDING):
            self.nbytes, self.measured_changes = (
                self.cache.nbytes,
                changes if still else MEASURED_DURING_WRITE,
            )

    def add_pending_bytes(self, nbytes: int) -> None:
        """Count rows that are on their way."""
        self.nbytes += nbytes
        self.measured_changes = APPEND_PENDING

    def confirm_append(self) -> None:
        """They are there; a commit may have let others go."""
        if not self.cache.is_complete:
            self.measured_changes = self.cache.num_changes

    @property
    def user_name(self) -> str:
        """Who is at it, in words."""
        return "a reader" if self.owner is None else f"thread {self.owner.name!r}"

    def count_events(self) -> Counter[str]:
        """What happened to its cache, for `stats()`."""
        stats = self.cache.stats()
        events = Counter({name: stats[name] for name in EVENT_STATS})
        for kind in BACKEND_STATS:
            events.update({f"{kind}.{name}": count for name, count in stats[kind].items()})
        return events

    def count_request_tokens(self) -> Counter[str]:
        """Tokens of the request that ends here, and those of them that were there before it."""
        length = self.cache.length
        new = max(0, length - self.request_length)
        reused = self.request_length if new > 1 else 0
        return Counter(tokens_asked=new + reused, tokens_reused=reused)


POLL_INTERVAL_S = 0.05  # seconds: a thread that dies tells nobody


class SequenceTable:
    """Sequences by name, the least recently used first."""

    def __init__(self, spec: CacheSpec, max_bytes: int | None, patience: float) -> None:
        self.spec = spec
        self.max_bytes = max_bytes
        self.patience = patience
        self._lock = Condition()  # told of each sequence that becomes free
        self._entries: OrderedDict[Hashable, SequenceEntry] = OrderedDict()
        self._past_counts: Counter[str] = Counter()  # what happened to those that are gone

    def list_ids(self) -> list[Hashable]:
        with self._lock:
            return list(self._entries)

    def find(self, name: Hashable) -> SequenceEntry | None:
        return self._entries.get(name)

    def list_entries(self) -> tuple[list[SequenceEntry], Counter[str]]:
        """All there are, and what happened to those that are gone."""
        with self._lock:
            return list(self._entries.values()), self._past_counts.copy()

    def measure_bytes(self) -> tuple[int, int]:
        """Bytes allocated, and those of rows, at one moment: nobody comes or goes meanwhile."""
        with self._lock:
            caches = [sequence.cache for sequence in self._entries.values()]
            return sum(c.nbytes for c in caches), sum(c.nbytes_used for c in caches)

    def get_or_create(self, name: Hashable) -> Cache:
        """The cache of a sequence that is asked for."""
        with self._lock:
            sequence = self._entries.get(name) or self._create(name)
            sequence.is_persistent = True
            self._end_request(sequence)
            self._mark_used(name, sequence)
            return sequence.cache

    def clear(self, name: Hashable) -> None:
        with self._lock:
            sequence = self._wait_until_free(name, SequenceEntry.can_write)
            if sequence is not None:
                self._end_request(sequence)
                sequence.cache.clear()
                sequence.request_length = 0
                self._finish_use(sequence)
            self._evict_to_limit()

    def remove(self, name: Hashable) -> None:
        with self._lock:
            if self._wait_until_free(name, SequenceEntry.can_write) is not None:
                self._remove_entry(name)
            self._evict_to_limit()

    @contextmanager
    def lock_for_write(self, name: Hashable) -> Iterator[SequenceEntry]:
        """A sequence, a new one if need be, that no other thread is at."""
        me = current_thread()
        with self._lock:
            sequence = self._wait_until_free(name, SequenceEntry.can_write) or self._create(name)
            orphaned = sequence.is_orphaned
            sequence.lock_depth = 1 if orphaned else sequence.lock_depth + 1
            sequence.owner = me
        try:
            if orphaned:
                sequence.cache.rollback()
            yield sequence
        finally:
            with self._lock:
                if sequence.owner is me:  # and no other thread's, because this one had died
                    sequence.lock_depth -= 1
                    self._finish_use(sequence)
                if not sequence.is_persistent and self._entries.get(name) is sequence:
                    self._remove_entry(name)

    @contextmanager
    def lock_for_read(self, name: Hashable) -> Iterator[Cache]:
        """The cache of a sequence in which nobody is storing rows."""
        with self._lock:
            sequence = self._wait_until_free(name, SequenceEntry.can_read)
            if sequence is None:
                raise UnknownSequence(
                    f"sequence {short(name)} is not there: it never was, was removed, or was "
                    "evicted (max_bytes); append its rows first"
                )
            self._mark_used(name, sequence)
            sequence.num_readers += 1
        try:
            yield sequence.cache
        finally:
            with self._lock:
                sequence.num_readers -= 1
                self._lock.notify_all()

    def mark_used(self, name: Hashable, sequence: SequenceEntry) -> None:
        """It is the last one used, and all of them are under the limit again."""
        with self._lock:
            self._mark_used(name, sequence)

    def check_size(self, name: Hashable, sequence: SequenceEntry) -> None:
        """Refuse one that outgrew the limit by itself; it is there, to be made smaller."""
        if self.max_bytes is not None and sequence.nbytes > self.max_bytes:
            raise CapacityError(self._describe_excess(name, sequence.nbytes))

    def reserve_bytes(self, name: Hashable, sequence: SequenceEntry, new_nbytes: int) -> None:
        """Count bytes that are to come; evict for them, or refuse and evict none."""
        with self._lock:
            over = self._count_excess_bytes(new_nbytes)
            victims = self._select_victims(sequence, over)
            if sum(self._entries[victim].nbytes for victim in victims) < over:
                raise CapacityError(self._describe_excess(name, sequence.nbytes + new_nbytes))
            self._evict(victims)
            sequence.add_pending_bytes(new_nbytes)
            self._move_to_end(name, sequence)

    # What follows is called with the lock held.

    def _create(self, name: Hashable) -> SequenceEntry:
        self._entries[name] = sequence = SequenceEntry(Cache(spec=self.spec))
        return sequence

    def _wait_until_free(
        self, name: Hashable, is_free: Callable[[SequenceEntry], bool]
    ) -> SequenceEntry | None:
        """A sequence once it is free for this thread; None where there is none."""
        deadline = monotonic() + self.patience
        while (sequence := self._entries.get(name)) is not None and not is_free(sequence):
            left = deadline - monotonic()
            if left <= 0:
                raise CacheError(
                    f"sequence {short(name)} is not free after patience={self.patience} seconds: "
                    f"{sequence.user_name} is at it; let that end its forward or its `writing` "
                    "block "
                    "(a forward that may raise belongs into one), or give more patience"
                )
            self._lock.wait(min(left, POLL_INTERVAL_S))
        return sequence

    def _finish_use(self, sequence: SequenceEntry) -> None:
        """Something was done to it; once it is whole and not held, anyone may write to it."""
        if self.max_bytes is not None:
            sequence.measure()
        if sequence.lock_depth == 0 and sequence.cache.is_complete:
            sequence.owner = None
        self._lock.notify_all()

    def _mark_used(self, name: Hashable, sequence: SequenceEntry) -> None:
        self._move_to_end(name, sequence)
        self._evict_to_limit(sequence)

    def _move_to_end(self, name: Hashable, sequence: SequenceEntry) -> None:
        if self._entries.get(name) is sequence:  # not removed by the thread that holds it
            self._entries.move_to_end(name)

    def _evict_to_limit(self, sequence: SequenceEntry | None = None) -> None:
        """Evict, other than this one, what direct use of the caches made too much."""
        self._evict(self._select_victims(sequence, self._count_excess_bytes()))

    def _count_excess_bytes(self, new_nbytes: int = 0) -> int:
        """Bytes above the limit, with so many more."""
        if self.max_bytes is None:
            return 0
        for sequence in self._entries.values():
            sequence.measure()
        return (
            sum(sequence.nbytes for sequence in self._entries.values())
            + new_nbytes
            - self.max_bytes
        )

    def _select_victims(self, excluded: SequenceEntry | None, excess: int) -> list[Hashable]:
        """Who goes for so many bytes, or for as many of them as can be had."""
        victims: list[Hashable] = []
        if self.max_bytes is None or excess <= 0:
            return victims
        limit = self.max_bytes
        free = [
            (name, sequence.nbytes)
            for name, sequence in self._entries.items()
            if sequence.nbytes and sequence is not excluded and sequence.can_evict()
        ]
        free.sort(key=lambda pair: pair[1] <= limit)  # first what alone does not fit
        for name, nbytes in free:
            if excess <= 0:
                break
            victims.append(name)
            excess -= nbytes
        return victims

    def _evict(self, victims: list[Hashable]) -> None:
        for name in victims:
            self._remove_entry(name)
            self._past_counts["evictions"] += 1

    def _end_request(self, sequence: SequenceEntry) -> None:
        self._past_counts += sequence.count_request_tokens()
        sequence.request_length = sequence.cache.length

    def _remove_entry(self, name: Hashable) -> None:
        sequence = self._entries.pop(name)
        self._past_counts += sequence.count_events() + sequence.count_request_tokens()
        self._lock.notify_all()

    def _describe_excess(self, name: Hashable, nbytes: int) -> str:
        held = sum(
            sequence.nbytes
            for other, sequence in self._entries.items()
            if other != name and not sequence.can_evict()
        )
        return (
            f"sequence {short(name)} needs {nbytes} bytes, and {held} are in others that are being "
            f"written, with max_bytes={self.max_bytes}: give more, a smaller format or a window, "
            "clear or remove a sequence, or write to fewer at a time"
        )
