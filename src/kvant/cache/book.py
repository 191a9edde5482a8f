"""What a cache is between two forwards, and what the one under way makes of it: a value.

Every verb ends in the assignment of another one, so all layers change together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvant.cache.changes import Pools
from kvant.cache.storage import Storage
from kvant.extent import Change, Extent, Ints

Slots = tuple[Ints, Ints]  # of open pages and of sealed ones
Retired = tuple[int, Slots]  # by kind


@dataclass(frozen=True)
class Asked:
    """The newest queries of a layer, until rows are pruned by them."""

    queries: Tensor  # [B, H, group, m, D]
    columns: int  # the last of them is at the last of so many
    scale: float
    most: int  # queries that are kept

    def then(self, new: Asked) -> Asked:
        """These, and behind them those of the next tokens."""
        if new.columns - new.queries.shape[3] != self.columns:
            return new
        queries = torch.cat([self.queries.to(new.queries.device), new.queries], 3)
        return replace(new, queries=queries[:, :, :, -self.most :].clone())

    def cut(self, columns: int) -> Asked | None:
        """Without those of tokens that were taken back; None: none is left."""
        count = self.queries.shape[3] - max(0, self.columns - columns)
        if count <= 0:
            return None
        return replace(
            self, queries=self.queries[:, :, :, :count], columns=min(columns, self.columns)
        )

    def of(self, sequences: Ints, gone: int) -> Asked:
        """Those of some sequences, before which so many columns are gone."""
        queries = self.queries[torch.from_numpy(sequences)]
        return replace(self, queries=queries, columns=self.columns - gone)


@dataclass(frozen=True)
class Book:
    """The committed extents, one a kind, and what a forward under way makes of them."""

    pools: tuple[Pools, ...]  # by kind
    extents: tuple[Extent, ...] = ()  # by kind; none before the first rows
    states: tuple[Any, ...] = ()  # of the layers that recur
    storages: dict[int, Storage] = field(default_factory=dict)  # by leaf; shared with other caches
    changes: dict[int, Change] = field(default_factory=dict)  # by kind
    retired: tuple[Retired, ...] = ()  # dropped when the next change begins
    arrived: set[int] = field(default_factory=set)  # leaves that the forward under way has reached
    coming: dict[int, Any] = field(default_factory=dict)  # by place: its states of those that recur
    to_follow: int | None = None  # a length that states of the host were not told of
    asked: dict[int, Asked] = field(default_factory=dict)  # by leaf, of those that prune
    prompted: bool = False  # did a prompt come since rows were pruned?

    @cached_property
    def lengths(self) -> set[int]:
        """How many columns layers have seen: one number, as a rule."""
        seen = set[int]()
        for extent in self.extents:
            seen.add(extent.columns)
        for past in self.states:
            seen.add(past.now.length)
        return seen

    @cached_property
    def length(self) -> int:
        """Tokens that all have, of the longest sequence."""
        return min(self.lengths, default=0)
