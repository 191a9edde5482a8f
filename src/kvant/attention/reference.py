"""The backend that serves every view and defines what is right.

Sequences that are equally far are computed together, block by block: rows are opened into bounded
scratch in float32, scored, and merged by an online softmax. A query that sees nothing gets zeros.
Rows are stored by plain tensor operations.
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
from kvant.page_table import LENGTH, AppendPlan, Ints, PageTable

MAX_OPENED_VALUES = 1 << 20  # values of opened rows, 4 MiB: what a processor's cache still holds
MAX_SCORES = 2 << 20  # scores at a time
BlockPart = Literal["sinks", "sealed", "open", "own"]


@dataclass(frozen=True)
class KeyBlock:
    """Key positions [start, stop) in one of the places where rows lie."""

    part: BlockPart
    start: int
    stop: int


@dataclass(frozen=True)
class LengthGroup:
    """Sequences of a view that are equally far: their integers are those of the first."""

    view: View
    indices: Ints | None  # None: all of the view
    page_mask: Tensor | None = None  # of sealed pages these only, [B, heads, T, pages]

    @cached_property
    def first_sequence(self) -> int:
        return 0 if self.indices is None else int(self.indices[0])

    @cached_property
    def length(self) -> int:
        return int(self.view.page_table.lengths[self.first_sequence])

    @cached_property
    def new_from(self) -> int:
        """From this position on rows are read where they came."""
        return max(0, self.length - self.view.num_new)

    @cached_property
    def first_visible(self) -> int:
        """Nobody sees a position before it."""
        return int(self.view.page_table.first_visible[self.first_sequence])

    @property
    def sinks(self) -> int:
        return self.view.page_table.layer_group.sinks

    def compute_dense_from(self, query: int) -> int:
        """The position below which this query sees sealed rows, else dense ones."""
        paging = self.view.page_table.layer_group.paging
        due = paging.count_due_pages(query + 1) * paging.page
        return min(due, self.new_from) if self.view.new_rows_dense else due

    def select_sequences(self, rows: Tensor) -> Tensor:
        return rows if self.indices is None else rows[torch.from_numpy(self.indices)]

    def iterate_blocks(self, num_queries: int, max_values: int) -> Iterator[KeyBlock]:
        """The rows that the newest queries may see, in pieces of so many values when opened."""
        extent, page = self.view.page_table, self.view.page_table.layer_group.page
        count = extent.num_tables if self.indices is None else len(self.indices)
        heads, dim = self.view.keys.heads, self.view.keys.dim
        wide = max(dim, self.view.values.dim)
        many = page * max(1, max_values // (count * heads * wide * page))
        if sinks := min(self.sinks, self.new_from):
            yield KeyBlock("sinks", 0, sinks)
        seam = min(
            self.compute_dense_from(self.length - 1),
            page * int(extent.stop_sealed[self.first_sequence]),
        )
        first = page * int(extent.first_sealed[self.first_sequence])
        for start in range(first, seam, many):
            yield KeyBlock("sealed", start, min(start + many, -(-seam // page) * page))
        low = max(
            page * int(extent.first_open[self.first_sequence]),
            self.compute_dense_from(self.length - num_queries),
        )
        for start in range(low // page * page, self.new_from, many):
            yield KeyBlock("open", start, min(start + many, self.new_from))
        for start in range(self.new_from, self.length, many):
            yield KeyBlock("own", start, min(start + many, self.length))

    def read_rows(self, side: Literal["keys", "values"], block: KeyBlock) -> Tensor:
        """The rows of a block, [B, H, n, D]."""
        pages = self.view
        if block.part == "own":
            assert pages.new_rows is not None
            column = block.start - self.length + pages.num_new
            name = "keys" if pages.values is pages.keys else side
            return self.select_sequences(pages.new_rows[name])[
                :, :, column : column + block.stop - block.start
            ]
        stored = pages.keys if side == "keys" else pages.values
        page = pages.page_table.layer_group.page
        first, stop = block.start // page, -(-block.stop // page)
        table = (
            pages.page_table.sealed_table if block.part == "sealed" else pages.page_table.open_table
        )
        slots = torch.from_numpy(
            table[:, first:stop] if self.indices is None else table[self.indices, first:stop]
        )
        if block.part == "sealed":
            opened = decode_pages(stored, side, slots)
        else:
            opened = stored.open[slots.to(stored.open.device)]
        rows = opened.transpose(1, 2).flatten(2, 3)
        return rows[:, :, block.start - first * page : block.stop - first * page]

    def classify_block(
        self, mask: Mask | Tensor, q0: int, q1: int, block: KeyBlock
    ) -> BlockVisibility:
        """Do the queries at positions [q0, q1) see all, some or none of a block?"""
        low, high = self.compute_dense_from(q0), self.compute_dense_from(q1 - 1)
        if block.part == "sealed":
            state: BlockVisibility = (
                "all" if block.stop <= low else "none" if block.start >= high else "some"
            )
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
        apart = block.part != "sinks" and block.start < self.sinks
        apart = apart or block.start < self.first_visible
        return "all" if state == rule == "all" and q0 >= 0 and not apart else "some"

    def make_block_mask(self, mask: Mask | Tensor, q0: int, q1: int, block: KeyBlock) -> Tensor:
        """[B, heads or 1, q1 - q0, keys] as booleans, or as numbers to add where `mask` is such."""
        device = self.view.keys.open.device
        q = torch.arange(q0, q1, device=device)[:, None]
        k = torch.arange(block.start, block.stop, device=device)
        exists = k < self.new_from if block.part in ("sinks", "open") else k < self.length
        if block.part != "sinks":
            seam = torch.tensor([self.compute_dense_from(i) for i in range(q0, q1)], device=device)[
                :, None
            ]
            apart = k < self.sinks
            if block.part == "sealed":
                exists = exists & (k < seam) & ~apart
            else:
                exists = exists & (
                    (k >= seam) & ~apart if block.part == "open" else (k >= seam) | apart
                )
        if (
            block.part != "sinks" or self.view.page_table.leading_rows_masked
        ):  # sinks are there before the others
            exists = exists & (k >= self.first_visible)
        exists = exists.expand(q1 - q0, -1)
        if isinstance(mask, Tensor):
            return self._slice_explicit_mask(mask, q0, q1, k, exists)
        seen = (exists & evaluate_mask(mask, q, k))[None, None]
        if block.part == "sealed" and self.page_mask is not None:
            seen = seen & self._mask_selected_pages(self.page_mask, q0, q1, k)
        return seen

    def _mask_selected_pages(self, page_mask: Tensor, q0: int, q1: int, k: Tensor) -> Tensor:
        """Are keys `k` in pages that are read? [B, heads, T, keys]."""
        first = q0 - self.length + page_mask.shape[2]
        return page_mask[:, :, first : first + q1 - q0, k // self.view.page_table.layer_group.page]

    def _slice_explicit_mask(
        self, mask: Tensor, q0: int, q1: int, k: Tensor, exists: Tensor
    ) -> Tensor:
        """The part of an explicit mask for keys `k`; it is aligned to the newest position."""
        mask = self.select_sequences(mask) if mask.shape[0] > 1 else mask
        queries, keys = mask.shape[-2:]
        rows = mask[..., q0 - self.length + queries : q1 - self.length + queries, :]
        index = k - (self.length - keys)
        exists = exists & (index >= 0)
        part = rows[..., index.clamp(0, keys - 1)]
        return (
            part & exists if part.dtype == torch.bool else part.masked_fill(~exists, float("-inf"))
        )


def group_by_length(view: View) -> list[LengthGroup]:
    """The sequences of a view, those together that are equally far."""
    groups: list[Ints | None] | None = view.page_table.derived.get("alike")
    if groups is None:
        groups = view.page_table.derived["alike"] = _find_length_groups(view.page_table)
    return [LengthGroup(view, which) for which in groups]


def _find_length_groups(page_table: PageTable) -> list[Ints | None]:
    numbers = np.delete(page_table.numbers, LENGTH + 1, axis=1)  # padding is not stored
    if (numbers == numbers[:1]).all():
        return [None]
    _, inverse = np.unique(numbers, axis=0, return_inverse=True)
    return [np.flatnonzero(inverse == i) for i in range(int(inverse.max()) + 1)]


@dataclass(frozen=True)
class ReferenceBackend:
    """Plain PyTorch."""

    name: str = "reference"
    max_opened_values: int = MAX_OPENED_VALUES  # values of opened rows
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
        out = request.q.new_empty(
            batch, heads, count, view.values.dim, dtype=_get_accumulation_dtype(request.q)
        )
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
        if (
            len(blocks) == 1
            and _needs_only_outputs(request)
            and _sees_whole_block(group, request, q, blocks[0])
        ):
            keys, values = self._open_block(group, blocks[0], q.dtype)
            weights = _compute_scores(q, keys, request).softmax(-1)
            return _grouped_matmul(weights, values).flatten(1, 2), None
        pieces = _split_queries(q, max((block.stop - block.start for block in blocks), default=1))
        softmaxes = [(t0, t1, _OnlineSoftmax(q[:, :, :, t0:t1])) for t0, t1 in pieces]
        for block in blocks:
            seeing = [
                (t0, t1, softmax, how)
                for t0, t1, softmax in softmaxes
                if (how := group.classify_block(request.mask, first + t0, first + t1, block))
                != "none"
            ]
            if not seeing:
                continue
            keys, values = self._open_block(group, block, q.dtype)
            for t0, t1, softmax, how in seeing:
                mask = None
                if how == "some":
                    part = group.make_block_mask(request.mask, first + t0, first + t1, block)
                    part = part.expand(q.shape[0], *part.shape[1:])
                    mask = _split_mask_by_group(part, heads)
                softmax.add_block(_compute_scores(softmax.q, keys, request), mask, values)
        dim = group.view.values.dim
        outs = [softmax.compute_output(request.sink_logits, dim) for _, _, softmax in softmaxes]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
        return out, torch.cat(
            [s.compute_lse() for _, _, s in softmaxes], 2
        ) if request.return_lse else None

    def _open_block(
        self, group: LengthGroup, block: KeyBlock, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a block."""
        keys = group.read_rows("keys", block).to(dtype)
        same = group.view.values is group.view.keys
        return keys, keys if same else group.read_rows("values", block).to(dtype)

    def select_pages(self, request: AttentionRequest, view: View) -> Tensor | None:
        return select_pages(request, view)

    def store(self, plan: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors]) -> bool:
        write_rows(plan, rows, sides)
        return True


