"""The reference backend: plain PyTorch, supports every view, and defines correct results.

Sequences of the same length are computed together, block by block. Each block of rows is decoded
to float32 in bounded scratch, scored, and merged by an online softmax. A query that sees no row
gets zeros. Rows are stored by plain tensor operations.

    position   0      sinks        dense_from      new_from       length
               | sinks  |    sealed     |     open     |     new     |
    read from   open     sealed           open           new rows of
                pages    pages            pages          this forward
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvant.attention.mask import BlockVisibility, classify_block, evaluate_mask
from kvant.attention.page_selection import make_page_mask, select_pages
from kvant.attention.write_rows import decode_pages, write_rows
from kvant.contracts import AttentionRequest, Fields, Mask, PagedTensors, View
from kvant.page_table import PADDING, AppendPlan, Ints, PageTable

MAX_OPENED_VALUES = 1 << 20  # decoded values per block, 4 MiB: fits in a CPU's cache
MAX_SCORES = 2 << 20  # scores computed at once
BlockPart = Literal["sinks", "sealed", "open", "new"]


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
    groups: list[Ints | None] | None = view.page_table.derived.get("length_groups")
    if groups is None:
        groups = view.page_table.derived["length_groups"] = _find_length_groups(view.page_table)
    return [LengthGroup(view, indices) for indices in groups]


def _find_length_groups(page_table: PageTable) -> list[Ints | None]:
    numbers = np.delete(page_table.numbers, PADDING, axis=1)  # padding has no rows to read
    if (numbers == numbers[:1]).all():
        return [None]
    _, inverse = np.unique(numbers, axis=0, return_inverse=True)
    return [np.flatnonzero(inverse == i) for i in range(int(inverse.max()) + 1)]


@dataclass(frozen=True)
class ReferenceBackend:
    """Attention and storage in plain PyTorch, for every view and every plan."""

    name: str = "reference"
    max_opened_values: int = MAX_OPENED_VALUES  # decoded at once
    fast_prefill: bool = False

    def supports(self, view: View, request: AttentionRequest | None = None) -> str | None:
        return None

    def attend(self, request: AttentionRequest, view: View) -> tuple[Tensor, Tensor | None]:
        _raise_malloc_threshold()
        groups = group_by_length(view)
        if request.selected_pages is not None:
            groups = [_restrict_to_selected_pages(request, group) for group in groups]
        if len(groups) == 1:
            return self._attend_group(request, groups[0])
        batch, heads, count, _ = request.q.shape
        dtype = _get_accumulation_dtype(request.q)
        out = request.q.new_empty(batch, heads, count, view.values.dim, dtype=dtype)
        lse = out.new_empty(batch, heads, count) if request.return_lse else None
        for group in groups:
            index = torch.from_numpy(group.indices)
            part, sums = self._attend_group(request._replace(q=request.q[index]), group)
            out[index] = part
            if lse is not None and sums is not None:
                lse[index] = sums
        return out, lse

    def _attend_group(
        self, request: AttentionRequest, group: LengthGroup
    ) -> tuple[Tensor, Tensor | None]:
        q = _group_queries(request, group)
        first, heads = group.length - q.shape[3], q.shape[1]
        blocks = list(group.iterate_blocks(q.shape[3], self.max_opened_values))
        direct = len(blocks) == 1 and not request.return_lse and request.sink_logits is None
        if direct and _sees_whole_block(group, request.mask, q, blocks[0]):
            keys, values = self._open_block(group, blocks[0], q.dtype)
            weights = _compute_scores(q, keys, request).softmax(-1)
            return _grouped_matmul(weights, values).flatten(1, 2), None
        tiles = _split_queries(q, max((block.stop - block.start for block in blocks), default=1))
        softmaxes = [(t0, t1, _OnlineSoftmax(q[:, :, :, t0:t1])) for t0, t1 in tiles]
        for block in blocks:
            readers = [
                (t0, t1, softmax, visibility)
                for t0, t1, softmax in softmaxes
                if (visibility := group.classify_block(request.mask, first + t0, first + t1, block))
                != "none"
            ]
            if not readers:
                continue
            keys, values = self._open_block(group, block, q.dtype)
            for t0, t1, softmax, visibility in readers:
                mask = None
                if visibility == "some":
                    part = group.make_block_mask(request.mask, first + t0, first + t1, block)
                    part = part.expand(q.shape[0], *part.shape[1:])
                    mask = _split_mask_by_group(part, heads)
                softmax.add_block(_compute_scores(softmax.q, keys, request), mask, values)
        dim = group.view.values.dim
        outs = [softmax.compute_output(request.sink_logits, dim) for _, _, softmax in softmaxes]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
        if not request.return_lse:
            return out, None
        return out, torch.cat([softmax.compute_lse() for _, _, softmax in softmaxes], 2)

    def _open_block(
        self, group: LengthGroup, block: KeyBlock, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the decoded keys and values of a block."""
        keys = group.read_rows("keys", block).to(dtype)
        values_in_keys = group.view.values is group.view.keys
        return keys, keys if values_in_keys else group.read_rows("values", block).to(dtype)

    def select_pages(self, request: AttentionRequest, view: View) -> Tensor | None:
        return select_pages(request, view)

    def store(self, plan: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors]) -> bool:
        write_rows(plan, rows, sides)
        return True


