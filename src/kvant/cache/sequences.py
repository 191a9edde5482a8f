"""Many sequences by id: one `Cache` each, under one limit of bytes, for any number of threads.

An append first evicts other sequences, so that the caches together take at most `max_bytes`, or it
raises. Rows that are appended to a cache directly are counted at the next operation. A thread waits
only for users of the same sequence. The state of an entry follows from its owner:

    owner    lock_depth    state
    None     0             free: readable, writable, evictable
    thread   0             its forward is incomplete: other threads may read
    thread   >= 1          inside of `lock_for_write`: other threads wait
    dead     any           orphaned: the next writer rolls back its forward
"""

# ruff: noqa: A002 - `id` is the public parameter name

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from reprlib import repr as short
from threading import Condition, Thread, current_thread
from time import monotonic
from typing import Any

from torch import Tensor

from kvant.cache.cache import Cache
from kvant.contracts import Order, View
from kvant.errors import CacheError, CapacityError, UnknownSequence
from kvant.platform.sizes import as_bytes, format_size
from kvant.recipes import AnySpec, CacheSpec, LayerSpec, Prefill, SharedSpec
from kvant.spec import as_spec, check_fitted, describe_spec, refuse_second_pass

EVENT_STATS = ("appends", "rewinds_exact", "rewinds_decoded", "abandoned", "recodes", "clamped")
BACKEND_STATS = ("attended", "sealed")  # dicts by backend
POLL_INTERVAL_S = 0.05  # waiters poll, because a thread that ends does not notify them
# Values of `measured_changes` that never equal `num_changes`:
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

    def confirm_append(self) -> None:
        """Take the reserved `nbytes` as the measured size.

        If the append committed a forward, which may free pages, `measure` updates `nbytes` later.
        """
        if not self.cache.is_complete:
            self.measured_changes = self.cache.holder.num_changes

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

    def start_next_request(self) -> Counter[str]:
        """Begin the next request; return the tokens of the current one."""
        counts = self.count_request_tokens()
        self.request_length = self.cache.length
        return counts


