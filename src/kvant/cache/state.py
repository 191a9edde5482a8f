"""What a cache is between two forwards, and what the one under way makes of it: a value.

Every verb ends in the assignment of another one, so all layers change together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvant.cache.advance import Pools
from kvant.cache.storage import Storage
from kvant.page_table import AppendPlan, Ints, PageTable

Slots = tuple[Ints, Ints]  # of open pages and of sealed ones
RetiredSlots = tuple[int, Slots]  # by kind


@dataclass(frozen=True)
class PruningQueries:
    """The newest queries of a layer, until rows are pruned by them."""

    queries: Tensor  # [B, H, group, m, D]
    num_columns: int  # the last of them is at the last of so many
    scale: float
    max_queries: int  # queries that are kept

    def append(self, newer: PruningQueries) -> PruningQueries:
        """These, and behind them those of the next tokens."""
        if newer.num_columns - newer.queries.shape[3] != self.num_columns:
            return newer
        queries = torch.cat([self.queries.to(newer.queries.device), newer.queries], 3)
        return replace(newer, queries=queries[:, :, :, -self.max_queries :].clone())

    def truncate(self, num_columns: int) -> PruningQueries | None:
        """Without those of tokens that were taken back; None: none is left."""
        count = self.queries.shape[3] - max(0, self.num_columns - num_columns)
        if count <= 0:
            return None
        return replace(
            self,
            queries=self.queries[:, :, :, :count],
            num_columns=min(num_columns, self.num_columns),
        )

    def select(self, sequences: Ints, removed_columns: int) -> PruningQueries:
        """Those of some sequences, before which so many columns are gone."""
        queries = self.queries[torch.from_numpy(sequences)]
        return replace(self, queries=queries, num_columns=self.num_columns - removed_columns)


@dataclass(frozen=True)
class CacheState:
    """The committed extents, one a kind, and what a forward under way makes of them."""

    pools: tuple[Pools, ...]  # by kind
    page_tables: tuple[PageTable, ...] = ()  # by kind; none before the first rows
    histories: tuple[Any, ...] = ()  # of the layers that recur
    storages: dict[int, Storage] = field(default_factory=dict)  # by leaf; shared with other caches
    plans: dict[int, AppendPlan] = field(default_factory=dict)  # by kind
    retired_slots: tuple[RetiredSlots, ...] = ()  # dropped when the next change begins
    appended_leaves: set[int] = field(
        default_factory=set
    )  # leaves that the forward under way has reached
    new_histories: dict[int, Any] = field(
        default_factory=dict
    )  # by place: its states of those that recur
    unreported_length: int | None = None  # a length that states of the host were not told of
    pruning_queries: dict[int, PruningQueries] = field(
        default_factory=dict
    )  # by leaf, of those that prune
    has_unpruned_prompt: bool = False  # did a prompt come since rows were pruned?

    @cached_property
    def lengths(self) -> set[int]:
        """How many columns layers have seen: one number, as a rule."""
        seen = set[int]()
        for extent in self.page_tables:
            seen.add(extent.num_columns)
        for past in self.histories:
            seen.add(past.current.length)
        return seen

    @cached_property
    def length(self) -> int:
        """Tokens that all have, of the longest sequence."""
        return min(self.lengths, default=0)
