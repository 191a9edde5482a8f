"""The committed state of a cache, as one immutable value.

Every operation computes another `CacheState`, and the cache adopts it by one assignment. So an
exception, KeyboardInterrupt included, leaves the old state or the new one for all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvant.cache.layout import CacheLayout
from kvant.cache.recurrent import StateHistory
from kvant.page_table import NO_SLOTS, Ints, PageTable
from kvant.pages.pool import CachePools, GroupSlots, Slots
from kvant.pages.storage import Storage


@dataclass(frozen=True)
class PruningQueries:
    """The newest queries of a layer, retained for its next prune."""

    queries: Tensor  # [B, key heads, query heads per key head, queries, D]
    num_columns: int  # the newest query is at column `num_columns - 1`
    scale: float
    max_queries: int  # older queries are dropped

    def append(self, newer: PruningQueries) -> PruningQueries:
        """Return these queries followed by `newer`, or only `newer` if there is a gap."""
        if newer.num_columns - newer.queries.shape[3] != self.num_columns:
            return newer
        queries = torch.cat([self.queries.to(newer.queries.device), newer.queries], 3)
        return replace(newer, queries=queries[:, :, :, -self.max_queries :].clone())

    def truncate(self, num_columns: int) -> PruningQueries | None:
        """Return the queries of the first `num_columns` columns; None: none is left."""
        count = self.queries.shape[3] - max(0, self.num_columns - num_columns)
        if count <= 0:
            return None
        return replace(
            self,
            queries=self.queries[:, :, :, :count],
            num_columns=min(num_columns, self.num_columns),
        )

    def select(self, sequences: Ints, removed_columns: int) -> PruningQueries:
        """Return the queries of some sequences, after removal of their first `removed_columns`."""
        queries = self.queries[torch.from_numpy(sequences)]
        return replace(self, queries=queries, num_columns=self.num_columns - removed_columns)


@dataclass(frozen=True, eq=False)
class CacheState:
    """What a cache holds between two forwards: integers, and references to tensors.

    A leaf is a part of a layer that stores something; most layers are one leaf.
    """

    layout: CacheLayout
    pools: CachePools
    page_tables: tuple[PageTable, ...] = ()  # by group; (): before the first rows
    histories: tuple[StateHistory, ...] = ()  # of recurrent layers
    storages: Mapping[int, Storage] = field(default_factory=dict)  # by leaf; forks share them
    retired_slots: tuple[GroupSlots, ...] = ()  # to free when the next forward begins
    unreported_length: int | None = None  # a committed length still to report to external states
    pruning_queries: Mapping[int, PruningQueries] = field(default_factory=dict)  # by leaf
    has_unpruned_prompt: bool = False  # a prompt was appended since the last prune
    num_ended_forwards: int = 0  # committed, rolled back or overtaken by another operation

    @classmethod
    def make_empty(cls, layout: CacheLayout, pools: CachePools | None = None) -> CacheState:
        """Return the state of a cache without tokens; by default with pools of its own."""
        return cls(
            layout,
            pools or CachePools(layout.layer_groups),
            histories=tuple(StateHistory() for _ in layout.recurrent),
        )

    @property
    def batch(self) -> int:
        """The number of sequences; 0 before the first rows."""
        return self.page_tables[0].batch if self.page_tables else 0

    @property
    def ragged(self) -> bool:
        """Whether sequences differ in length even with padding counted, as after a merge."""
        # All groups have the same sequences.
        return bool(self.page_tables) and self.page_tables[0].ragged

    def get_page_table(self, group: int) -> PageTable | None:
        """Return the table of a layer group; None before the first rows."""
        return self.page_tables[group] if self.page_tables else None

    @cached_property
    def is_empty(self) -> bool:
        """Whether no column has been appended since the cache was created or reset."""
        return not any(page_table.num_columns for page_table in self.page_tables)

    @cached_property
    def lengths(self) -> set[int]:
        """The numbers of columns of all layers, normally a single one."""
        lengths = {page_table.num_columns for page_table in self.page_tables}
        for history in self.histories:
            lengths.add(history.current.length)
        return lengths

    @cached_property
    def length(self) -> int:
        """The number of columns that all layers have: the tokens of the longest sequence."""
        return min(self.lengths, default=0)

    def list_table_slots(self) -> list[GroupSlots]:
        """Return the slots of the page tables, by group."""
        return [
            (group, (table.list_open_slots(), table.list_sealed_slots()))
            for group, table in enumerate(self.page_tables)
        ]

    @cached_property
    def distinct_slots(self) -> tuple[Slots, ...]:
        """The slots of the page tables and those to free, by group, each once and sorted."""
        slots = [*self.list_table_slots(), *self.retired_slots]
        by_group = [
            [pair for slots_group, pair in slots if slots_group == group] or [NO_SLOTS]
            for group in range(len(self.pools))
        ]
        return tuple(
            (np.unique(np.concatenate(open_slots)), np.unique(np.concatenate(sealed_slots)))
            for open_slots, sealed_slots in (zip(*pairs, strict=True) for pairs in by_group)
        )