class SequenceTable:
    """Sequences by id, the least recently used first.

    All but `lock_for_write` and `lock_for_read` are called with `lock` held.
    """

    def __init__(self, spec: CacheSpec, max_bytes: int | None) -> None:
        self.spec = spec
        self.max_bytes = max_bytes
        self.lock = Condition()  # notified when a sequence becomes free
        self.entries: OrderedDict[Hashable, SequenceEntry] = OrderedDict()
        self.past_counts: Counter[str] = Counter()  # events of removed sequences

    @contextmanager
    def lock_for_write(self, name: Hashable, patience: float) -> Iterator[SequenceEntry]:
        """Lock a sequence for this thread; a new one is created if needed."""
        thread = current_thread()
        with self.lock:
            can_write = SequenceEntry.can_write
            sequence = self.wait_until_free(name, can_write, patience) or self.create(name)
            orphaned = sequence.is_orphaned
            sequence.lock_depth = 1 if orphaned else sequence.lock_depth + 1
            sequence.owner = thread
        try:
            if orphaned:
                sequence.cache.rollback()
            yield sequence
        finally:
            with self.lock:
                if sequence.owner is thread:  # else another thread owns it now
                    sequence.lock_depth -= 1
                    self.finish_use(sequence)
                if not sequence.is_persistent and self.entries.get(name) is sequence:
                    self.remove(name)

    @contextmanager
    def lock_for_read(self, name: Hashable, patience: float) -> Iterator[Cache]:
        """Return the cache of a sequence that no other thread writes to."""
        with self.lock:
            sequence = self.wait_until_free(name, SequenceEntry.can_read, patience)
            if sequence is None:
                raise UnknownSequence(
                    f"unknown sequence {short(name)}: it never had rows, was removed, or was "
                    "evicted (max_bytes); append its rows first"
                )
            self.mark_used(name, sequence)
            sequence.num_readers += 1
        try:
            yield sequence.cache
        finally:
            with self.lock:
                sequence.num_readers -= 1
                self.lock.notify_all()

    def create(self, name: Hashable) -> SequenceEntry:
        self.entries[name] = sequence = SequenceEntry(Cache(spec=self.spec))
        return sequence

    def wait_until_free(
        self, name: Hashable, is_free: Callable[[SequenceEntry], bool], patience: float
    ) -> SequenceEntry | None:
        """Return a sequence once it is free for this thread; None: there is none."""
        deadline = monotonic() + patience
        while (sequence := self.entries.get(name)) is not None and not is_free(sequence):
            remaining = deadline - monotonic()
            if remaining <= 0:
                owner = sequence.owner
                user = "a reader" if owner is None else f"thread {owner.name!r}"
                raise CacheError(
                    f"sequence {short(name)} is not free after patience={patience} seconds: "
                    f"{user} uses it; end its forward or its `writing` block, or raise patience "
                    "(a `writing` block rolls back a forward that fails)"
                )
            self.lock.wait(min(remaining, POLL_INTERVAL_S))
        return sequence

    def finish_use(self, sequence: SequenceEntry) -> None:
        """Release a sequence after a change, unless it is locked or its forward is incomplete."""
        if self.max_bytes is not None:
            sequence.measure()
        if sequence.lock_depth == 0 and sequence.cache.is_complete:
            sequence.owner = None
        self.lock.notify_all()

    def mark_used(self, name: Hashable, sequence: SequenceEntry) -> None:
        """Mark a sequence as most recently used, and evict others above the limit."""
        self._move_to_end(name, sequence)
        self.evict_to_limit(sequence)

    def reserve_bytes(self, name: Hashable, sequence: SequenceEntry, new_nbytes: int) -> None:
        """Count `new_nbytes` before they are allocated; evict for them, or raise and evict none."""
        excess = self._count_excess_bytes(new_nbytes)
        victims = self._select_victims(sequence, excess)
        if sum(self.entries[victim].nbytes for victim in victims) < excess:
            raise CapacityError(self.describe_excess(name, sequence.nbytes + new_nbytes))
        self._evict(victims)
        sequence.nbytes += new_nbytes
        sequence.measured_changes = APPEND_PENDING
        self._move_to_end(name, sequence)

    def evict_to_limit(self, sequence: SequenceEntry | None = None) -> None:
        """Evict other sequences, if direct use of caches has exceeded the limit."""
        self._evict(self._select_victims(sequence, self._count_excess_bytes()))

    def remove(self, name: Hashable) -> None:
        sequence = self.entries.pop(name)
        self.past_counts += sequence.count_events() + sequence.count_request_tokens()
        self.lock.notify_all()

    def describe_excess(self, name: Hashable, nbytes: int) -> str:
        locked_nbytes = sum(
            sequence.nbytes
            for other, sequence in self.entries.items()
            if other != name and not sequence.can_evict()
        )
        return (
            f"sequence {short(name)} needs {nbytes} bytes, and {locked_nbytes} are in sequences "
            f"being written, with max_bytes={self.max_bytes}: raise it, use a smaller format or a "
            "window, clear or remove a sequence, or write to fewer at a time"
        )

    def _move_to_end(self, name: Hashable, sequence: SequenceEntry) -> None:
        if self.entries.get(name) is sequence:  # else it was removed meanwhile
            self.entries.move_to_end(name)

    def _count_excess_bytes(self, new_nbytes: int = 0) -> int:
        """Return the bytes above the limit, with `new_nbytes` more."""
        if self.max_bytes is None:
            return 0
        for sequence in self.entries.values():
            sequence.measure()
        nbytes = sum(sequence.nbytes for sequence in self.entries.values())
        return nbytes + new_nbytes - self.max_bytes

    def _select_victims(self, excluded: SequenceEntry | None, excess: int) -> list[Hashable]:
        """Return the sequences to evict for `excess` bytes, or all that can be evicted."""
        victims: list[Hashable] = []
        if self.max_bytes is None or excess <= 0:
            return victims
        limit = self.max_bytes
        evictable = [
            (name, sequence.nbytes)
            for name, sequence in self.entries.items()
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
            self.remove(name)
            self.past_counts["evictions"] += 1


class Sequences:
    """Caches by any hashable id, all with the same spec.

    >>> sequences = kvant.Sequences(num_layers=1, spec="affine8", max_bytes="64MiB")
    >>> view = sequences.append("chat-1", 0, torch.randn(1, 2, 10, 64), torch.randn(1, 2, 10, 64))
    >>> sequences.length("chat-1"), "chat-2" in sequences
    (10, False)
    """

    def __init__(
        self,
        num_layers: int | None = None,
        spec: AnySpec = "raw",
        max_bytes: int | str | None = None,
        *,
        patience: float = 30.0,
    ) -> None:
        """Create an empty table; `max_bytes` may be a size such as "1GiB".

        `patience` is the number of seconds that a thread waits for a sequence in use by another
        one.
        """
        limit = None if max_bytes is None else as_bytes(max_bytes)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(
                f"max_bytes={max_bytes}: a whole number >= 1, or a size such as '1GiB', is needed"
            )
        if not patience >= 0:
            raise ValueError(f"patience={patience}: 0 seconds or more")
        self.spec = refuse_second_pass(check_fitted(as_spec(spec, num_layers)))
        self.patience = patience
        self._table = SequenceTable(self.spec, limit)

    @property
    def max_bytes(self) -> int | None:
        return self._table.max_bytes

    def __len__(self) -> int:
        return len(self._table.entries)

    def __contains__(self, id: Hashable) -> bool:
        return id in self._table.entries

    def __iter__(self) -> Iterator[Hashable]:
        """Iterate over the present ids, the least recently used first."""
        with self._table.lock:
            return iter(list(self._table.entries))

    def __repr__(self) -> str:
        contents = f"{len(self)} of {len(self.spec.layers)} layers, {format_size(self.nbytes)}"
        return f"Sequences({describe_spec(self.spec)}: {contents})"

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return _measure_bytes(self._table)[0]

    def get_or_create(self, id: Hashable) -> Cache:
        """Return the cache of a sequence; a new id gets an empty one.

        One thread may use it without a lock until the sequence is evicted. Its bytes are counted
        again at the next operation of this table. Use `writing` to exclude other threads and
        eviction.
        """
        with self._table.lock:
            sequence = self._table.entries.get(id) or self._table.create(id)
            sequence.is_persistent = True
            self._table.past_counts += sequence.start_next_request()
            self._table.mark_used(id, sequence)
            return sequence.cache

    @contextmanager
    def writing(self, id: Hashable) -> Iterator[Cache]:
        """Lock a sequence: no other thread reads or writes it, and it is not evicted.

        An exception rolls back an incomplete forward. If the block exceeds `max_bytes`, its end
        raises CapacityError. The rows remain; shorten the cache in another block.
        """
        thread, table = current_thread(), self._table
        with table.lock_for_write(id, self.patience) as sequence:
            sequence.is_persistent = True
            try:
                with table.lock:
                    table.mark_used(id, sequence)
                yield sequence.cache
                with table.lock:
                    table.mark_used(id, sequence)
                    if table.max_bytes is not None and sequence.nbytes > table.max_bytes:
                        raise CapacityError(table.describe_excess(id, sequence.nbytes))
            except BaseException:
                if sequence.owner is thread:  # else another thread owns it now
                    sequence.cache.rollback()
                raise

    def append(
        self,
        id: Hashable,
        layer: int,
        keys: Tensor,
        values: Tensor | None = None,
        *,
        start: list[int] | Tensor | None = None,
        order: Order = "BHTD",
        prefill: Prefill | None = None,
    ) -> View:
        """Append the rows of T tokens to a layer; return the view for attention.

        A forward appends to every layer once. Until all have its rows, other threads cannot write.
        """
        _check_layer(self.spec, layer)
        options: dict[str, Any] = {"start": start, "order": order, "prefill": prefill}
        with self._table.lock_for_write(id, self.patience) as sequence:
            cache = sequence.cache
            cache_layer = cache[layer]
            if cache_layer.has_appended:  # an earlier forward has failed
                cache.rollback()
            new_nbytes = (
                cache_layer.nbytes_after_append(keys, values, **options) - cache_layer.nbytes
            )
            with self._table.lock:
                self._table.reserve_bytes(id, sequence, max(0, new_nbytes))
            view: View = cache_layer.append(keys, values, **options)
            sequence.confirm_append()
            sequence.is_persistent = True
        return view

    def get(self, id: Hashable, layer: int, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Return copies of the dense keys and values of positions [start, start + length).

        Rows of an open forward are not included.
        """
        _check_layer(self.spec, layer)
        with self._table.lock_for_read(id, self.patience) as cache:
            stop, num_tokens = start + length, cache.length
            if not 0 <= start <= stop <= num_tokens:
                raise ValueError(
                    f"rows [{start}, {stop}) of sequence {short(id)}: it has {num_tokens}"
                )
            keys, values = cache[layer].read(start, stop, committed=True)
            return keys.clone(), values.clone()

    def length(self, id: Hashable) -> int:
        """Return the tokens that every layer has; 0 for an unknown id."""
        sequence = self._table.entries.get(id)
        return 0 if sequence is None else sequence.cache.length

    def clear(self, id: Hashable) -> None:
        """Remove the tokens and free the memory; the id remains. Unknown ids are ignored."""
        table = self._table
        with table.lock:
            sequence = table.wait_until_free(id, SequenceEntry.can_write, self.patience)
            if sequence is not None:
                table.past_counts += sequence.start_next_request()
                sequence.cache.clear()
                sequence.request_length = 0
                table.finish_use(sequence)
            table.evict_to_limit()

    def remove(self, id: Hashable) -> None:
        """Remove the sequence; unknown ids are ignored."""
        table = self._table
        with table.lock:
            if table.wait_until_free(id, SequenceEntry.can_write, self.patience) is not None:
                table.remove(id)
            table.evict_to_limit()

    def stats(self) -> dict[str, Any]:
        """Return sizes, and the event counters of all sequences, removed ones included.

        `hit_rate` is the share of requested tokens that were cached already. Each `get_or_create`
        begins a request. Tokens already in the cache count as reused, and tokens appended until the
        next request as new. With at most one new token, a request is a decode step: it counts no
        token as reused.
        """
        with self._table.lock:
            entries, total = list(self._table.entries.values()), self._table.past_counts.copy()
        for sequence in entries:
            total += sequence.count_events() + sequence.count_request_tokens()
        allocated, used = _measure_bytes(self._table)
        lengths = sum(sequence.cache.length for sequence in entries)
        requested, reused = total["tokens_asked"], total["tokens_reused"]
        stats: dict[str, Any] = {
            "sequences": len(entries),
            "average_length": lengths / len(entries) if entries else 0.0,
            "nbytes": allocated,
            "nbytes_used": used,
            "efficiency": used / allocated if allocated else 0.0,
            "tokens_asked": requested,
            "tokens_reused": reused,
            "hit_rate": reused / requested if requested else 0.0,
        }
        stats |= {name: total[name] for name in ("evictions", *EVENT_STATS)}
        for group in BACKEND_STATS:
            prefix = f"{group}."
            stats[group] = {
                k.removeprefix(prefix): n for k, n in total.items() if k.startswith(prefix)
            }
        return stats


def _measure_bytes(table: SequenceTable) -> tuple[int, int]:
    """Return bytes allocated and bytes of rows, both of the sequences present now."""
    with table.lock:
        caches = [sequence.cache for sequence in table.entries.values()]
        return sum(c.nbytes for c in caches), sum(c.nbytes_used for c in caches)


def _check_layer(spec: CacheSpec, layer: int) -> None:
    count = len(spec.layers)
    if layer not in range(-count, count):
        raise ValueError(f"layer {layer} of {count}: 0 to {count - 1} is needed")
    if not isinstance(spec.layers[layer], LayerSpec | SharedSpec):
        raise ValueError(
            f"layer {layer} is recurrent or has several parts: use it in `writing(id)`"
        )
