"""Slot allocation with reference counts: integers only, no tensors.

Caches that share pages share a pool. A slot is free, or counted once per reference. `check`
compares the counts with the slots that all holders list.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol
from weakref import ref

import numpy as np

from kvant.page_table import Bools, Ints


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

    def list_live_holders(self) -> list[SlotHolder]:
        """Return all live holders; the list keeps them alive."""
        return [
            holder
            for reference in list(self.holders.values())
            if (holder := reference()) is not None
        ]

    @property
    def has_lost_holder(self) -> bool:
        """Whether a holder was deleted, but an interrupted finalizer did not record its slots."""
        known_serials = {holder.serial for holder in self.list_live_holders()} | {
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
        holders = self.list_live_holders()  # if deleted later, they add to `orphaned_slots`
        self.ref_counts = self._count_references(holders)
        self.counted_holders = {holder.serial for holder in holders}
        for serial in self.holders.keys() - self.counted_holders:  # their finalizer was interrupted
            self.holders.pop(serial, None)
        self._free_slots = np.flatnonzero(self.ref_counts[: self._first_unused] == 0)[::-1].tolist()
        self.counts_interrupted = False
        return holders

    def check(self) -> None:
        """Verify that every slot is free, or counted once per reference."""
        holders = self.list_live_holders()  # alive until all is compared
        orphaned = dict(list(self.orphaned_slots))
        deleted = self.counted_holders - {holder.serial for holder in holders}
        if not deleted <= orphaned.keys():  # a finalizer was interrupted
            holders, deleted = self.recount(), set()
        references = self._count_references(holders)
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

    def _count_references(self, holders: list[SlotHolder]) -> Ints:
        counts = np.zeros(self.size, np.int64)
        for holder in holders:
            np.add.at(counts, holder.list_slots(self), 1)
        return counts
