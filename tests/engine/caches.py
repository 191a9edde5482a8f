"""The caches of an engine in integers: real page tables over real pools, and no rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvant.cache.advance import (
    Pools,
    concat_tables,
    is_exact_rewind,
    mask_reachable,
    rewind_table,
    select_sequences,
)
from kvant.cache.pool import Pool
from kvant.cache.tracker import StateTracker
from kvant.engine.memory import MemoryModel
from kvant.page_table import Bools, Ints

Slots = list[Ints]  # by pool: open and sealed pages of each kind


@dataclass(eq=False)
class Line:
    """A sequence; its cache is None while it is one of the batch."""

    cache: StateTracker | None = None


class Caches:
    """What `kvant.engine.batch.Batch` does with caches, done with their page tables."""

    def __init__(self, footprint: MemoryModel) -> None:
        self.kinds, self.sizes = footprint.groups, footprint.slot_nbytes[:-1]
        self.renew()

    def renew(self) -> None:
        """Free all memory: pools begin anew."""
        self.pools = [Pools.make(kind) for kind in self.kinds]
        self.idle = self.empty()  # a second holder, as in an engine: pages are not moved together
        self.batch: StateTracker | None = None
        self.lines: list[Line] = []

    def empty(self) -> StateTracker:
        return StateTracker(self.kinds, self.pools, range(len(self.kinds)))

    @property
    def nbytes(self) -> int:
        """Bytes that pools have allocated; they give nothing back before `renew`."""
        return int(self.allocated @ self.sizes)

    @property
    def allocated(self) -> Ints:
        """Pages that each pool has allocated."""
        return np.array([pool.size for pool in self._pools])

    @property
    def held(self) -> int:
        """Pages that any cache holds."""
        for pool in self._pools:
            pool.collect_orphans()
        return sum(pool.size - pool.num_free for pool in self._pools)

    def length(self, line: Line) -> int:
        cache, place = self._place(line)
        return (
            0
            if cache is None or not cache.batch
            else int(cache.state.page_tables[0].seq_lens[place])
        )

    def read(self, line: Line, count: int) -> None:
        """Append a chunk of a prompt."""
        if line.cache is None:
            line.cache = self.empty()
        _append(line.cache, count)

    def fork(self, line: Line) -> Line:
        cache, place = self._place(line)
        return Line(None if cache is None else self._selected(cache, [place]))

    def rewind(self, line: Line, length: int) -> None:
        """Go back to a length from which no page has to be decoded; see `resumable`."""
        cache = line.cache
        assert cache is not None
        changes = [
            rewind_table(extent, np.array([length]), pools)
            for extent, pools in zip(cache.state.page_tables, self.pools, strict=True)
        ]
        with cache.guard_counts():
            taken = [(kind, change.allocated_slots) for kind, change in enumerate(changes)]
            cache.replace_tables([change.new_table for change in changes], (), taken)

    def resumable(self, line: Line, length: int) -> int:
        """The longest length <= `length` to rewind to without decoding a page; 0 where none is."""
        page = max(kind.page for kind in self.kinds)
        lengths = [min(length, self.length(line))]
        lengths.append(lengths[0] // page * page)
        return next((n for n in lengths if self._rewinds(line, n)), 0)

    def decode(self, lines: Sequence[Line]) -> None:
        """Append a token to each; the batch is of exactly these."""
        self._gather(lines)
        assert self.batch is not None
        _append(self.batch, 1)

    def drop(self, line: Line) -> None:
        if line in self.lines:
            self._stay([one for one in self.lines if one is not line])
        line.cache = None

    def slots(self, line: Line) -> Slots:
        assert line.cache is not None
        return [line.cache.list_slots(pool) for pool in self._pools]

    def among(self, slots: Sequence[Slots]) -> list[Bools]:
        """By pool, which of its pages are among these."""
        found = [np.zeros(pool.size, np.bool_) for pool in self._pools]
        for one in slots:
            for mask, some in zip(found, one, strict=True):
                mask[some] = True
        return found

    def others(self, slots: Slots, all_slots: Sequence[Slots]) -> bool:
        """Whether any page that one of `all_slots` has alone among them has a holder elsewhere."""
        for number, pool in enumerate(self._pools):
            pool.collect_orphans()
            counts = np.zeros(pool.size, np.int64)
            for some in all_slots:
                counts[some[number]] += 1
            own = slots[number][counts[slots[number]] == 1]
            if (pool.ref_counts[own] > 1).any():
                return True
        return False

    def shared(self, line: Line, length: int, among: Sequence[Bools]) -> Ints:
        """By pool, the whole pages of the first tokens of a sequence that are `among` others."""
        cache, place = self._place(line)
        found = np.zeros(len(self._pools) + 1, np.int64)
        if cache is None or not cache.batch:
            return found
        for number, (kind, extent) in enumerate(
            zip(self.kinds, cache.state.page_tables, strict=True)
        ):
            if kind.window is None:
                seen = min(length, int(extent.seq_lens[place]))
                count = kind.paging.count_due_pages(seen) if kind.seals else seen // kind.page
                table = extent.sealed_table if kind.seals else extent.open_table
                at = 2 * number + kind.seals
                found[at] = among[at][table[place, :count]].sum()
        return found

    @property
    def _pools(self) -> list[Pool]:
        return [pool for pools in self.pools for pool in pools]

    def _place(self, line: Line) -> tuple[StateTracker | None, int]:
        if line in self.lines:
            return self.batch, self.lines.index(line)
        return line.cache, 0

    def _rewinds(self, line: Line, length: int) -> bool:
        if line.cache is None or not length:
            return False
        at = np.array([length])
        return all(
            bool(mask_reachable(e, at).all()) and is_exact_rewind(e, at)
            for e in line.cache.state.page_tables
        )

    def _selected(self, cache: StateTracker, index: Sequence[int]) -> StateTracker:
        twin = self.empty()
        if cache.batch:
            with twin.guard_counts():
                twin.replace_tables(
                    [select_sequences(e, np.array(index)) for e in cache.state.page_tables], ()
                )
        return twin

    def _merged(self, caches: Sequence[StateTracker]) -> StateTracker:
        merged = self.empty()
        kinds = range(len(self.kinds))
        with merged.guard_counts():
            merged.replace_tables(
                [concat_tables([one.state.page_tables[kind] for one in caches]) for kind in kinds],
                (),
            )
        return merged

    def _gather(self, lines: Sequence[Line]) -> None:
        """Make the batch one of exactly these; other caches of them are gone when it returns."""
        for line in [line for line in self.lines if line not in lines]:
            line.cache = self.fork(line).cache
        stay = [line for line in self.lines if line in lines]
        if stay != self.lines:
            self._stay(stay)
        if new := [line for line in lines if line not in self.lines]:
            caches = [self.batch, *(line.cache for line in new)]
            self.batch = self._merged([cache for cache in caches if cache is not None])
            self.lines = [*self.lines, *new]
            for line in new:
                line.cache = None

    def _stay(self, lines: list[Line]) -> None:
        """Go on with these sequences of the batch."""
        if lines:
            assert self.batch is not None
            index = np.array([self.lines.index(line) for line in lines])
            with self.batch.guard_counts():
                self.batch.replace_tables(
                    [select_sequences(e, index) for e in self.batch.state.page_tables], ()
                )
        else:
            self.batch = None
        self.lines = lines


def _append(cache: StateTracker, count: int) -> None:
    for kind in range(len(cache.layer_groups)):
        cache.plan_append(kind, max(cache.batch, 1), count, new_rows_dense=count > 1)
    for kind in range(len(cache.layer_groups)):
        cache.commit_layer(kind)
    with cache.guard_counts():
        cache.free_retired_slots()