def _restrict_to_selected_pages(request: AttentionRequest, group: LengthGroup) -> LengthGroup:
    """The sequences of a group, of whose sealed pages the chosen ones are read."""
    assert request.selected_pages is not None
    heads = request.q.shape[1] // group.view.keys.heads
    read = make_page_mask(
        group.select_sequences(request.selected_pages),
        int(group.view.page_table.stop_sealed[group.first_sequence]),
    )
    return replace(group, page_mask=read.repeat_interleave(heads, 1))


def _get_accumulation_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _group_queries(request: AttentionRequest, group: LengthGroup) -> Tensor:
    """Queries as [B, H, group, T, D], scaled."""
    batch, all_heads, count, dim = request.q.shape
    heads = group.view.keys.heads
    q = request.q.to(_get_accumulation_dtype(request.q)).mul(request.scale)
    return q.view(batch, heads, all_heads // heads, count, dim)


def _sees_whole_block(
    group: LengthGroup, request: AttentionRequest, q: Tensor, block: KeyBlock
) -> bool:
    """Do all queries see all of the block, which is all there is, and does the scratch hold it?"""
    first, keys = group.length - q.shape[3], block.stop - block.start
    small = 0 < q[..., 0].numel() * keys <= MAX_SCORES
    return small and group.classify_block(request.mask, first, group.length, block) == "all"


def has_visible_rows(view: View, num_queries: int, mask: Mask) -> bool:
    """Has a view all rows that the newest queries see by this rule?"""
    key = ("serves", num_queries, mask, view.new_rows_dense, view.num_new)
    found: bool | None = view.page_table.derived.get(key)
    if found is None:
        groups = group_by_length(view) if view.batch else []
        found = view.page_table.derived[key] = all(
            _group_has_visible_rows(group, num_queries, mask) for group in groups
        )
    return found


def _group_has_visible_rows(group: LengthGroup, num_queries: int, mask: Mask) -> bool:
    extent, page, query = (
        group.view.page_table,
        group.view.page_table.layer_group.page,
        group.length - num_queries,
    )
    if group.length <= 0:
        return True
    query = max(query, 0)
    low = int(extent.pruned_before[group.first_sequence])
    if mask.window is not None:
        low = max(low, query - mask.window + 1)
    if low > group.sinks < mask.sinks:  # the others lie among the rows
        low = group.sinks
    seam = max(low, group.compute_dense_from(query))
    first_open = page * int(extent.first_open[group.first_sequence])
    apart = max(group.sinks, page * extent.layer_group.num_sink_pages)
    dense = seam >= min(first_open, group.new_from) or first_open <= apart
    return dense and low >= min(int(extent.first_row[group.first_sequence]), max(seam, 0))


def read_visible_rows(
    group: LengthGroup, side: Literal["keys", "values"], start: int, stop: int
) -> Tensor:
    """Framed rows of positions [start, stop), [B, H, n, D], as the newest query sees them.

    Zeros stand where there is no row.
    """
    extent, which = group.view.page_table, group.first_sequence
    stored = group.view.keys if side == "keys" else group.view.values
    count = extent.num_tables if group.indices is None else len(group.indices)
    end = min(stop, group.length)
    seam = min(group.compute_dense_from(group.length - 1), end)
    low = max(start, int(extent.first_row[which]))
    cuts: list[KeyBlock] = []
    if (sinks := min(group.sinks, end, group.new_from)) > max(start, 0):
        cuts.append(KeyBlock("sinks", max(start, 0), sinks))
        low = max(low, sinks)
    if low < seam:
        cuts.append(KeyBlock("sealed", low, seam))
    if (low := max(low, seam)) < min(group.new_from, end):
        cuts.append(KeyBlock("open", low, min(group.new_from, end)))
    if (low := max(low, group.new_from)) < end:
        cuts.append(KeyBlock("own", low, end))
    heads, dim = stored.heads, stored.dim
    parts, place = [], start
    for cut in [*cuts, KeyBlock("own", stop, stop)]:
        if place < cut.start:
            parts.append(stored.open.new_zeros(count, heads, cut.start - place, dim))
        if cut.start < cut.stop:
            parts.append(group.read_rows(side, cut).to(stored.open.dtype))
        place = cut.stop
    if not parts:
        return stored.open.new_zeros(count, heads, 0, dim)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


@lru_cache(maxsize=1)
def _raise_malloc_threshold() -> None:
    """Let the C library keep what scratch is made of, rather than fetch it from the system anew.

    glibc gives freed memory back beyond twice the largest block that it has seen freed, 32 MiB at
    most; a few blocks of scratch are more than that at first, and cost a page fault per 4 KiB.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def _needs_only_outputs(request: AttentionRequest) -> bool:
    """Is nothing but the outputs asked for?"""
    return not request.return_lse and request.sink_logits is None


@dataclass
class _OnlineSoftmax:
    """Running maximum, sum and weighted values of some queries: [B, H, group, T, ...]."""

    q: Tensor
    max_scores: Tensor | None = None
    weight_sums: Tensor | None = None
    out: Tensor | None = None
    masked: bool = False  # was anything hidden from anybody?

    def add_block(self, scores: Tensor, mask: Tensor | None, values: Tensor) -> None:
        stain = None
        if mask is not None:
            self.masked = True
            hidden = ~mask if mask.dtype == torch.bool else mask == float("-inf")
            if mask.dtype != torch.bool:
                scores = scores + mask.to(scores.dtype)
            scores = scores.masked_fill(hidden, float("-inf"))
            values, stain = _isolate_nonfinite(values, ~hidden)
        top = scores.amax(-1, keepdim=True)
        if self.max_scores is not None:
            top = torch.maximum(self.max_scores, top)
        # A query that sees nothing yet has no maximum to be measured from.
        finite = top if mask is None else top.masked_fill(top == float("-inf"), 0.0)
        weights = torch.exp(scores - finite)
        total = weights.sum(-1, keepdim=True)
        out = _grouped_matmul(weights, values)
        if stain is not None:
            out = out.masked_fill(stain, float("nan"))
        if self.max_scores is not None and self.weight_sums is not None and self.out is not None:
            fade = torch.exp(self.max_scores - finite)
            total, out = self.weight_sums * fade + total, self.out * fade + out
        self.max_scores, self.weight_sums, self.out = top, total, out

    def compute_output(self, sink_logits: Tensor | None, dim: int) -> Tensor:
        """Outputs [B, heads, T, dim]."""
        top, total, out = self.max_scores, self.weight_sums, self.out
        if top is None or total is None or out is None:  # nobody sees anything
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
        if self.masked:  # some may see nothing
            total = torch.where(total == 0, 1.0, total)
        return (out / total).flatten(1, 2)

    def compute_lse(self) -> Tensor:
        """Log-sum-exp [B, heads, T] of a result."""
        assert self.max_scores is not None and self.weight_sums is not None
        return (self.max_scores + self.weight_sums.log()).squeeze(-1).flatten(1, 2)


def _grouped_matmul(x: Tensor, rows: Tensor) -> Tensor:
    """[B, H, group, T, n] @ [B, H, n, D]: a group shares its rows, nothing is repeated."""
    batch, heads, group, count, width = x.shape
    x = x.reshape(batch * heads, group * count, width)
    out = (
        torch.bmm(x, rows.flatten(0, 1))
        if batch == 1
        else (x.view(batch, heads, group * count, width) @ rows)
    )
    return out.view(batch, heads, group, count, rows.shape[3])


def _compute_scores(q: Tensor, keys: Tensor, request: AttentionRequest) -> Tensor:
    scores = _grouped_matmul(q, keys.transpose(-1, -2))
    cap = request.softcap
    return scores if cap is None else torch.tanh(scores / cap) * cap


def _isolate_nonfinite(values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor | None]:
    """Values that are safe to weigh with zero, and where a NaN is really seen.

    Zero times NaN is NaN: without this a hidden row would spoil every query.
    """
    odd = ~torch.isfinite(values)
    if not odd.any():
        return values, None
    batch, heads = values.shape[:2]
    weights = seen.expand(batch, heads, *seen.shape[2:]).to(values.dtype)
    stain = _grouped_matmul(weights, odd.to(values.dtype)) > 0
    return values.masked_fill(odd, 0.0), stain


def _split_mask_by_group(mask: Tensor, heads: int) -> Tensor:
    """[B, all heads or 1, T, n] -> [B, H or 1, group or 1, T, n]."""
    if mask.shape[1] == 1:
        return mask.unsqueeze(2)
    batch, all_heads, count, keys = mask.shape
    return mask.view(batch, heads, all_heads // heads, count, keys)


def _split_queries(q: Tensor, num_keys: int) -> Iterator[tuple[int, int]]:
    """Queries in pieces whose scores fit the scratch."""
    batch, heads, group, count, _ = q.shape
    step = max(1, MAX_SCORES // (batch * heads * group * num_keys))
    return ((t, min(t + step, count)) for t in range(0, max(count, 1), step))
