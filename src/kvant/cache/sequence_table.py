"""The table of sequences by id: their owners, their bytes, and eviction under a limit.

The state of an entry follows from its owner:

    owner    lock_depth    state
    None     0             free: readable, writable, evictable
    thread   0             its forward is incomplete: other threads may read
    thread   >= 1          inside of `lock_for_write`: other threads wait
    dead     any           orphaned: the next writer rolls back its forward

Names of sequences are ids of any hashable type.
"""

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
BACKEND_STATS = ("attended", "sealed")  # dicts by backend
# Values of `measured_changes` that match no counter:
APPEND_PENDING = -1  # `nbytes` includes rows that are still to be appended
MEASURED_DURING_WRITE = -2  # `nbytes` was measured during a write, so it may be outdated


@dataclass(eq=False)
class SequenceEntry:
    """A sequence: its cache, its bytes, and the threads that use it."""

    cache: Cache
    is_persistent: bool = False  # else it is removed if its first append fails
    nbytes: int = 0  # rows of a pending append included
    measured_changes: int = 0  # `StateHolder.num_changes` at the last measurement
    request_length: int = 0  # length at the start of the current request
    owner: Thread | None = None  # writes to it, or has an incomplete forward
    lock_depth: int = 0  # nested write locks of the owner
    num_readers: int = 0

    @property
    def is_orphaned(self) -> bool:
        """Whether its owner is a thread that has ended."""
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
        """Update `nbytes` if the cache has changed."""
        is_stable = self.lock_depth == 0 or self.is_owned_by_caller
        num_changes = self.cache.holder.num_changes
        if num_changes != self.measured_changes and (
            is_stable or self.measured_changes != APPEND_PENDING
        ):
            self.nbytes = self.cache.nbytes
            self.measured_changes = num_changes if is_stable else MEASURED_DURING_WRITE

    def add_pending_bytes(self, nbytes: int) -> None:
        """Count the rows of a pending append."""
        self.nbytes += nbytes
        self.measured_changes = APPEND_PENDING

    def confirm_append(self) -> None:
        """Confirm a pending append; the last layer needs a measurement, as a commit frees pages."""
        if not self.cache.is_complete:
            self.measured_changes = self.cache.holder.num_changes

    @property
    def user_name(self) -> str:
        """The user of the sequence, for error messages."""
        return "a reader" if self.owner is None else f"thread {self.owner.name!r}"

    def count_events(self) -> Counter[str]:
        """Return the event counters of its cache, for `stats()`."""
        stats = self.cache.stats()
        events = Counter({name: stats[name] for name in EVENT_STATS})
        for group in BACKEND_STATS:
            events.update({f"{group}.{name}": count for name, count in stats[group].items()})
        return events

    def count_request_tokens(self) -> Counter[str]:
        """Return the tokens of the current request, and how many of them were cached before."""
        length = self.cache.length
        new = max(0, length - self.request_length)
        reused = self.request_length if new > 1 else 0
        return Counter(tokens_asked=new + reused, tokens_reused=reused)


POLL_INTERVAL_S = 0.05  # waiters poll, because a thread that ends does not notify them