def _restrict_to_selected_pages(request: AttentionRequest, group: LengthGroup) -> LengthGroup:
    """Return the same group with the request's selected pages as its page mask."""
    assert request.selected_pages is not None
    heads = request.q.shape[1] // group.view.keys.heads
    num_pages = int(group.view.page_table.stop_sealed[group.first_sequence])
    page_mask = make_page_mask(group.select_sequences(request.selected_pages), num_pages)
    return replace(group, page_mask=page_mask.repeat_interleave(heads, 1))


def _get_accumulation_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _group_queries(request: AttentionRequest, group: LengthGroup) -> Tensor:
    """Return the scaled queries as [B, H, group, T, D]."""
    batch, all_heads, count, dim = request.q.shape
    heads = group.view.keys.heads
    q = request.q.to(_get_accumulation_dtype(request.q)).mul(request.scale)
    return q.view(batch, heads, all_heads // heads, count, dim)


def _sees_whole_block(group: LengthGroup, mask: Mask | Tensor, q: Tensor, block: KeyBlock) -> bool:
    """Tell whether every query sees the whole block and all scores fit the scratch at once."""
    small = 0 < q[..., 0].numel() * (block.stop - block.start) <= MAX_SCORES
    first = group.length - q.shape[3]
    return small and group.classify_block(mask, first, group.length, block) == "all"


def has_visible_rows(view: View, num_queries: int, mask: Mask) -> bool:
    """Tell whether the view still has every row that the newest queries see under `mask`."""
    key = ("visible_rows", num_queries, mask, view.new_rows_dense, view.num_new)
    visible: bool | None = view.page_table.derived.get(key)
    if visible is None:
        groups = group_by_length(view) if view.batch else []
        visible = view.page_table.derived[key] = all(
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


@lru_cache(maxsize=1)
def _raise_malloc_threshold() -> None:
    """Make the C library retain freed scratch memory instead of returning it to the system.

    glibc trims free memory above twice the largest block freed so far (32 MiB at most). A few
    blocks of scratch exceed the initial threshold, and each reuse would cost a page fault per
    4 KiB. Freeing one block of 31 MiB raises the threshold.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


@dataclass
class _OnlineSoftmax:
    """Running maximum, weight sum and weighted values of a query tile, [B, H, group, T, ...]."""

    q: Tensor
    max_scores: Tensor | None = None
    weight_sums: Tensor | None = None
    out: Tensor | None = None
    masked: bool = False  # whether any block had a mask: a query may then see no row

    def add_block(self, scores: Tensor, mask: Tensor | None, values: Tensor) -> None:
        spoiled = None
        if mask is not None:
            self.masked = True
            hidden = ~mask if mask.dtype == torch.bool else mask == float("-inf")
            if mask.dtype != torch.bool:
                scores = scores + mask.to(scores.dtype)
            scores = scores.masked_fill(hidden, float("-inf"))
            values, spoiled = _isolate_nonfinite(values, ~hidden)
        top = scores.amax(-1, keepdim=True)
        if self.max_scores is not None:
            top = torch.maximum(self.max_scores, top)
        # A query that has seen no row yet has maximum -inf, and -inf - -inf is NaN.
        finite = top if mask is None else top.masked_fill(top == float("-inf"), 0.0)
        weights = torch.exp(scores - finite)
        total = weights.sum(-1, keepdim=True)
        out = _grouped_matmul(weights, values)
        if spoiled is not None:
            out = out.masked_fill(spoiled, float("nan"))
        if self.max_scores is not None and self.weight_sums is not None and self.out is not None:
            fade = torch.exp(self.max_scores - finite)
            total, out = self.weight_sums * fade + total, self.out * fade + out
        self.max_scores, self.weight_sums, self.out = top, total, out

    def compute_output(self, sink_logits: Tensor | None, dim: int) -> Tensor:
        """Return the outputs [B, heads, T, dim]."""
        top, total, out = self.max_scores, self.weight_sums, self.out
        if top is None or total is None or out is None:  # no block was added
            self.masked = True
            top = self.q.new_full((*self.q.shape[:-1], 1), float("-inf"))
            total, out = torch.zeros_like(top), self.q.new_zeros(*self.q.shape[:-1], dim)
        if sink_logits is not None:
            heads, group = top.shape[1:3]
            sink = sink_logits.to(top.dtype).view(1, heads, group, 1, 1)
            old, top = top, torch.maximum(top, sink)
            finite = top.masked_fill(top == float("-inf"), 0.0)
            fade = torch.exp(old - finite)
            total, out = total * fade + torch.exp(sink - finite), out * fade
        self.max_scores, self.weight_sums = top, total
        if self.masked:  # queries that see no row
            total = torch.where(total == 0, 1.0, total)
        return (out / total).flatten(1, 2)

    def compute_lse(self) -> Tensor:
        """Return the log-sum-exp [B, heads, T] of the scores added so far."""
        assert self.max_scores is not None and self.weight_sums is not None
        return (self.max_scores + self.weight_sums.log()).squeeze(-1).flatten(1, 2)


def _grouped_matmul(x: Tensor, rows: Tensor) -> Tensor:
    """Multiply [B, H, group, T, n] by [B, H, n, D], without repeating rows for each query head."""
    batch, heads, group, count, width = x.shape
    x = x.reshape(batch * heads, group * count, width)
    if batch == 1:
        out = torch.bmm(x, rows.flatten(0, 1))
    else:
        out = x.view(batch, heads, group * count, width) @ rows
    return out.view(batch, heads, group, count, rows.shape[3])


def _compute_scores(q: Tensor, keys: Tensor, request: AttentionRequest) -> Tensor:
    scores = _grouped_matmul(q, keys.transpose(-1, -2))
    cap = request.softcap
    return scores if cap is None else torch.tanh(scores / cap) * cap


def _isolate_nonfinite(values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return values with NaN and infinities zeroed, and the outputs that must be NaN.

    Zero times NaN is NaN: otherwise a masked row would turn every query's output into NaN.
    """
    nonfinite = ~torch.isfinite(values)
    if not nonfinite.any():
        return values, None
    batch, heads = values.shape[:2]
    weights = visible.expand(batch, heads, *visible.shape[2:]).to(values.dtype)
    spoiled = _grouped_matmul(weights, nonfinite.to(values.dtype)) > 0
    return values.masked_fill(nonfinite, 0.0), spoiled


def _split_mask_by_group(mask: Tensor, heads: int) -> Tensor:
    """Reshape a mask [B, all heads or 1, T, n] to [B, H or 1, group or 1, T, n]."""
    if mask.shape[1] == 1:
        return mask.unsqueeze(2)
    batch, all_heads, count, keys = mask.shape
    return mask.view(batch, heads, all_heads // heads, count, keys)


def _split_queries(q: Tensor, num_keys: int) -> Iterator[tuple[int, int]]:
    """Return ranges of queries whose scores fit the scratch."""
    batch, heads, group, count, _ = q.shape
    step = max(1, MAX_SCORES // (batch * heads * group * num_keys))
    return ((t, min(t + step, count)) for t in range(0, max(count, 1), step))
