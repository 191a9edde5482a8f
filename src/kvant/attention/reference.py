"""The backend that serves every view and defines what is right.

Block by block: rows are opened into bounded scratch in float32, scored, and merged by an online
softmax. No path holds the whole dense cache, but where one is told to open all `at_once`: that is
the customary way to read a compressed cache, here to be compared with. A query that sees nothing
gets zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvant.attention.mask import Block, allowed, relation
from kvant.attention.opening import open_pages
from kvant.contracts import Codec, Fields, Request, Side, Tiles, View

ROWS = 1 << 20  # values of opened rows, 4 MiB: what a processor's cache still holds
SCORES = 2 << 20  # scores at a time


@dataclass(frozen=True)
class Reference:
    """Plain PyTorch."""

    name: str = "reference"
    at_once: int = ROWS  # values of opened rows

    def supports(self, view: View, request: Request | None = None) -> str | None:
        return None

    def seal(self, codec: Codec, rows: Tensor, side: str, tiles: Tiles | None) -> Fields | None:
        fields = codec.seal(rows)
        if tiles is None:
            return fields
        return {name: tiles.pack(f"{side}.{name}", field) for name, field in fields.items()}

    def attend(self, request: Request, view: View) -> tuple[Tensor, Tensor | None]:
        _keep_scratch()
        q = _grouped(request, view)
        first, heads = view.columns - q.shape[3], q.shape[1]
        blocks = list(_blocks(view, self.at_once))
        if len(blocks) == 1 and _plain(request) and _all(view, request, q, blocks[0]):
            keys, values = self._opened(view, blocks[0], q.dtype)
            weights = _scores(q, keys, request).softmax(-1)
            return _grouped_matmul(weights, values).flatten(1, 2), None
        pieces = _pieces(q, max((block.stop - block.start for block in blocks), default=1))
        softmaxes = [(t0, t1, _Softmax(q[:, :, :, t0:t1])) for t0, t1 in pieces]
        for block in blocks:
            seeing = [
                (t0, t1, softmax, how)
                for t0, t1, softmax in softmaxes
                if (how := relation(view, request.mask, first + t0, first + t1, block)) != "none"
            ]
            if not seeing:
                continue
            keys, values = self._opened(view, block, q.dtype)
            for t0, t1, softmax, how in seeing:
                mask = None
                if how == "some":
                    part = allowed(view, request.mask, first + t0, first + t1, block)
                    mask = _by_group(part, heads)
                softmax.add(_scores(softmax.q, keys, request), mask, values)
        dim = view.values.room.shape[3]
        outs = [softmax.result(request.sink_logits, dim) for _, _, softmax in softmaxes]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
        return out, torch.cat([s.lse() for _, _, s in softmaxes], 2) if request.lse else None

    def _opened(self, view: View, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of a block."""
        keys = _rows(view, view.keys, block).to(dtype)
        same = view.values is view.keys
        return keys, keys if same else _rows(view, view.values, block).to(dtype)


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


def _all(view: View, request: Request, q: Tensor, block: Block) -> bool:
    """Do all queries see all of the block, which is all there is, and does the scratch hold it?"""
    first, keys = view.columns - q.shape[3], block.stop - block.start
    small = 0 < q[..., 0].numel() * keys <= SCORES
    return small and relation(view, request.mask, first, view.columns, block) == "all"


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


def _grouped(request: Request, view: View) -> Tensor:
    """Queries as [B, H, group, T, D], scaled."""
    batch, all_heads, count, dim = request.q.shape
    heads = view.keys.room.shape[1]
    wide = torch.float64 if request.q.dtype == torch.float64 else torch.float32
    return request.q.to(wide).mul(request.scale).view(batch, heads, all_heads // heads, count, dim)


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


def _blocks(view: View, at_once: int) -> Iterator[Block]:
    """The view in pieces of so many values when opened; sealed pieces are whole pages."""
    batch, heads, _, dim = view.keys.room.shape
    count = view.keys.count
    wide = max(dim, view.values.room.shape[3])
    pages = max(1, at_once // (batch * heads * wide * view.page))
    if view.keys.sinks.shape[2]:
        yield Block("sinks", 0, view.keys.sinks.shape[2])
    first, page = view.first_page, view.page
    last = first + view.page_table.shape[1]
    for start in range(first, last, pages):
        yield Block("sealed", start * page, min(start + pages, last) * page)
    end = view.dense_from + count
    for start in range(view.dense_from, end, pages * page):
        yield Block("dense", start, min(start + pages * page, end))


def _pieces(q: Tensor, keys: int) -> Iterator[tuple[int, int]]:
    """Queries in pieces whose scores fit the scratch."""
    batch, heads, group, count, _ = q.shape
    step = max(1, SCORES // (batch * heads * group * keys))
    return ((t, min(t + step, count)) for t in range(0, max(count, 1), step))


def _rows(view: View, side: Side, block: Block) -> Tensor:
    """The rows of a block, [B, H, n, D]."""
    if block.part == "sinks":
        return side.sinks
    if block.part == "dense":
        count = block.stop - block.start
        if count == side.count:
            return side.dense
        return side.dense.narrow(2, block.start - view.dense_from, count)
    first = block.start // view.page - view.first_page
    return open_pages(view, side, first, first + (block.stop - block.start) // view.page)
