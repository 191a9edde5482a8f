"""Slot allocation with reference counts: integers only, no tensors.

Caches that share pages share a pool. A slot is free, or counted once per reference. `check`
compares the counts with the slots that all holders list.

    CachePools   of a cache and its forks, with the lock that guards all counts
      Pools      of one layer group: open pages and sealed pages
        Pool     the slots of one kind of page
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import NamedTuple, Protocol
from weakref import ref

import numpy as np

from kvant.page_table import Bools, Ints, LayerGroup, PageTable

Slots = tuple[Ints, Ints]  # of open and of sealed pages
GroupSlots = tuple[int, Slots]  # layer group, slots


class SlotHolder(Protocol):
    """An owner of slots; serial numbers are unique."""

    @property
    def serial(self) -> int: ...

    def list_slots(self, pool: Pool) -> Ints:
        """Return the slots of `pool` that it holds, repeated per reference."""


class Pool:
    """The slots of the open, or of the sealed, pages of a layer group.

    One slot number serves all layers of the group.
    """

    def __init__(self, step: int = 1) -> None:
        self.step = step  # slots by which it grows
        self.ref_counts = np.zeros(0, np.int64)
        self.slot_versions = np.zeros(0, np.int64)  # how often each slot was allocated
        # By serial. Finalizers remove entries, in any thread.
        self.holders: dict[int, ref[SlotHolder]] = {}
        # Serials of deleted holders, with the slots whose references are still to be dropped.
        self.orphaned_slots: deque[tuple[int, Ints]] = deque()
        self.counts_interrupted = False  # an interrupt may have left counts incomplete
        self.counted_holders: set[int] = set()  # serials of the holders that counts include
        self._first_unused = 0  # slots from here on were never allocated
        self._free_slots: list[int] = []  # freed slots; the last one is reused first

    @property
    def size(self) -> int:
        """The number of slots, free or held."""
        return len(self.ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free_slots) + self.size - self._first_unused

    def copy(self) -> Pool:
        """Return a pool with the same counts and no holders."""
        copy = Pool(self.step)
        copy.grow(self.size)
        copy.ref_counts[: self._first_unused] = self.ref_counts[: self._first_unused]
        copy.slot_versions[: self._first_unused] = self.slot_versions[: self._first_unused]
        copy._first_unused, copy._free_slots = self._first_unused, list(self._free_slots)
        return copy

    def add_holder(self, holder: SlotHolder) -> None:
        """Register a holder of slots."""
        self.holders[holder.serial] = ref(holder)
        self.counted_holders.add(holder.serial)

    @property
    def has_lost_holder(self) -> bool:
        """Whether a holder was deleted, but an interrupted finalizer did not record its slots."""
        known_serials = {holder.serial for holder in _list_live_holders(self)} | {
            serial for serial, _ in list(self.orphaned_slots)
        }
        return not self.counted_holders <= known_serials

    def grow(self, size: int) -> None:
        """Grow to at least `size` slots."""
        growth = -(-size // self.step) * self.step - self.size
        if growth > 0:
            size = self.size + growth
            counts, versions = np.zeros(size, np.int64), np.zeros(size, np.int64)
            counts[: self._first_unused] = self.ref_counts[: self._first_unused]
            versions[: self._first_unused] = self.slot_versions[: self._first_unused]
            self.ref_counts, self.slot_versions = counts, versions

    def predict_size(self, count: int) -> int:
        """Return the size of the pool after an allocation of `count` slots."""
        self.collect_orphans()
        stop = self._first_unused + max(0, count - len(self._free_slots))
        return max(self.size, -(-stop // self.step) * self.step)

    def allocate(self, count: int) -> Ints:
        """Allocate `count` slots with one reference each; the pool grows if too few are free."""
        self.collect_orphans()
        num_reused = min(count, len(self._free_slots))
        stop = self._first_unused + count - num_reused
        if stop > self.size:
            self.grow(stop)
        slots = np.arange(stop - count, stop)
        slots[:num_reused] = self._free_slots[: -num_reused - 1 : -1]
        del self._free_slots[len(self._free_slots) - num_reused :]
        self._first_unused = stop
        self.ref_counts[slots] = 1
        self.slot_versions[slots] += 1
        return slots

    def add_references(self, slots: Ints) -> None:
        """Add one reference per entry of `slots`."""
        np.add.at(self.ref_counts, slots, 1)

    def drop_references(self, slots: Ints) -> None:
        """Drop one reference per entry of `slots`; slots without references are free."""
        np.subtract.at(self.ref_counts, slots, 1)
        freed = np.unique(slots[self.ref_counts[slots] == 0])
        self._free_slots.extend(freed[::-1].tolist())

    def collect_orphans(self) -> None:
        """Drop the references of deleted holders."""
        while self.orphaned_slots:
            serial, slots = self.orphaned_slots.popleft()
            if serial in self.counted_holders:  # else a recount has excluded it
                self.counted_holders.remove(serial)
                self.drop_references(slots)

    def mask_shared(self, slots: Ints) -> Bools:
        """Return which of `slots` have another holder, so that they must not be written."""
        return self.ref_counts[slots] > 1

    def recount(self) -> list[SlotHolder]:
        """Recompute the counts from all holders, after an interrupt; return the holders."""
        holders = _list_live_holders(self)  # if deleted later, they add to `orphaned_slots`
        self.ref_counts = _count_references(self, holders)
        self.counted_holders = {holder.serial for holder in holders}
        for serial in self.holders.keys() - self.counted_holders:  # their finalizer was interrupted
            self.holders.pop(serial, None)
        self._free_slots = np.flatnonzero(self.ref_counts[: self._first_unused] == 0)[::-1].tolist()
        self.counts_interrupted = False
        return holders

    def check(self) -> None:
        """Verify that every slot is free, or counted once per reference."""
        holders = _list_live_holders(self)  # alive until all is compared
        orphaned = dict(list(self.orphaned_slots))
        deleted = self.counted_holders - {holder.serial for holder in holders}
        if not deleted <= orphaned.keys():  # a finalizer was interrupted
            holders, deleted = self.recount(), set()
        references = _count_references(self, holders)
        for serial in deleted:
            np.add.at(references, orphaned[serial], 1)
        wrong = np.flatnonzero(references != self.ref_counts)
        assert not len(wrong), (
            f"slots {wrong.tolist()} are held {references[wrong].tolist()} times, "
            f"counted {self.ref_counts[wrong].tolist()}"
        )
        free = sorted(self._free_slots)
        unheld = np.flatnonzero(self.ref_counts[: self._first_unused] == 0).tolist()
        assert free == unheld and not self.ref_counts[self._first_unused :].any(), (
            f"free slots {free}"
        )


def _list_live_holders(pool: Pool) -> list[SlotHolder]:
    """Return all live holders; the list keeps them alive."""
    holders = (reference() for reference in list(pool.holders.values()))
    return [holder for holder in holders if holder is not None]


def _count_references(pool: Pool, holders: list[SlotHolder]) -> Ints:
    counts = np.zeros(pool.size, np.int64)
    for holder in holders:
        np.add.at(counts, holder.list_slots(pool), 1)
    return counts


class Pools(NamedTuple):
    """The slots of the open and of the sealed pages of a layer group."""

    open: Pool
    sealed: Pool

    @classmethod
    def make(cls, layer_group: LayerGroup) -> Pools:
        step = max(1, layer_group.step // layer_group.page)
        return cls(Pool(step), Pool(step))

    @property
    def is_shared(self) -> bool:
        """Whether several caches hold slots of these pools."""
        return len(self.open.holders) > 1

    def copy(self) -> Pools:
        """Return pools with the same counts, for a trial allocation."""
        return Pools(self.open.copy(), self.sealed.copy())

    def add_references(self, page_table: PageTable) -> None:
        """Add a reference to each slot of `page_table`."""
        self.open.add_references(page_table.list_open_slots())
        self.sealed.add_references(page_table.list_sealed_slots())

    def drop_references(self, open_slots: Ints, sealed_slots: Ints) -> None:
        self.open.drop_references(open_slots)
        self.sealed.drop_references(sealed_slots)


class CachePools:
    """The pools of each layer group, shared by a cache and its forks, and their lock.

    The lock excludes all other caches over these pools.
    """

    def __init__(
        self,
        layer_groups: Sequence[LayerGroup],
        by_group: Sequence[Pools] | None = None,
        lock: RLock | None = None,
    ) -> None:
        self.layer_groups = tuple(layer_groups)
        self._by_group = tuple(by_group or map(Pools.make, layer_groups))
        self.lock = lock or RLock()
        self._pools = tuple(pool for pools in self._by_group for pool in pools)

    def __getitem__(self, group: int) -> Pools:
        return self._by_group[group]

    def __iter__(self) -> Iterator[Pools]:
        return iter(self._by_group)

    def __len__(self) -> int:
        return len(self._by_group)

    def replace_group(self, group: int, pools: Pools) -> CachePools:
        """Return pools with those of one group replaced, under the same lock."""
        by_group = (*self._by_group[:group], pools, *self._by_group[group + 1 :])
        return CachePools(self.layer_groups, by_group, self.lock)

    def add_holder(self, holder: SlotHolder) -> None:
        for pool in self._pools:
            pool.add_holder(holder)

    def remove_holder(self, holder: SlotHolder) -> None:
        """Forget a holder whose references have been dropped; call within `guard_counts`."""
        for pool in self._pools:
            pool.holders.pop(holder.serial, None)
            pool.counted_holders.discard(holder.serial)

    def add_references(self, page_tables: Iterable[PageTable]) -> None:
        """Add a reference to each slot of the tables, one table per group."""
        for pools, page_table in zip(self._by_group, page_tables, strict=False):
            pools.add_references(page_table)

    def drop_references(self, slots: Iterable[GroupSlots]) -> None:
        for group, group_slots in slots:
            self._by_group[group].drop_references(*group_slots)

    def check(self) -> None:
        """Verify that each slot is free, or counted once per holder."""
        with self.lock:
            with self.guard_counts():
                pass  # recounts after an interrupted change
            for pool in self._pools:
                pool.check()

    @contextmanager
    def guard_counts(self) -> Iterator[None]:
        """Protect changes of slot counts: an interrupted change is recounted.

        Allocate all slots of a table inside the block: before it is assigned, no holder lists them.
        """
        with self.lock:
            for pool in self._pools:
                if pool.counts_interrupted or pool.has_lost_holder:
                    pool.recount()
                pool.counts_interrupted = True
            try:
                yield
            except Exception:
                for pool in self._pools:
                    pool.recount()
                raise
            for pool in self._pools:
                pool.counts_interrupted = False


def bound_pages(layer_group: LayerGroup, length: int) -> tuple[int, int]:
    """Return the maximum of open and of sealed pages while a sequence grows to `length`.

    Pages that one token releases are freed at the next, so they count for one more token. A few
    lengths are enough to find the maximum. Page counts grow until the window is full, and then
    repeat with a period of one page, so the last lengths are tried. They drop only at
    `dense_until`, which delays the first seals, so the last lengths before that are tried as well.
    """
    dense_length = min(length, layer_group.paging.dense_until + layer_group.slack)
    last_pages = [
        np.arange(max(1, last - 2 * layer_group.page), last + 1) for last in (length, dense_length)
    ]
    lengths = np.unique(np.concatenate(last_pages))
    first = layer_group.find_first_open(lengths - 1)
    stop = -(-lengths // layer_group.page)
    num_open = stop - first + np.minimum(layer_group.num_sink_pages, first)
    num_sealed = layer_group.paging.count_due_pages_each(lengths) - layer_group.find_first_sealed(
        lengths - 1
    )
    return int(num_open.max(initial=0)), max(0, int(num_sealed.max(initial=0)))


def bound_slots(layer_group: LayerGroup, lengths: Iterable[int]) -> tuple[int, int]:
    """Return the maximum of open and of sealed slots of sequences that grow to `lengths`."""
    pages = [bound_pages(layer_group, layer_group.capacity or length) for length in lengths]
    step = Pools.make(layer_group).open.step
    max_open, max_sealed = (-(-sum(counts) // step) * step for counts in zip(*pages, strict=True))
    return max_open, max_sealed


def bound_slots_after(
    page_table: PageTable, num_new_tokens: int, *, is_shared: bool
) -> tuple[int, int]:
    """Return the maximum of slots after `num_new_tokens` more tokens, in one chunk or singly.

    If other caches share the pools, it is assumed that they keep all present pages, so a partly
    filled page is copied before it is written. A cache that does not share its pools needs less: it
    frees pages that a chunk needs only for a time.
    """
    group, new_lengths = page_table.layer_group, np.maximum(page_table.lengths + num_new_tokens, 0)
    if not is_shared:
        return bound_slots(group, new_lengths.tolist())
    new_pages = -(-new_lengths // group.page) - page_table.stop_open
    max_open = np.array([bound_pages(group, length)[0] for length in new_lengths.tolist()])
    added_open = np.minimum(new_pages, max_open) + (new_lengths > page_table.seq_lens)
    added_sealed = np.maximum(
        group.paging.count_due_pages_each(new_lengths) - page_table.stop_sealed, 0
    )
    rounding = Pools.make(group).open.step - 1
    num_open = len(np.unique(page_table.list_open_slots())) + int(added_open.sum()) + rounding
    num_sealed = len(np.unique(page_table.list_sealed_slots())) + int(added_sealed.sum()) + rounding
    if group.pruning is not None:  # a prune copies rows before it frees any
        copied = bound_slots(group, new_lengths.tolist())
        return num_open + copied[0], num_sealed + copied[1]
    return num_open, num_sealed


def reserve_capacity(layer_group: LayerGroup, num_tables: int, pools: Pools) -> None:
    """Grow `pools` to the capacity of the group, if it has one."""
    if layer_group.capacity is not None:
        max_open, max_sealed = bound_pages(layer_group, layer_group.capacity)
        pools.open.grow(num_tables * max_open)
        pools.sealed.grow(num_tables * max_sealed)