class SequenceTable:
    """Sequences by id, the least recently used first."""

    def __init__(self, spec: CacheSpec, max_bytes: int | None, patience: float) -> None:
        self.spec = spec
        self.max_bytes = max_bytes
        self.patience = patience
        self._lock = Condition()  # notified when a sequence becomes free
        self._entries: OrderedDict[Hashable, SequenceEntry] = OrderedDict()
        self._past_counts: Counter[str] = Counter()  # events of removed sequences

    def list_ids(self) -> list[Hashable]:
        with self._lock:
            return list(self._entries)

    def find(self, name: Hashable) -> SequenceEntry | None:
        return self._entries.get(name)

    def list_entries(self) -> tuple[list[SequenceEntry], Counter[str]]:
        """Return all entries, and the event counters of removed ones."""
        with self._lock:
            return list(self._entries.values()), self._past_counts.copy()

    def measure_bytes(self) -> tuple[int, int]:
        """Return bytes allocated and bytes of rows, for one set of sequences."""
        with self._lock:
            caches = [sequence.cache for sequence in self._entries.values()]
            return sum(c.nbytes for c in caches), sum(c.nbytes_used for c in caches)

    def get_or_create(self, name: Hashable) -> Cache:
        """Return the cache of a sequence, and begin a request."""
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
        """Lock a sequence for this thread; a new one is created if needed."""
        thread = current_thread()
        with self._lock:
            sequence = self._wait_until_free(name, SequenceEntry.can_write) or self._create(name)
            orphaned = sequence.is_orphaned
            sequence.lock_depth = 1 if orphaned else sequence.lock_depth + 1
            sequence.owner = thread
        try:
            if orphaned:
                sequence.cache.rollback()
            yield sequence
        finally:
            with self._lock:
                if sequence.owner is thread:  # else another thread has replaced it
                    sequence.lock_depth -= 1
                    self._finish_use(sequence)
                if not sequence.is_persistent and self._entries.get(name) is sequence:
                    self._remove_entry(name)

    @contextmanager
    def lock_for_read(self, name: Hashable) -> Iterator[Cache]:
        """Return the cache of a sequence that no other thread writes to."""
        with self._lock:
            sequence = self._wait_until_free(name, SequenceEntry.can_read)
            if sequence is None:
                raise UnknownSequence(
                    f"unknown sequence {short(name)}: it never had rows, was removed, or was "
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
        """Mark a sequence as most recently used, and evict others above the limit."""
        with self._lock:
            self._mark_used(name, sequence)

    def check_size(self, name: Hashable, sequence: SequenceEntry) -> None:
        """Refuse a sequence that exceeds the limit on its own; it remains, to be shortened."""
        if self.max_bytes is not None and sequence.nbytes > self.max_bytes:
            raise CapacityError(self._describe_excess(name, sequence.nbytes))

    def reserve_bytes(self, name: Hashable, sequence: SequenceEntry, new_nbytes: int) -> None:
        """Count `new_nbytes` before they are allocated; evict for them, or raise and evict none."""
        with self._lock:
            excess = self._count_excess_bytes(new_nbytes)
            victims = self._select_victims(sequence, excess)
            if sum(self._entries[victim].nbytes for victim in victims) < excess:
                raise CapacityError(self._describe_excess(name, sequence.nbytes + new_nbytes))
            self._evict(victims)
            sequence.add_pending_bytes(new_nbytes)
            self._move_to_end(name, sequence)

    # The methods below are called with `_lock` held.

    def _create(self, name: Hashable) -> SequenceEntry:
        self._entries[name] = sequence = SequenceEntry(Cache(spec=self.spec))
        return sequence

    def _wait_until_free(
        self, name: Hashable, is_free: Callable[[SequenceEntry], bool]
    ) -> SequenceEntry | None:
        """Return a sequence once it is free for this thread; None: there is none."""
        deadline = monotonic() + self.patience
        while (sequence := self._entries.get(name)) is not None and not is_free(sequence):
            remaining = deadline - monotonic()
            if remaining <= 0:
                raise CacheError(
                    f"sequence {short(name)} is not free after patience={self.patience} seconds: "
                    f"{sequence.user_name} uses it; end its forward or its `writing` block (a "
                    "forward that may raise belongs in one), or raise patience"
                )
            self._lock.wait(min(remaining, POLL_INTERVAL_S))
        return sequence

    def _finish_use(self, sequence: SequenceEntry) -> None:
        """Release a sequence after a change, once its forward is complete and it is not locked."""
        if self.max_bytes is not None:
            sequence.measure()
        if sequence.lock_depth == 0 and sequence.cache.is_complete:
            sequence.owner = None
        self._lock.notify_all()

    def _mark_used(self, name: Hashable, sequence: SequenceEntry) -> None:
        self._move_to_end(name, sequence)
        self._evict_to_limit(sequence)

    def _move_to_end(self, name: Hashable, sequence: SequenceEntry) -> None:
        if self._entries.get(name) is sequence:  # else it was removed meanwhile
            self._entries.move_to_end(name)

    def _evict_to_limit(self, sequence: SequenceEntry | None = None) -> None:
        """Evict other sequences, if direct use of caches has exceeded the limit."""
        self._evict(self._select_victims(sequence, self._count_excess_bytes()))

    def _count_excess_bytes(self, new_nbytes: int = 0) -> int:
        """Return the bytes above the limit, with `new_nbytes` more."""
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
        """Return the sequences to evict for `excess` bytes, or all that can be evicted."""
        victims: list[Hashable] = []
        if self.max_bytes is None or excess <= 0:
            return victims
        limit = self.max_bytes
        evictable = [
            (name, sequence.nbytes)
            for name, sequence in self._entries.items()
            if sequence.nbytes and sequence is not excluded and sequence.can_evict()
        ]
        # Sequences that exceed the limit on their own go first.
        evictable.sort(key=lambda pair: pair[1] <= limit)
        for name, nbytes in evictable:
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
        locked_nbytes = sum(
            sequence.nbytes
            for other, sequence in self._entries.items()
            if other != name and not sequence.can_evict()
        )
        return (
            f"sequence {short(name)} needs {nbytes} bytes, and {locked_nbytes} are in sequences "
            f"being written, with max_bytes={self.max_bytes}: raise it, use a smaller format or a "
            "window, clear or remove a sequence, or write to fewer at a time"
        )
