"""Slots with reference counts: integers only. What is in a slot is nobody's business here.

Caches that share pages share a pool. A slot is free, or counted once for each place that holds it;
`check` proves it by asking all holders.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol
from weakref import ref

import numpy as np

from kvant.extent import Bools, Ints


class Holder(Protocol):
    """Whoever holds slots; no two have the same number."""

    @property
    def serial(self) -> int: ...

    def slots(self, pool: Pool) -> Ints:
        """The slots of this pool that it holds, each as often as it does."""


class Pool:
    """The slots of one kind of pages; a slot number serves all layers of the kind."""

    def __init__(self, step: int = 1) -> None:
        self.step = step  # slots by which it grows
        self.counts = np.zeros(0, np.int64)
        self.takes = np.zeros(0, np.int64)  # how often each slot was taken
        self.holders: dict[int, ref[Holder]] = {}  # by number; they leave it from any thread
        self.orphans: deque[tuple[int, Ints]] = (
            deque()
        )  # slots of holders that are gone, yet to be dropped
        self.torn = False  # was a change of counts interrupted?
        self.joined: set[int] = set()  # the holders whose slots are counted
        self._fresh = 0  # from this slot on, nobody ever took any
        self._free: list[int] = []  # those before it that nobody holds, the next one last

    @property
    def size(self) -> int:
        """Slots that there are, free or held."""
        return len(self.counts)

    @property
    def free(self) -> int:
        return len(self._free) + self.size - self._fresh

    def copy(self) -> Pool:
        """The same counts, which nobody holds."""
        twin = Pool(self.step)
        twin.grow(self.size)
        twin.counts[: self._fresh] = self.counts[: self._fresh]
        twin.takes[: self._fresh] = self.takes[: self._fresh]
        twin._fresh, twin._free = self._fresh, list(self._free)
        return twin

    def join(self, holder: Holder) -> None:
        """From now on, this one is asked for its slots."""
        self.holders[holder.serial] = ref(holder)
        self.joined.add(holder.serial)

    def living(self) -> list[Holder]:
        """All holders: none of them goes while this list is kept."""
        return [one for there in list(self.holders.values()) if (one := there()) is not None]

    @property
    def missing(self) -> bool:
        """Did a holder go without leaving its slots? Its end was interrupted."""
        there = {one.serial for one in self.living()} | {serial for serial, _ in list(self.orphans)}
        return not self.joined <= there

    def grow(self, size: int) -> None:
        """Let there be so many slots."""
        more = -(-size // self.step) * self.step - self.size
        if more > 0:
            size = self.size + more
            counts, takes = np.zeros(size, np.int64), np.zeros(size, np.int64)
            counts[: self._fresh] = self.counts[: self._fresh]
            takes[: self._fresh] = self.takes[: self._fresh]
            self.counts, self.takes = counts, takes

    def sized(self, count: int) -> int:
        """The slots that there are once so many are taken."""
        self.collect()
        stop = self._fresh + max(0, count - len(self._free))
        return max(self.size, -(-stop // self.step) * self.step)

    def take(self, count: int) -> Ints:
        """Free slots, held once from now on; the pool grows where there are too few."""
        self.collect()
        again = min(count, len(self._free))
        stop = self._fresh + count - again
        if stop > self.size:
            self.grow(stop)
        slots = np.arange(stop - count, stop)
        slots[:again] = self._free[: -again - 1 : -1]
        del self._free[len(self._free) - again :]
        self._fresh = stop
        self.counts[slots] = 1
        self.takes[slots] += 1
        return slots

    def hold(self, slots: Ints) -> None:
        """Count these once more, each as often as it comes."""
        np.add.at(self.counts, slots, 1)

    def drop(self, slots: Ints) -> None:
        """Count these once less; those that nobody holds are free."""
        np.subtract.at(self.counts, slots, 1)
        gone = np.unique(slots[self.counts[slots] == 0])
        self._free.extend(gone[::-1].tolist())

    def collect(self) -> None:
        """Drop what holders left that are gone."""
        while self.orphans:
            serial, slots = self.orphans.popleft()
            if serial in self.joined:  # else they were counted anew without it
                self.joined.remove(serial)
                self.drop(slots)

    def shared(self, slots: Ints) -> Bools:
        """Which of these does somebody else hold, too? They must not be written to."""
        return self.counts[slots] > 1

    def recount(self) -> list[Holder]:
        """Count anew what holders hold, after an interrupt; who they are."""
        living = self.living()  # who goes from here on leaves its slots
        self.counts = self._counted(living)
        self.joined = {one.serial for one in living}
        for serial in self.holders.keys() - self.joined:  # whose end was interrupted
            self.holders.pop(serial, None)
        self._free = np.flatnonzero(self.counts[: self._fresh] == 0)[::-1].tolist()
        self.torn = False
        return living

    def check(self) -> None:
        """Every slot is free, or counted as often as it is held."""
        living = self.living()  # kept until all is compared
        left = dict(list(self.orphans))
        gone = self.joined - {one.serial for one in living}
        if not gone <= left.keys():  # an end was interrupted
            living, gone = self.recount(), set()
        held = self._counted(living)
        for serial in gone:
            np.add.at(held, left[serial], 1)
        wrong = np.flatnonzero(held != self.counts)
        assert not len(wrong), (
            f"slots {wrong.tolist()} are held {held[wrong].tolist()} times, "
            f"counted {self.counts[wrong].tolist()}"
        )
        free = sorted(self._free)
        unheld = np.flatnonzero(self.counts[: self._fresh] == 0).tolist()
        assert free == unheld and not self.counts[self._fresh :].any(), f"free slots {free}"

    def _counted(self, holders: list[Holder]) -> Ints:
        counts = np.zeros(self.size, np.int64)
        for holder in holders:
            np.add.at(counts, holder.slots(self), 1)
        return counts
