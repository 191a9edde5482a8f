"""Slots with reference counts: integers only. What is in a slot is nobody's business here.

Caches that share pages share a pool. A slot is free, or counted once for each place that holds it;
`check` proves it by asking all holders.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol
from weakref import ref

import numpy as np

from kvant.page_table import Bools, Ints


class SlotHolder(Protocol):
    """Whoever holds slots; no two have the same number."""

    @property
    def serial(self) -> int: ...

    def list_slots(self, pool: Pool) -> Ints:
        """The slots of this pool that it holds, each as often as it does."""


class Pool:
    """The slots of one kind of pages; a slot number serves all layers of the kind."""

    def __init__(self, step: int = 1) -> None:
        self.step = step  # slots by which it grows
        self.ref_counts = np.zeros(0, np.int64)
        self.slot_versions = np.zeros(0, np.int64)  # how often each slot was taken
        self.holders: dict[int, ref[SlotHolder]] = {}  # by number; they leave it from any thread
        self.orphaned_slots: deque[tuple[int, Ints]] = (
            deque()
        )  # slots of holders that are gone, yet to be dropped
        self.counts_interrupted = False  # was a change of counts interrupted?
        self.counted_holders: set[int] = set()  # the holders whose slots are counted
        self._first_unused = 0  # from this slot on, nobody ever took any
        self._free_slots: list[int] = []  # those before it that nobody holds, the next one last

    @property
    def size(self) -> int:
        """Slots that there are, free or held."""
        return len(self.ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free_slots) + self.size - self._first_unused

    def copy(self) -> Pool:
        """The same counts, which nobody holds."""
        twin = Pool(self.step)
        twin.grow(self.size)
        twin.ref_counts[: self._first_unused] = self.ref_counts[: self._first_unused]
        twin.slot_versions[: self._first_unused] = self.slot_versions[: self._first_unused]
        twin._first_unused, twin._free_slots = self._first_unused, list(self._free_slots)
        return twin

    def add_holder(self, holder: SlotHolder) -> None:
        """From now on, this one is asked for its slots."""
        self.holders[holder.serial] = ref(holder)
        self.counted_holders.add(holder.serial)

    def list_live_holders(self) -> list[SlotHolder]:
        """All holders: none of them goes while this list is kept."""
        return [one for there in list(self.holders.values()) if (one := there()) is not None]

    @property
    def has_lost_holder(self) -> bool:
        """Did a holder go without leaving its slots? Its end was interrupted."""
        there = {one.serial for one in self.list_live_holders()} | {
            serial for serial, _ in list(self.orphaned_slots)
        }
        return not self.counted_holders <= there

    def grow(self, size: int) -> None:
        """Let there be so many slots."""
        more = -(-size // self.step) * self.step - self.size
        if more > 0:
            size = self.size + more
            counts, takes = np.zeros(size, np.int64), np.zeros(size, np.int64)
            counts[: self._first_unused] = self.ref_counts[: self._first_unused]
            takes[: self._first_unused] = self.slot_versions[: self._first_unused]
            self.ref_counts, self.slot_versions = counts, takes

    def predict_size(self, count: int) -> int:
        """The slots that there are once so many are taken."""
        self.collect_orphans()
        stop = self._first_unused + max(0, count - len(self._free_slots))
        return max(self.size, -(-stop // self.step) * self.step)

    def allocate(self, count: int) -> Ints:
        """Free slots, held once from now on; the pool grows where there are too few."""
        self.collect_orphans()
        again = min(count, len(self._free_slots))
        stop = self._first_unused + count - again
        if stop > self.size:
            self.grow(stop)
        slots = np.arange(stop - count, stop)
        slots[:again] = self._free_slots[: -again - 1 : -1]
        del self._free_slots[len(self._free_slots) - again :]
        self._first_unused = stop
        self.ref_counts[slots] = 1
        self.slot_versions[slots] += 1
        return slots

    def add_references(self, slots: Ints) -> None:
        """Count these once more, each as often as it comes."""
        np.add.at(self.ref_counts, slots, 1)

    def drop_references(self, slots: Ints) -> None:
        """Count these once less; those that nobody holds are free."""
        np.subtract.at(self.ref_counts, slots, 1)
        gone = np.unique(slots[self.ref_counts[slots] == 0])
        self._free_slots.extend(gone[::-1].tolist())

    def collect_orphans(self) -> None:
        """Drop what holders left that are gone."""
        while self.orphaned_slots:
            serial, slots = self.orphaned_slots.popleft()
            if serial in self.counted_holders:  # else they were counted anew without it
                self.counted_holders.remove(serial)
                self.drop_references(slots)

    def mask_shared(self, slots: Ints) -> Bools:
        """Which of these does somebody else hold, too? They must not be written to."""
        return self.ref_counts[slots] > 1

    def recount(self) -> list[SlotHolder]:
        """Count anew what holders hold, after an interrupt; who they are."""
        living = self.list_live_holders()  # who goes from here on leaves its slots
        self.ref_counts = self._count_references(living)
        self.counted_holders = {one.serial for one in living}
        for serial in self.holders.keys() - self.counted_holders:  # whose end was interrupted
            self.holders.pop(serial, None)
        self._free_slots = np.flatnonzero(self.ref_counts[: self._first_unused] == 0)[::-1].tolist()
        self.counts_interrupted = False
        return living

    def check(self) -> None:
        """Every slot is free, or counted as often as it is held."""
        living = self.list_live_holders()  # kept until all is compared
        left = dict(list(self.orphaned_slots))
        gone = self.counted_holders - {one.serial for one in living}
        if not gone <= left.keys():  # an end was interrupted
            living, gone = self.recount(), set()
        held = self._count_references(living)
        for serial in gone:
            np.add.at(held, left[serial], 1)
        wrong = np.flatnonzero(held != self.ref_counts)
        assert not len(wrong), (
            f"slots {wrong.tolist()} are held {held[wrong].tolist()} times, "
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
