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
from functools import lru_cache

import torch
from torch import Tensor

from kvant.attention.length_groups import KeyBlock, LengthGroup, group_by_length
from kvant.attention.page_selection import make_page_mask, select_pages
from kvant.attention.write_rows import write_rows
from kvant.contracts import AttentionRequest, Fields, Mask, PagedTensors, View
from kvant.page_table import AppendPlan

MAX_OPENED_VALUES = 1 << 20  # decoded values per block, 4 MiB: fits in a CPU's cache
MAX_SCORES = 2 << 20  # scores computed at once


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
