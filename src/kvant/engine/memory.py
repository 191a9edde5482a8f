"""What sequences take of a limit of bytes, before anything of it is taken: integers only.

Pages lie in pools that all sequences share. A pool gives nothing back until it is empty, so its
most counts: many short sequences leave open pages behind that a long one has no use for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from kvant.cache.advance import Pools, bound_pages
from kvant.page_table import Ints, LayerGroup
from kvant.planner import Plan

MAX_IDLE_TOKENS = 64  # tokens that a sequence has at most which nobody asked for
STATE_COPIES = 4  # a state, the one to go back to if the next forward dies, and both being copied


@dataclass(frozen=True)
class MemoryModel:
    """Slots that a sequence takes, by its length: open and sealed pages of each kind, a state."""

    groups: tuple[LayerGroup, ...]
    slot_nbytes: Ints  # bytes of each slot
    max_chunk: int  # tokens that are read at once
    num_idle: int = 0  # sequences that nobody asked for

    @classmethod
    def from_plan(
        cls, plan: Plan, max_chunk: int, *, spare_divisor: int = 0, num_idle: int = 0
    ) -> MemoryModel:
        """`spare` of a slot are taken ahead as memory grows, as on a GPU: 1 / spare of it."""
        sizes = [size for both in plan.page_nbytes.values() for size in both]
        if spare_divisor:
            sizes = [size + -(-size // spare_divisor) for size in sizes]
        sizes.append(STATE_COPIES * plan.state_nbytes)
        return cls(tuple(plan.page_nbytes), np.array(sizes), max_chunk, num_idle)

    def count_slots(self, length: int) -> Ints:
        """The most that one takes on its way to a length.

        What a prune keeps is stored before the rest goes, to which others may hold on.
        """
        pages = []
        for kind in self.groups:
            opened, sealed = _max_pages(kind, kind.capacity or length)
            times = 1 if kind.pruning is None else 2
            pages += [times * opened, times * sealed]
        return np.array([*pages, length > 0])

    def count_shared_slots(self, length: int) -> Ints:
        """Those of them that a fork at that length goes on sharing, however long both become."""
        found = []
        for kind in self.groups:
            stays = kind.window is None and kind.pruning is None
            found.append(length // kind.page if stays and not kind.seals else 0)
            found.append(kind.paging.count_due_pages(length) if stays else 0)
        return np.array([*found, 0])

    def count_page_slots(
        self, pages: Mapping[LayerGroup, tuple[int, int]], num_caches: int = 0
    ) -> Ints:
        """Slots of these open and sealed pages by kind, and of the states of so many caches."""
        found = [count for kind in self.groups for count in pages.get(kind, (0, 0))]
        return np.array([*found, -(-num_caches // STATE_COPIES)])

    @cached_property
    def pool_overhead(self) -> Ints:
        """What pools need once: a chunk brings pages that a window lets go of, memory has steps."""
        found = []
        for kind in self.groups:
            passing = 0 if kind.window is None else self.max_chunk // kind.page + 2
            found += [passing + Pools.make(kind).open.step - 1] * 2
        return np.array([*found, 0]) + self.num_idle * self.count_slots(MAX_IDLE_TOKENS)

    def count_transient_slots(self, num_prompt_tokens: int) -> Ints:
        """Open pages that a chunk holds until it is read, and that its last token has sealed.

        They come on top of `slots` while a prompt of this length is read, which is one at a time.
        Those of a window are among `beside`.
        """
        found = []
        for kind in self.groups:
            closes = kind.seals and kind.window is None
            closed = int(kind.find_first_open(np.array([num_prompt_tokens]))[0]) if closes else 0
            found += [min(closed, _max_pages(kind, num_prompt_tokens)[0]), 0]
        return np.array([*found, 0])


_max_pages = lru_cache(1 << 16)(
    bound_pages
)  # asked for every sequence and token where bytes are short


class MemoryBudget:
    """Bytes that pools have taken so far, under a limit."""

    def __init__(self, memory_model: MemoryModel, max_bytes: int | None) -> None:
        self.memory_model = memory_model
        self.max_bytes = max_bytes
        self._peak_slots = self.zero_slots

    @property
    def zero_slots(self) -> Ints:
        return np.zeros(len(self.memory_model.slot_nbytes), np.int64)

    def compute_nbytes(self, slots: Ints) -> int:
        """Bytes once so many slots are taken at a time."""
        return int(
            (np.maximum(self._peak_slots, slots) + self.memory_model.pool_overhead)
            @ self.memory_model.slot_nbytes
        )

    def compute_fresh_nbytes(self, slots: Ints) -> int:
        """The same of pools in which nothing ever was."""
        return int((slots + self.memory_model.pool_overhead) @ self.memory_model.slot_nbytes)

    def fits(self, slots: Ints, extra_slots: Ints | None = None) -> bool:
        """Is there room for so many slots in the pools, and for others beside them?"""
        if self.max_bytes is None:
            return True
        others = 0 if extra_slots is None else int(extra_slots @ self.memory_model.slot_nbytes)
        return self.compute_nbytes(slots) + others <= self.max_bytes

    def record_slots(self, slots: Ints) -> None:
        """So many are taken."""
        self._peak_slots = np.maximum(self._peak_slots, slots)

    @property
    def has_allocations(self) -> bool:
        """Was anything taken since the pools began?"""
        return bool(self._peak_slots.any())

    def reset(self) -> None:
        """All pools are empty, and begin anew."""
        self._peak_slots = self.zero_slots
