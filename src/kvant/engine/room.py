"""What sequences take of a limit of bytes, before anything of it is taken: integers only.

Pages lie in pools that all sequences share. A pool gives nothing back until it is empty, so its
most counts: many short sequences leave open pages behind that a long one has no use for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from kvant.cache.changes import Pools, most_pages
from kvant.extent import Ints, Kind
from kvant.planner import Plan

IDLE = 64  # tokens that a sequence has at most which nobody asked for
STATES = 4  # a state, the one to go back to if the next forward dies, and both being copied


@dataclass(frozen=True)
class Footprint:
    """Slots that a sequence takes, by its length: open and sealed pages of each kind, a state."""

    kinds: tuple[Kind, ...]
    sizes: Ints  # bytes of each slot
    chunk: int  # tokens that are read at once
    idle: int = 0  # sequences that nobody asked for

    @classmethod
    def of(cls, plan: Plan, chunk: int, *, spare: int = 0, idle: int = 0) -> Footprint:
        """`spare` of a slot are taken ahead as memory grows, as on a GPU: 1 / spare of it."""
        sizes = [size for both in plan.page_nbytes.values() for size in both]
        if spare:
            sizes = [size + -(-size // spare) for size in sizes]
        sizes.append(STATES * plan.state_nbytes)
        return cls(tuple(plan.page_nbytes), np.array(sizes), chunk, idle)

    def slots(self, length: int) -> Ints:
        """The most that one takes on its way to a length.

        What a prune keeps is stored before the rest goes, to which others may hold on.
        """
        pages = []
        for kind in self.kinds:
            opened, sealed = _pages(kind, kind.capacity or length)
            times = 1 if kind.prune is None else 2
            pages += [times * opened, times * sealed]
        return np.array([*pages, length > 0])

    def shared(self, length: int) -> Ints:
        """Those of them that a fork at that length goes on sharing, however long both become."""
        found = []
        for kind in self.kinds:
            stays = kind.window is None and kind.prune is None
            found.append(length // kind.page if stays and not kind.seals else 0)
            found.append(kind.paging.due(length) if stays else 0)
        return np.array([*found, 0])

    def pages(self, pages: Mapping[Kind, tuple[int, int]], caches: int = 0) -> Ints:
        """Slots of these open and sealed pages by kind, and of the states of so many caches."""
        found = [count for kind in self.kinds for count in pages.get(kind, (0, 0))]
        return np.array([*found, -(-caches // STATES)])

    @cached_property
    def beside(self) -> Ints:
        """What pools need once: a chunk brings pages that a window lets go of, memory has steps."""
        found = []
        for kind in self.kinds:
            passing = 0 if kind.window is None else self.chunk // kind.page + 2
            found += [passing + Pools.of(kind).open.step - 1] * 2
        return np.array([*found, 0]) + self.idle * self.slots(IDLE)

    def closing(self, prompt: int) -> Ints:
        """Open pages that a chunk holds until it is read, and that its last token has sealed.

        They come on top of `slots` while a prompt of this length is read, which is one at a time.
        Those of a window are among `beside`.
        """
        found = []
        for kind in self.kinds:
            closes = kind.seals and kind.window is None
            closed = int(kind.first_open(np.array([prompt]))[0]) if closes else 0
            found += [min(closed, _pages(kind, prompt)[0]), 0]
        return np.array([*found, 0])


_pages = lru_cache(1 << 16)(most_pages)  # asked for every sequence and token where bytes are short


class Room:
    """Bytes that pools have taken so far, under a limit."""

    def __init__(self, footprint: Footprint, max_bytes: int | None) -> None:
        self.footprint = footprint
        self.max_bytes = max_bytes
        self._most = self.nothing

    @property
    def nothing(self) -> Ints:
        return np.zeros(len(self.footprint.sizes), np.int64)

    def nbytes(self, slots: Ints) -> int:
        """Bytes once so many slots are taken at a time."""
        return int((np.maximum(self._most, slots) + self.footprint.beside) @ self.footprint.sizes)

    def alone(self, slots: Ints) -> int:
        """The same of pools in which nothing ever was."""
        return int((slots + self.footprint.beside) @ self.footprint.sizes)

    def fits(self, slots: Ints, beside: Ints | None = None) -> bool:
        """Is there room for so many slots in the pools, and for others beside them?"""
        if self.max_bytes is None:
            return True
        others = 0 if beside is None else int(beside @ self.footprint.sizes)
        return self.nbytes(slots) + others <= self.max_bytes

    def use(self, slots: Ints) -> None:
        """So many are taken."""
        self._most = np.maximum(self._most, slots)

    @property
    def used(self) -> bool:
        """Was anything taken since the pools began?"""
        return bool(self._most.any())

    def renew(self) -> None:
        """All pools are empty, and begin anew."""
        self._most = self.nothing
