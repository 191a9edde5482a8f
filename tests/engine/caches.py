"""Simulate the caches of an engine's batch: real page tables and pools, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cache.lives import IntegerCache
from kvant.engine.memory import MemoryModel
from kvant.page_table import Bools, Ints
from kvant.pages.advance import (
    concat_tables,
    is_exact_rewind,
    mask_reachable,
    rewind_table,
    select_sequences,
)
from kvant.pages.pool import CachePools, Pool

Slots = list[Ints]  # by pool: open and sealed pages of each layer group


@dataclass(eq=False)
class SimulatedSequence:
    """A sequence; its cache is None while it is in the batch."""

    cache: IntegerCache | None = None


class SimulatedBatch:
    """The caches of `kvant.engine.batch.Batch`, with page tables alone."""

    def __init__(self, memory_model: MemoryModel) -> None:
        self.layer_groups = memory_model.groups
        self.slot_nbytes = memory_model.slot_nbytes[:-2]  # without states and images
        self.clear()

    def clear(self) -> None:
        """Free all memory: replace the pools."""
        self.group_pools = CachePools(self.layer_groups)
        # As in an engine, a second cache uses the pools, so that they never move their pages.
        self.empty_cache = self.make_cache()
        self.batch_cache: IntegerCache | None = None
        self.sequences: list[SimulatedSequence] = []

    def make_cache(self) -> IntegerCache:
        return IntegerCache(self.group_pools)

    @property
    def nbytes(self) -> int:
        """Bytes that pools have allocated; they free nothing before `clear`."""
        return int(self.num_allocated @ self.slot_nbytes)

    @property
    def num_allocated(self) -> Ints:
        """Pages that each pool has allocated."""
        return np.array([pool.size for pool in self._pools])

    @property
    def num_used(self) -> int:
        """Pages that any cache references."""
        for pool in self._pools:
            pool.collect_orphans()
        return sum(pool.size - pool.num_free for pool in self._pools)

    def count_tokens(self, sequence: SimulatedSequence) -> int:
        cache, index = self._locate(sequence)
        if cache is None or not cache.state.batch:
            return 0
        return int(cache.state.page_tables[0].seq_lens[index])

    def prefill(self, sequence: SimulatedSequence, count: int) -> None:
        """Append a chunk of a prompt."""
        if sequence.cache is None:
            sequence.cache = self.make_cache()
        _append(sequence.cache, count)

    def fork(self, sequence: SimulatedSequence) -> SimulatedSequence:
        cache, index = self._locate(sequence)
        return SimulatedSequence(None if cache is None else self._extract(cache, [index]))

    def rewind(self, sequence: SimulatedSequence, length: int) -> None:
        """Rewind to a length at which no sealed page is decoded; see `find_resumable_length`."""
        cache = sequence.cache
        assert cache is not None
        plans = [
            rewind_table(page_table, np.array([length]), pools)
            for page_table, pools in zip(cache.state.page_tables, self.group_pools, strict=True)
        ]
        allocated = [(group, plan.allocated_slots) for group, plan in enumerate(plans)]
        cache.replace_tables([plan.new_table for plan in plans], allocated)

    def find_resumable_length(self, sequence: SimulatedSequence, max_length: int) -> int:
        """Return the longest length to rewind to without decoding a page; 0 if there is none."""
        page = max(group.page for group in self.layer_groups)
        lengths = [min(max_length, self.count_tokens(sequence))]
        lengths.append(lengths[0] // page * page)
        return next((n for n in lengths if self._is_exact_rewind(sequence, n)), 0)

    def decode(self, sequences: Sequence[SimulatedSequence]) -> None:
        """Append a token to each sequence; the batch is of exactly these."""
        self._merge_batch(sequences)
        assert self.batch_cache is not None
        _append(self.batch_cache, 1)

    def release(self, sequence: SimulatedSequence) -> None:
        if sequence in self.sequences:
            self._select([other for other in self.sequences if other is not sequence])
        sequence.cache = None

    def list_slots(self, sequence: SimulatedSequence) -> Slots:
        assert sequence.cache is not None
        return [sequence.cache.list_slots(pool) for pool in self._pools]

    def mask_slots(self, all_slots: Sequence[Slots]) -> list[Bools]:
        """Return masks of the pages of each pool that are in any of `all_slots`."""
        masks = [np.zeros(pool.size, np.bool_) for pool in self._pools]
        for slots in all_slots:
            for mask, pool_slots in zip(masks, slots, strict=True):
                mask[pool_slots] = True
        return masks

    def has_outside_users(self, slots: Slots, all_slots: Sequence[Slots]) -> bool:
        """Return whether a page that is in `slots` alone of `all_slots` has another reference."""
        for number, pool in enumerate(self._pools):
            pool.collect_orphans()
            counts = np.zeros(pool.size, np.int64)
            for other in all_slots:
                counts[other[number]] += 1
            unique = slots[number][counts[slots[number]] == 1]
            if (pool.ref_counts[unique] > 1).any():
                return True
        return False

    def count_shared_pages(
        self, sequence: SimulatedSequence, length: int, masks: Sequence[Bools]
    ) -> Ints:
        """Count the whole pages of the first tokens that are in `masks`, by pool."""
        cache, index = self._locate(sequence)
        counts = np.zeros(len(self._pools) + 2, np.int64)  # with states and images
        if cache is None or not cache.state.batch:
            return counts
        for number, (group, page_table) in enumerate(
            zip(self.layer_groups, cache.state.page_tables, strict=True)
        ):
            if group.window is None:
                end = min(length, int(page_table.seq_lens[index]))
                count = group.paging.count_due_pages(end) if group.seals else end // group.page
                slots = page_table.sealed_table if group.seals else page_table.open_table
                pool = 2 * number + group.seals
                counts[pool] = masks[pool][slots[index, :count]].sum()
        return counts

    @property
    def _pools(self) -> list[Pool]:
        return [pool for pools in self.group_pools for pool in pools]

    def _locate(self, sequence: SimulatedSequence) -> tuple[IntegerCache | None, int]:
        if sequence in self.sequences:
            return self.batch_cache, self.sequences.index(sequence)
        return sequence.cache, 0

    def _is_exact_rewind(self, sequence: SimulatedSequence, length: int) -> bool:
        if sequence.cache is None or not length:
            return False
        lengths = np.array([length])
        return all(
            bool(mask_reachable(page_table, lengths).all()) and is_exact_rewind(page_table, lengths)
            for page_table in sequence.cache.state.page_tables
        )

    def _extract(self, cache: IntegerCache, indices: Sequence[int]) -> IntegerCache:
        copy = self.make_cache()
        if cache.state.batch:
            copy.replace_tables([select_sequences(t, np.array(indices)) for t in cache.page_tables])
        return copy

    def _merge(self, caches: Sequence[IntegerCache]) -> IntegerCache:
        merged = self.make_cache()
        groups = range(len(self.layer_groups))
        merged.replace_tables(
            [concat_tables([cache.page_tables[group] for cache in caches]) for group in groups]
        )
        return merged

    def _merge_batch(self, sequences: Sequence[SimulatedSequence]) -> None:
        """Make a batch of exactly these; no other cache has them afterwards."""
        for sequence in [other for other in self.sequences if other not in sequences]:
            sequence.cache = self.fork(sequence).cache
        remaining = [sequence for sequence in self.sequences if sequence in sequences]
        if remaining != self.sequences:
            self._select(remaining)
        if new := [sequence for sequence in sequences if sequence not in self.sequences]:
            caches = [self.batch_cache, *(sequence.cache for sequence in new)]
            self.batch_cache = self._merge([cache for cache in caches if cache is not None])
            self.sequences = [*self.sequences, *new]
            for sequence in new:
                sequence.cache = None

    def _select(self, sequences: list[SimulatedSequence]) -> None:
        """Reduce the batch to `sequences`."""
        if sequences:
            assert self.batch_cache is not None
            indices = np.array([self.sequences.index(sequence) for sequence in sequences])
            self.batch_cache.replace_tables(
                [select_sequences(t, indices) for t in self.batch_cache.page_tables]
            )
        else:
            self.batch_cache = None
        self.sequences = sequences


def _append(cache: IntegerCache, count: int) -> None:
    cache.append(max(cache.state.batch, 1), count, new_rows_dense=count > 1)
    cache.free_retired_pages()
