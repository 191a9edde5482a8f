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

from kvant.attention.mask import Relation, relation, visible
from kvant.attention.selecting import choose, reads
from kvant.attention.writing import open_pages, write
from kvant.contracts import Fields, Mask, Request, Stored, View
from kvant.extent import LENGTH, Change, Extent, Ints

ROWS = 1 << 20  # values of opened rows, 4 MiB: what a processor's cache still holds
SCORES = 2 << 20  # scores at a time
Part = Literal["sinks", "sealed", "open", "own"]


@dataclass(frozen=True)
class Block:
    """Key positions [start, stop) in one of the places where rows lie."""

    part: Part
    start: int
    stop: int


@dataclass(frozen=True)
class Alike:
    """Sequences of a view that are equally far: their integers are those of the first."""

    pages: View
    which: Ints | None  # None: all of the view
    read: Tensor | None = None  # of sealed pages these only, [B, heads, T, pages]

    @cached_property
    def first(self) -> int:
        return 0 if self.which is None else int(self.which[0])

    @cached_property
    def length(self) -> int:
        return int(self.pages.extent.lengths[self.first])

    @cached_property
    def came(self) -> int:
        """From this position on rows are read where they came."""
        return max(0, self.length - self.pages.came)

    @cached_property
    def begins(self) -> int:
        """Nobody sees a position before it."""
        return int(self.pages.extent.begins[self.first])

    @property
    def sinks(self) -> int:
        return self.pages.extent.kind.sinks

    def seam(self, query: int) -> int:
        """The position below which this query sees sealed rows, else dense ones."""
        paging = self.pages.extent.kind.paging
        due = paging.due(query + 1) * paging.page
        return min(due, self.came) if self.pages.dense else due

    def of(self, rows: Tensor) -> Tensor:
        return rows if self.which is None else rows[torch.from_numpy(self.which)]

    def blocks(self, queries: int, at_once: int) -> Iterator[Block]:
        """The rows that the newest queries may see, in pieces of so many values when opened."""
        extent, page = self.pages.extent, self.pages.extent.kind.page
        count = extent.tables if self.which is None else len(self.which)
        heads, dim = self.pages.keys.heads, self.pages.keys.dim
        wide = max(dim, self.pages.values.dim)
        many = page * max(1, at_once // (count * heads * wide * page))
        if sinks := min(self.sinks, self.came):
            yield Block("sinks", 0, sinks)
        seam = min(self.seam(self.length - 1), page * int(extent.stop_sealed[self.first]))
        first = page * int(extent.first_sealed[self.first])
        for start in range(first, seam, many):
            yield Block("sealed", start, min(start + many, -(-seam // page) * page))
        low = max(page * int(extent.first_open[self.first]), self.seam(self.length - queries))
        for start in range(low // page * page, self.came, many):
            yield Block("open", start, min(start + many, self.came))
        for start in range(self.came, self.length, many):
            yield Block("own", start, min(start + many, self.length))

    def rows(self, side: Literal["keys", "values"], block: Block) -> Tensor:
        """The rows of a block, [B, H, n, D]."""
        pages = self.pages
        if block.part == "own":
            assert pages.own is not None
            column = block.start - self.length + pages.came
            name = "keys" if pages.values is pages.keys else side
            return self.of(pages.own[name])[:, :, column : column + block.stop - block.start]
        stored = pages.keys if side == "keys" else pages.values
        page = pages.extent.kind.page
        first, stop = block.start // page, -(-block.stop // page)
        table = pages.extent.sealed if block.part == "sealed" else pages.extent.open
        slots = torch.from_numpy(
            table[:, first:stop] if self.which is None else table[self.which, first:stop]
        )
        if block.part == "sealed":
            opened = open_pages(stored, side, slots)
        else:
            opened = stored.open[slots.to(stored.open.device)]
        rows = opened.transpose(1, 2).flatten(2, 3)
        return rows[:, :, block.start - first * page : block.stop - first * page]

    def relation(self, mask: Mask | Tensor, q0: int, q1: int, block: Block) -> Relation:
        """Do the queries at positions [q0, q1) see all, some or none of a block?"""
        low, high = self.seam(q0), self.seam(q1 - 1)
        if block.part == "sealed":
            state: Relation = (
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
        if block.part == "sealed" and self.read is not None:
            state = "some"
        rule = relation(mask, q0, q1, block.start, block.stop - 1)
        if rule == "none":
            return "some" if block.start < mask.sinks else "none"
        apart = block.part != "sinks" and block.start < self.sinks
        apart = apart or block.start < self.begins
        return "all" if state == rule == "all" and q0 >= 0 and not apart else "some"

    def allowed(self, mask: Mask | Tensor, q0: int, q1: int, block: Block) -> Tensor:
        """[B, heads or 1, q1 - q0, keys] as booleans, or as numbers to add where `mask` is such."""
        device = self.pages.keys.open.device
        q = torch.arange(q0, q1, device=device)[:, None]
        k = torch.arange(block.start, block.stop, device=device)
        exists = k < self.came if block.part in ("sinks", "open") else k < self.length
        if block.part != "sinks":
            seam = torch.tensor([self.seam(i) for i in range(q0, q1)], device=device)[:, None]
            apart = k < self.sinks
            if block.part == "sealed":
                exists = exists & (k < seam) & ~apart
            else:
                exists = exists & (
                    (k >= seam) & ~apart if block.part == "open" else (k >= seam) | apart
                )
        if block.part != "sinks" or self.pages.extent.hidden:  # sinks are there before the others
            exists = exists & (k >= self.begins)
        exists = exists.expand(q1 - q0, -1)
        if isinstance(mask, Tensor):
            return self._explicit(mask, q0, q1, k, exists)
        seen = (exists & visible(mask, q, k))[None, None]
        if block.part == "sealed" and self.read is not None:
            seen = seen & self._chosen(self.read, q0, q1, k)
        return seen

    def _chosen(self, read: Tensor, q0: int, q1: int, k: Tensor) -> Tensor:
        """Are keys `k` in pages that are read? [B, heads, T, keys]."""
        first = q0 - self.length + read.shape[2]
        return read[:, :, first : first + q1 - q0, k // self.pages.extent.kind.page]

    def _explicit(self, mask: Tensor, q0: int, q1: int, k: Tensor, exists: Tensor) -> Tensor:
        """The part of an explicit mask for keys `k`; it is aligned to the newest position."""
        mask = self.of(mask) if mask.shape[0] > 1 else mask
        queries, keys = mask.shape[-2:]
        rows = mask[..., q0 - self.length + queries : q1 - self.length + queries, :]
        index = k - (self.length - keys)
        exists = exists & (index >= 0)
        part = rows[..., index.clamp(0, keys - 1)]
        return (
            part & exists if part.dtype == torch.bool else part.masked_fill(~exists, float("-inf"))
        )


def alike(pages: View) -> list[Alike]:
    """The sequences of a view, those together that are equally far."""
    groups: list[Ints | None] | None = pages.extent.memo.get("alike")
    if groups is None:
        groups = pages.extent.memo["alike"] = _groups(pages.extent)
    return [Alike(pages, which) for which in groups]


def _groups(extent: Extent) -> list[Ints | None]:
    numbers = np.delete(extent.numbers, LENGTH + 1, axis=1)  # padding is not stored
    if (numbers == numbers[:1]).all():
        return [None]
    _, inverse = np.unique(numbers, axis=0, return_inverse=True)
    return [np.flatnonzero(inverse == i) for i in range(int(inverse.max()) + 1)]


@dataclass(frozen=True)
class Reference:
    """Plain PyTorch."""

    name: str = "reference"
    at_once: int = ROWS  # values of opened rows
    prompts: bool = False

    def supports(self, pages: View, request: Request | None = None) -> str | None:
        return None

    def attend(self, request: Request, pages: View) -> tuple[Tensor, Tensor | None]:
        _keep_scratch()
        groups = alike(pages)
        if request.chosen is not None:
            groups = [_reading(request, group) for group in groups]
        if len(groups) == 1:
            return self._attend(request, groups[0])
        batch, heads, count, _ = request.q.shape
        out = request.q.new_empty(batch, heads, count, pages.values.dim, dtype=_wide(request.q))
        lse = out.new_empty(batch, heads, count) if request.lse else None
        for group in groups:
            index = torch.from_numpy(group.which)
            part, sums = self._attend(request._replace(q=request.q[index]), group)
            out[index] = part
            if lse is not None and sums is not None:
                lse[index] = sums
        return out, lse

    def _attend(self, request: Request, group: Alike) -> tuple[Tensor, Tensor | None]:
        q = _grouped(request, group)
        first, heads = group.length - q.shape[3], q.shape[1]
        blocks = list(group.blocks(q.shape[3], self.at_once))
        if len(blocks) == 1 and _plain(request) and _all(group, request, q, blocks[0]):
            keys, values = self._opened(group, blocks[0], q.dtype)
            weights = _scores(q, keys, request).softmax(-1)
            return _grouped_matmul(weights, values).flatten(1, 2), None
        pieces = _pieces(q, max((block.stop - block.start for block in blocks), default=1))
        softmaxes = [(t0, t1, _Softmax(q[:, :, :, t0:t1])) for t0, t1 in pieces]
        for block in blocks:
            seeing = [
                (t0, t1, softmax, how)
                for t0, t1, softmax in softmaxes
                if (how := group.relation(request.mask, first + t0, first + t1, block)) != "none"
            ]
            if not seeing:
                continue
            keys, values = self._opened(group, block, q.dtype)
            for t0, t1, softmax, how in seeing:
                mask = None
                if how == "some":
                    part = group.allowed(request.mask, first + t0, first + t1, block)
                    part = part.expand(q.shape[0], *part.shape[1:])
                    mask = _by_group(part, heads)
                softmax.add(_scores(softmax.q, keys, request), mask, values)
        dim = group.pages.values.dim
        outs = [softmax.result(request.sink_logits, dim) for _, _, softmax in softmaxes]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
        return out, torch.cat([s.lse() for _, _, s in softmaxes], 2) if request.lse else None

    def _opened(self, group: Alike, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of a block."""
        keys = group.rows("keys", block).to(dtype)
        same = group.pages.values is group.pages.keys
        return keys, keys if same else group.rows("values", block).to(dtype)

    def choose(self, request: Request, pages: View) -> Tensor | None:
        return choose(request, pages)

    def store(self, change: Change, rows: Fields, sides: Mapping[str, Stored]) -> bool:
        write(change, rows, sides)
        return True


def _reading(request: Request, group: Alike) -> Alike:
    """The sequences of a group, of whose sealed pages the chosen ones are read."""
    assert request.chosen is not None
    heads = request.q.shape[1] // group.pages.keys.heads
    read = reads(group.of(request.chosen), int(group.pages.extent.stop_sealed[group.first]))
    return replace(group, read=read.repeat_interleave(heads, 1))


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _grouped(request: Request, group: Alike) -> Tensor:
    """Queries as [B, H, group, T, D], scaled."""
    batch, all_heads, count, dim = request.q.shape
    heads = group.pages.keys.heads
    q = request.q.to(_wide(request.q)).mul(request.scale)
    return q.view(batch, heads, all_heads // heads, count, dim)


def _all(group: Alike, request: Request, q: Tensor, block: Block) -> bool:
    """Do all queries see all of the block, which is all there is, and does the scratch hold it?"""
    first, keys = group.length - q.shape[3], block.stop - block.start
    small = 0 < q[..., 0].numel() * keys <= SCORES
    return small and group.relation(request.mask, first, group.length, block) == "all"


def serves(pages: View, queries: int, mask: Mask) -> bool:
    """Has a view all rows that the newest queries see by this rule?"""
    key = ("serves", queries, mask, pages.dense, pages.came)
    found: bool | None = pages.extent.memo.get(key)
    if found is None:
        groups = alike(pages) if pages.batch else []
        found = pages.extent.memo[key] = all(_serves(group, queries, mask) for group in groups)
    return found


def _serves(group: Alike, queries: int, mask: Mask) -> bool:
    extent, page, query = group.pages.extent, group.pages.extent.kind.page, group.length - queries
    if group.length <= 0:
        return True
    query = max(query, 0)
    low = int(extent.missing[group.first])
    if mask.window is not None:
        low = max(low, query - mask.window + 1)
    if low > group.sinks < mask.sinks:  # the others lie among the rows
        low = group.sinks
    seam = max(low, group.seam(query))
    first_open = page * int(extent.first_open[group.first])
    apart = max(group.sinks, page * extent.kind.sink_pages)
    dense = seam >= min(first_open, group.came) or first_open <= apart
    return dense and low >= min(int(extent.first_row[group.first]), max(seam, 0))


def seen_rows(group: Alike, side: Literal["keys", "values"], start: int, stop: int) -> Tensor:
    """Framed rows of positions [start, stop), [B, H, n, D], as the newest query sees them.

    Zeros stand where there is no row.
    """
    extent, which = group.pages.extent, group.first
    stored = group.pages.keys if side == "keys" else group.pages.values
    count = extent.tables if group.which is None else len(group.which)
    end = min(stop, group.length)
    seam = min(group.seam(group.length - 1), end)
    low = max(start, int(extent.first_row[which]))
    cuts: list[Block] = []
    if (sinks := min(group.sinks, end, group.came)) > max(start, 0):
        cuts.append(Block("sinks", max(start, 0), sinks))
        low = max(low, sinks)
    if low < seam:
        cuts.append(Block("sealed", low, seam))
    if (low := max(low, seam)) < min(group.came, end):
        cuts.append(Block("open", low, min(group.came, end)))
    if (low := max(low, group.came)) < end:
        cuts.append(Block("own", low, end))
    heads, dim = stored.heads, stored.dim
    parts, place = [], start
    for cut in [*cuts, Block("own", stop, stop)]:
        if place < cut.start:
            parts.append(stored.open.new_zeros(count, heads, cut.start - place, dim))
        if cut.start < cut.stop:
            parts.append(group.rows(side, cut).to(stored.open.dtype))
        place = cut.stop
    if not parts:
        return stored.open.new_zeros(count, heads, 0, dim)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


@lru_cache(maxsize=1)
def _keep_scratch() -> None:
    """Let the C library keep what scratch is made of, rather than fetch it from the system anew.

    glibc gives freed memory back beyond twice the largest block that it has seen freed, 32 MiB at
    most; a few blocks of scratch are more than that at first, and cost a page fault per 4 KiB.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def _plain(request: Request) -> bool:
    """Is nothing but the outputs asked for?"""
    return not request.lse and request.sink_logits is None


@dataclass
class _Softmax:
    """Running maximum, sum and weighted values of some queries: [B, H, group, T, ...]."""

    q: Tensor
    top: Tensor | None = None
    total: Tensor | None = None
    out: Tensor | None = None
    masked: bool = False  # was anything hidden from anybody?

    def add(self, scores: Tensor, mask: Tensor | None, values: Tensor) -> None:
        stain = None
        if mask is not None:
            self.masked = True
            hidden = ~mask if mask.dtype == torch.bool else mask == float("-inf")
            if mask.dtype != torch.bool:
                scores = scores + mask.to(scores.dtype)
            scores = scores.masked_fill(hidden, float("-inf"))
            values, stain = _stained(values, ~hidden)
        top = scores.amax(-1, keepdim=True)
        if self.top is not None:
            top = torch.maximum(self.top, top)
        # A query that sees nothing yet has no maximum to be measured from.
        finite = top if mask is None else top.masked_fill(top == float("-inf"), 0.0)
        weights = torch.exp(scores - finite)
        total = weights.sum(-1, keepdim=True)
        out = _grouped_matmul(weights, values)
        if stain is not None:
            out = out.masked_fill(stain, float("nan"))
        if self.top is not None and self.total is not None and self.out is not None:
            fade = torch.exp(self.top - finite)
            total, out = self.total * fade + total, self.out * fade + out
        self.top, self.total, self.out = top, total, out

    def result(self, sink_logits: Tensor | None, dim: int) -> Tensor:
        """Outputs [B, heads, T, dim]."""
        top, total, out = self.top, self.total, self.out
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
        self.top, self.total = top, total
        if self.masked:  # some may see nothing
            total = torch.where(total == 0, 1.0, total)
        return (out / total).flatten(1, 2)

    def lse(self) -> Tensor:
        """Log-sum-exp [B, heads, T] of a result."""
        assert self.top is not None and self.total is not None
        return (self.top + self.total.log()).squeeze(-1).flatten(1, 2)


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


def _scores(q: Tensor, keys: Tensor, request: Request) -> Tensor:
    scores = _grouped_matmul(q, keys.transpose(-1, -2))
    cap = request.softcap
    return scores if cap is None else torch.tanh(scores / cap) * cap


def _stained(values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor | None]:
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


def _by_group(mask: Tensor, heads: int) -> Tensor:
    """[B, all heads or 1, T, n] -> [B, H or 1, group or 1, T, n]."""
    if mask.shape[1] == 1:
        return mask.unsqueeze(2)
    batch, all_heads, count, keys = mask.shape
    return mask.view(batch, heads, all_heads // heads, count, keys)


def _pieces(q: Tensor, keys: int) -> Iterator[tuple[int, int]]:
    """Queries in pieces whose scores fit the scratch."""
    batch, heads, group, count, _ = q.shape
    step = max(1, SCORES // (batch * heads * group * keys))
    return ((t, min(t + step, count)) for t in range(0, max(count, 1), step))
