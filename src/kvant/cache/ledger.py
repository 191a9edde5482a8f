"""Which extents hold, which forward is under way, and the slots that both keep.

What holds is one immutable `Book`, and every verb ends in the assignment of another: so an
exception, Ctrl-C among them, leaves the old state or the new one, for all layers. Counts of slots
change apart from that; where an interrupt came between, they are counted anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvant.cache.changes import Pools, advanced
from kvant.cache.pool import Pool
from kvant.errors import CapacityError
from kvant.extent import Change, Extent, Ints, Kind

log = logging.getLogger("kvant")

NOTHING = np.zeros(0, np.int64)
Slots = tuple[Ints, Ints]  # of open pages and of sealed ones


@dataclass(frozen=True)
class Book:
    """The committed extents, one a kind, and what a forward under way makes of them."""

    extents: tuple[Extent, ...] = ()  # none before the first rows
    states: tuple[Any, ...] = ()  # of the layers that recur
    changes: dict[int, Change] = field(default_factory=dict)  # by kind
    retired: tuple[tuple[int, Slots], ...] = ()  # by kind; dropped when the next change begins


class Ledger:
    """The integers of a cache: a `Holder` of slots in the pools of its kinds."""

    def __init__(self, kinds: Sequence[Kind], pools: Sequence[Pools], leaves: int) -> None:
        self.kinds, self.pools, self.leaves = tuple(kinds), tuple(pools), leaves
        self.book = Book()
        self.arrived: set[int] = set()
        self.coming: dict[int, Any] = {}  # states of layers that recur, of the forward under way
        self.abandoned = 0
        for pool in self._all():
            pool.holders.add(self)

    def __del__(self) -> None:
        """Anywhere, even inside of a pool: so slots are left to whoever takes the next ones."""
        for kind, pools in enumerate(self.pools):
            for pool, slots in zip((pools.open, pools.sealed), self._held(kind), strict=True):
                pool.holders.discard(self)
                pool.orphans.append(slots)

    @property
    def batch(self) -> int:
        return self.book.extents[0].batch if self.book.extents else 0

    def slots(self, pool: Pool) -> Ints:
        for kind, pools in enumerate(self.pools):
            if pool is pools.open:
                return self._held(kind)[0]
            if pool is pools.sealed:
                return self._held(kind)[1]
        return NOTHING

    def change(self, kind: int, count: int, padding: Sequence[int], *, dense: bool) -> Change:
        """What `count` more columns do to a kind: made by the first of its layers that asks."""
        change = self.book.changes.get(kind)
        if change is not None:
            return change
        extents = self.book.extents
        extent = extents[kind] if extents else Extent.empty(self.kinds[kind], padding)
        capacity, longest = self.kinds[kind].capacity, int(extent.rows.max(initial=0)) + count
        if capacity is not None and longest > capacity:
            raise CapacityError(
                f"{longest} tokens for a capacity of {capacity}: rewind, reset, or give the spec "
                f"capacity={longest} or none"
            )
        if count == 1 and extent.calm and not self.book.retired:
            change = advanced(extent, 1, self.pools[kind], dense=dense)
            self.book.changes[kind] = change
            return change
        with self._counting():
            self._release()
            self._reserve(kind, extent.batch)
            change = advanced(extent, count, self.pools[kind], dense=dense)
            self.book.changes[kind] = change
        return change

    def arrive(self, leaf: int) -> bool:
        """A layer has its rows. Was it the last one? Then the forward is kept."""
        if len(self.arrived) + 1 < self.leaves:
            self.arrived.add(leaf)
            return False
        book = self.book
        changes = [book.changes[kind] for kind in range(len(self.kinds))]
        dropped = tuple(
            (kind, change.dropped)
            for kind, change in enumerate(changes)
            if len(change.dropped[0]) or len(change.dropped[1])
        )
        self.keep(Book(tuple(change.after for change in changes), book.states, {}, dropped))
        return True

    def keep(self, book: Book) -> None:
        """Let this hold from now on, and no forward be under way."""
        self.book = book
        self.arrived = set()
        self.coming = {}

    def rollback(self) -> bool:
        """Take back what a forward left that never reached every layer; was there one?"""
        if not self.arrived and not self.book.changes:
            return False
        book = self.book
        taken = tuple((kind, change.taken) for kind, change in book.changes.items())
        self.keep(replace(book, changes={}, retired=book.retired + taken))
        return True

    def adopt(
        self, extents: Iterable[Extent], states: tuple[Any, ...], changes: Iterable[Change] = ()
    ) -> None:
        """Other extents over the same pools: their slots are held before the old ones go."""
        with self._counting():
            self._release()
            new = tuple(extents)
            old = self.book.extents
            for pools, extent in zip(self.pools, new, strict=False):
                pools.hold(extent)
            retired = [(kind, change.taken) for kind, change in enumerate(changes)]
            retired += [(k, (e.open_slots(), e.sealed_slots())) for k, e in enumerate(old)]
            self.keep(Book(new, states, {}, tuple(retired)))
            self._release()

    def check(self) -> None:
        """Are the slots of all pools free, or counted as often as they are held?"""
        for pool in self._all():
            pool.check()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Counts change within; where that is interrupted, they are counted anew."""
        pools = self._all()
        for pool in pools:
            if pool.torn:
                pool.recount()
            pool.torn = True
        try:
            yield
        except Exception:
            for pool in pools:
                pool.recount()
            raise
        for pool in pools:
            pool.torn = False

    def _release(self) -> None:
        retired = self.book.retired
        if retired:
            self.book = replace(self.book, retired=())
            for kind, slots in retired:
                self.pools[kind].drop(*slots)

    def _reserve(self, kind: int, batch: int) -> None:
        """The room of a fixed capacity is taken with the first token."""
        one, pools = self.kinds[kind], self.pools[kind]
        if one.capacity is None or self.book.extents:
            return
        open_pages, sealed_pages = most_pages(one, one.capacity)
        pools.open.grow(batch * open_pages)
        pools.sealed.grow(batch * sealed_pages)

    def _held(self, kind: int) -> Slots:
        book, parts = self.book, []
        if book.extents:
            parts.append((book.extents[kind].open_slots(), book.extents[kind].sealed_slots()))
        if kind in book.changes:
            parts.append(book.changes[kind].taken)
        parts += [slots for which, slots in book.retired if which == kind]
        both = tuple(zip(*parts, strict=True)) or ((NOTHING,), (NOTHING,))
        return np.concatenate(both[0]), np.concatenate(both[1])

    def _all(self) -> list[Pool]:
        return [pool for pools in self.pools for pool in (pools.open, pools.sealed)]


def most_pages(kind: Kind, length: int) -> tuple[int, int]:
    """Open and sealed pages that a sequence never passes, a token at a time, up to a length."""
    page, due = kind.page, kind.paging.due
    total = -(-length // page)
    kept = total if kind.window is None else min(total, (kind.window + kind.slack - 2) // page + 2)
    opened, sealed = kept, 0
    if kind.seals:
        tail = kind.paging.tail or 0
        behind = max(tail + kind.slack, kind.paging.dense_until + kind.slack)
        opened = min(kept, (behind + page - 2) // page + 2)
        sealed = min(due(length), kept)
    apart = min(kind.sink_pages, total)
    return min(total, opened + apart), sealed
