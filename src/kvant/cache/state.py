"""The state of a cache between two forwards, and the plans of the open forward, as one value.

Every operation ends in one assignment of a new value, so all layers change together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvant.cache.advance import Pools
from kvant.cache.storage import Storage
from kvant.page_table import AppendPlan, Ints, PageTable

if TYPE_CHECKING:
    from kvant.cache.recurrent import StateHistory

Slots = tuple[Ints, Ints]  # of open and of sealed pages
RetiredSlots = tuple[int, Slots]  # layer group, slots


@dataclass(frozen=True)
class PruningQueries:
    """The newest queries of a layer, retained for its next prune."""

    queries: Tensor  # [B, H, group, m, D]
    num_columns: int  # the last query is that of column `num_columns - 1`
    scale: float
    max_queries: int  # older queries are dropped

    def append(self, newer: PruningQueries) -> PruningQueries:
        """Return these queries with `newer` ones, of the next tokens, appended."""
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
        """Return the queries of some sequences, whose first `removed_columns` are removed."""
        queries = self.queries[torch.from_numpy(sequences)]
        return replace(self, queries=queries, num_columns=self.num_columns - removed_columns)


@dataclass(frozen=True)
class CacheState:
    """The committed page tables, one per layer group, and the plans of an open forward.

    A forward appends to the layers in turn:

        layers appended        state
        none                   no forward is open
        some                   `plans` per group; `appended_leaves` and `new_histories` per layer
        all                    committed: a new CacheState with the tables of the plans
        some, then the first   the forward has failed: it is rolled back, and another one begins
    """

    pools: tuple[Pools, ...]  # by group
    page_tables: tuple[PageTable, ...] = ()  # by group; (): before the first rows
    histories: tuple[StateHistory, ...] = ()  # of recurrent layers
    storages: dict[int, Storage] = field(default_factory=dict)  # by leaf; shared with other caches
    plans: dict[int, AppendPlan] = field(default_factory=dict)  # by group
    retired_slots: tuple[RetiredSlots, ...] = ()  # freed before the next allocation
    appended_leaves: set[int] = field(default_factory=set)  # layers with rows of the open forward
    new_histories: dict[int, StateHistory] = field(default_factory=dict)  # by index in `histories`
    unreported_length: int | None = None  # a committed length still to report to external states
    pruning_queries: dict[int, PruningQueries] = field(default_factory=dict)  # by leaf
    has_unpruned_prompt: bool = False  # a prompt was appended since the last prune

    @cached_property
    def lengths(self) -> set[int]:
        """The numbers of columns of all layers, normally a single one."""
        lengths = set[int]()
        for page_table in self.page_tables:
            lengths.add(page_table.num_columns)
        for history in self.histories:
            lengths.add(history.current.length)
        return lengths

    @cached_property
    def length(self) -> int:
        """Tokens of the longest sequence that all layers have."""
        return min(self.lengths, default=0)
