"""The rows of sequences of equal length: which exist, and reading them with tensor operations.

A `LengthGroup` is the unit of the reference backend and of the readers that decode rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvant.attention.mask import BlockVisibility, classify_block, evaluate_mask
from kvant.attention.write_rows import decode_pages
from kvant.contracts import Mask, View
from kvant.lazy import Memo
from kvant.page_table import PADDING, Ints, PageTable

BlockPart = Literal["sinks", "sealed", "open", "new"]
# The sequences of each length group; None: all of a table.
LENGTH_GROUPS: Memo[list[Ints | None]] = Memo("length groups")
# The results of `has_visible_rows`: by queries, mask, `new_rows_dense`, `num_new`.
VISIBLE_ROWS: Memo[dict[tuple[int, Mask, bool, int], bool]] = Memo("visible rows")


@dataclass(frozen=True)
class KeyBlock:
    """Key positions [start, stop), all read from one kind of storage."""

    part: BlockPart
    start: int
    stop: int


@dataclass(frozen=True)
class LengthGroup:
    """Sequences of a view with equal lengths; the first one's page numbers serve for all."""

    view: View
    indices: Ints | None  # None: every sequence of the view
    page_mask: Tensor | None = None  # [B, heads, T, pages]: the sealed pages to read; None: all

    @cached_property
    def first_sequence(self) -> int:
        return 0 if self.indices is None else int(self.indices[0])

    @cached_property
    def length(self) -> int:
        return int(self.view.page_table.lengths[self.first_sequence])

    @cached_property
    def new_from(self) -> int:
        """First position whose row is read from the new rows of the forward."""
        return max(0, self.length - self.view.num_new)

    @cached_property
    def first_visible(self) -> int:
        """First position that any query may see."""
        return int(self.view.page_table.first_visible[self.first_sequence])

    @property
    def sinks(self) -> int:
        return self.view.page_table.layer_group.sinks

    def compute_dense_from(self, query: int) -> int:
        """Return the position below which this query reads sealed rows, and dense ones from it."""
        paging = self.view.page_table.layer_group.paging
        due = paging.count_due_pages(query + 1) * paging.page
        return min(due, self.new_from) if self.view.new_rows_dense else due

    def select_sequences(self, rows: Tensor) -> Tensor:
        return rows if self.indices is None else rows[torch.from_numpy(self.indices)]

    def iterate_blocks(self, num_queries: int, max_values: int) -> Iterator[KeyBlock]:
        """Yield the rows that the newest queries may see, at most `max_values` decoded at once."""
        page_table, page = self.view.page_table, self.view.page_table.layer_group.page
        count = page_table.num_tables if self.indices is None else len(self.indices)
        max_dim = max(self.view.keys.dim, self.view.values.dim)
        step = page * max(1, max_values // (count * self.view.keys.heads * max_dim * page))
        if sinks := min(self.sinks, self.new_from):
            yield KeyBlock("sinks", 0, sinks)
        stop_sealed = page * int(page_table.stop_sealed[self.first_sequence])
        dense_from = min(self.compute_dense_from(self.length - 1), stop_sealed)
        first_sealed = page * int(page_table.first_sealed[self.first_sequence])
        for start in range(first_sealed, dense_from, step):
            yield KeyBlock("sealed", start, min(start + step, -(-dense_from // page) * page))
        first_open = page * int(page_table.first_open[self.first_sequence])
        if first_open <= page * page_table.layer_group.num_sink_pages:
            first_open = 0  # pages of sinks stay open, and the other open pages follow them
        low = max(first_open, self.compute_dense_from(self.length - num_queries))
        for start in range(low // page * page, self.new_from, step):
            yield KeyBlock("open", start, min(start + step, self.new_from))
        for start in range(self.new_from, self.length, step):
            yield KeyBlock("new", start, min(start + step, self.length))

    def read_rows(self, side: Literal["keys", "values"], block: KeyBlock) -> Tensor:
        """Return the rows of a block, [B, H, n, D]."""
        view = self.view
        if block.part == "new":
            assert view.new_rows is not None
            column = block.start - self.length + view.num_new
            name = "keys" if view.values is view.keys else side
            new_rows = self.select_sequences(view.new_rows[name])
            return new_rows[:, :, column : column + block.stop - block.start]
        stored = view.keys if side == "keys" else view.values
        page_table, page = view.page_table, view.page_table.layer_group.page
        first, stop = block.start // page, -(-block.stop // page)
        sealed = block.part == "sealed"
        table = page_table.sealed_table if sealed else page_table.open_table
        table = table[:, first:stop] if self.indices is None else table[self.indices, first:stop]
        slots = torch.from_numpy(table)
        if sealed:
            opened = decode_pages(stored, side, slots)
        else:
            opened = stored.open[slots.to(stored.open.device)]
        rows = opened.transpose(1, 2).flatten(2, 3)
        return rows[:, :, block.start - first * page : block.stop - first * page]

    def classify_block(
        self, mask: Mask | Tensor, q0: int, q1: int, block: KeyBlock
    ) -> BlockVisibility:
        """Tell whether queries at positions [q0, q1) see all, some or none of a block."""
        low, high = self.compute_dense_from(q0), self.compute_dense_from(q1 - 1)
        state: BlockVisibility
        if block.part == "sealed":
            state = "all" if block.stop <= low else "none" if block.start >= high else "some"
        elif block.part == "sinks":
            state = "all"
        else:
            state = "all" if block.start >= high else "none" if block.stop <= low else "some"
            if state == "none" and block.start < self.sinks:
                state = "some"
        if state == "none" or isinstance(mask, Tensor):
            return "none" if state == "none" else "some"
        if block.part == "sealed" and self.page_mask is not None:
            state = "some"
        rule = classify_block(mask, q0, q1, block.start, block.stop - 1)
        if rule == "none":
            return "some" if block.start < mask.sinks else "none"
        partial = block.part != "sinks" and block.start < self.sinks
        partial = partial or block.start < self.first_visible
        return "all" if state == rule == "all" and q0 >= 0 and not partial else "some"

    def make_block_mask(self, mask: Mask | Tensor, q0: int, q1: int, block: KeyBlock) -> Tensor:
        """Return a mask [B, heads or 1, q1 - q0, keys]: booleans, or floats to add if `mask` is."""
        device = self.view.keys.open.device
        q = torch.arange(q0, q1, device=device)[:, None]
        k = torch.arange(block.start, block.stop, device=device)
        exists = k < self.new_from if block.part in ("sinks", "open") else k < self.length
        if block.part != "sinks":
            borders = [self.compute_dense_from(i) for i in range(q0, q1)]
            dense_from = torch.tensor(borders, device=device)[:, None]
            is_sink = k < self.sinks
            if block.part == "sealed":
                exists = exists & (k < dense_from) & ~is_sink
            elif block.part == "open":
                exists = exists & (k >= dense_from) & ~is_sink
            else:
                exists = exists & ((k >= dense_from) | is_sink)
        # Sinks precede `first_visible` and stay visible, unless leading rows are masked.
        if block.part != "sinks" or self.view.page_table.leading_rows_masked:
            exists = exists & (k >= self.first_visible)
        exists = exists.expand(q1 - q0, -1)
        if isinstance(mask, Tensor):
            return self._slice_explicit_mask(mask, q0, q1, k, exists)
        seen = (exists & evaluate_mask(mask, q, k))[None, None]
        if block.part == "sealed" and self.page_mask is not None:
            first = q0 - self.length + self.page_mask.shape[2]
            pages = k // self.view.page_table.layer_group.page
            seen = seen & self.page_mask[:, :, first : first + q1 - q0, pages]
        return seen

    def _slice_explicit_mask(
        self, mask: Tensor, q0: int, q1: int, k: Tensor, exists: Tensor
    ) -> Tensor:
        """Return the columns of an explicit mask for keys `k`; its last column is the newest."""
        mask = self.select_sequences(mask) if mask.shape[0] > 1 else mask
        queries, keys = mask.shape[-2:]
        rows = mask[..., q0 - self.length + queries : q1 - self.length + queries, :]
        index = k - (self.length - keys)
        exists = exists & (index >= 0)
        part = rows[..., index.clamp(0, keys - 1)]
        if part.dtype == torch.bool:
            return part & exists
        return part.masked_fill(~exists, float("-inf"))


def group_by_length(view: View) -> list[LengthGroup]:
    """Return the sequences of a view, grouped by equal lengths and page numbers."""
    groups = view.page_table.derived.get(LENGTH_GROUPS)
    if groups is None:
        groups = view.page_table.derived[LENGTH_GROUPS] = _find_length_groups(view.page_table)
    return [LengthGroup(view, indices) for indices in groups]


def _find_length_groups(page_table: PageTable) -> list[Ints | None]:
    numbers = np.delete(page_table.numbers, PADDING, axis=1)  # padding has no rows to read
    if (numbers == numbers[:1]).all():
        return [None]
    _, inverse = np.unique(numbers, axis=0, return_inverse=True)
    return [np.flatnonzero(inverse == i) for i in range(int(inverse.max()) + 1)]


def has_visible_rows(view: View, num_queries: int, mask: Mask) -> bool:
    """Tell whether the view still has every row that the newest queries see under `mask`."""
    known = view.page_table.derived.setdefault(VISIBLE_ROWS, {})
    key = num_queries, mask, view.new_rows_dense, view.num_new
    visible = known.get(key)
    if visible is None:
        groups = group_by_length(view) if view.batch else []
        visible = known[key] = all(
            _group_has_visible_rows(group, num_queries, mask) for group in groups
        )
    return visible


def _group_has_visible_rows(group: LengthGroup, num_queries: int, mask: Mask) -> bool:
    if group.length <= 0:
        return True
    page_table, page = group.view.page_table, group.view.page_table.layer_group.page
    query = max(group.length - num_queries, 0)
    low = int(page_table.pruned_before[group.first_sequence])
    if mask.window is not None:
        low = max(low, query - mask.window + 1)
    if low > group.sinks < mask.sinks:  # the remaining sinks are ordinary rows
        low = group.sinks
    dense_from = max(low, group.compute_dense_from(query))
    first_open = page * int(page_table.first_open[group.first_sequence])
    stop_sinks = max(group.sinks, page * page_table.layer_group.num_sink_pages)
    dense = dense_from >= min(first_open, group.new_from) or first_open <= stop_sinks
    return dense and low >= min(int(page_table.first_row[group.first_sequence]), max(dense_from, 0))


def read_visible_rows(
    group: LengthGroup, side: Literal["keys", "values"], start: int, stop: int
) -> Tensor:
    """Return framed rows of positions [start, stop), [B, H, n, D], as the newest query sees them.

    Positions without a row are zeros.
    """
    page_table, first = group.view.page_table, group.first_sequence
    stored = group.view.keys if side == "keys" else group.view.values
    shape = page_table.num_tables if group.indices is None else len(group.indices), stored.heads
    end = min(stop, group.length)
    dense_from = min(group.compute_dense_from(group.length - 1), end)
    low = max(start, int(page_table.first_row[first]))
    blocks: list[KeyBlock] = []
    if (sinks := min(group.sinks, end, group.new_from)) > max(start, 0):
        blocks.append(KeyBlock("sinks", max(start, 0), sinks))
        low = max(low, sinks)
    if low < dense_from:
        blocks.append(KeyBlock("sealed", low, dense_from))
    if (low := max(low, dense_from)) < min(group.new_from, end):
        blocks.append(KeyBlock("open", low, min(group.new_from, end)))
    if (low := max(low, group.new_from)) < end:
        blocks.append(KeyBlock("new", low, end))
    parts, position = [], start
    for block in [*blocks, KeyBlock("new", stop, stop)]:
        if position < block.start:
            parts.append(stored.open.new_zeros(*shape, block.start - position, stored.dim))
        if block.start < block.stop:
            parts.append(group.read_rows(side, block).to(stored.open.dtype))
        position = block.stop
    if not parts:
        return stored.open.new_zeros(*shape, 0, stored.dim)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
