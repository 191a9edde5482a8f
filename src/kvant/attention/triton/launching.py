"""One request: how many queries and columns a program takes, and the two launches."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from math import frexp
from typing import Any, cast

import torch
from torch import Tensor

from kvant.attention.triton.forms import beginning, constant, pages, power, records
from kvant.contracts import Mask, Request, Side, View
from kvant.launches import on

BLOCK = 64  # columns at a time: every page is a multiple of it
PROGRAMS = 264  # two for each multiprocessor of the larger GPUs: ranges are split until there are
LEAST = 4 * BLOCK  # columns a range: less is not worth a merge
SHARED = 1 << 17  # bytes for rows on their way: more would leave no room for a second program
NARROW = 16  # queries that a program takes at least: a matrix product does
FAR = (1 << 31) - 1  # beyond any column; kernels count in 32 bits
SCRATCH = 1 << 25  # values that ranges give before they are merged, at a time


@dataclass(frozen=True)
class Plan:
    """How the queries at [oldest, oldest + queries) are cut into programs."""

    tile: int  # queries of a group, all its heads together
    tiles: int
    span: int  # columns a range
    sealed: int  # ranges of sealed pages; of dense rows one at least: it reads the sinks
    dense: int

    @classmethod
    def of(cls, view: View, heads: int, rows: int) -> Plan:
        """For so many key heads in all, and queries of each."""
        widest = 32 if view.keys.room.dtype == torch.float32 else 64
        tile = min(widest, max(NARROW, power(rows)))
        while tile > NARROW and shared(view, tile, 1) > available(view.start.device):
            tile //= 2
        tiles = -(-rows // tile)
        stored, open_ = view.page_table.shape[1] * view.page, view.keys.count
        ranges = max(1, PROGRAMS // (heads * tiles))
        span = max(LEAST, -(-(stored + open_) // ranges))
        span = -(-span // BLOCK) * BLOCK
        return cls(tile, tiles, span, -(-stored // span), max(1, -(-open_ // span)))

    @property
    def ranges(self) -> int:
        return self.sealed + self.dense


def launch(
    request: Request, view: View, place: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Outputs and log-sum-exp, of as many queries at a time as the scratch allows.

    With a `place`, that of a `Step`, the view is all the memory that there is.
    """
    batch, heads, queries, _ = request.q.shape
    dim = view.values.room.shape[3]
    out = torch.empty(batch, heads, queries, dim, dtype=request.dtype, device=request.q.device)
    lse = out.new_empty(out.shape[:3], dtype=torch.float32) if request.lse else None
    step = max(1, SCRATCH // (2 * batch * heads * dim))
    with on(out.device):
        for first in range(0, queries, step):
            _launch(request, view, first, min(first + step, queries), out, lse, place)
    return out, lse


def _launch(
    request: Request,
    view: View,
    first: int,
    stop: int,
    out: Tensor,
    lse: Tensor | None,
    place: Tensor | None,
) -> None:
    """Queries [first, stop) of those asked for."""
    from kvant.attention.triton.kernels import attend

    q, count = request.q[:, :, first:stop], stop - first
    batch, all_heads = q.shape[:2]
    heads, dim = view.keys.room.shape[1], view.values.room.shape[3]
    plan = Plan.of(view, batch * heads, count * (all_heads // heads))
    shape = (plan.ranges, batch, all_heads, count)
    sizes = (*shape, dim), shape, shape
    found = records().Partial(*(out.new_empty(size, dtype=torch.float32) for size in sizes))
    attend.attend[plan.tiles * batch * heads, plan.ranges](
        found,
        _asked(request, q, view),
        _side(view.keys),
        _side(view.values),
        view.page_table,
        view.page_table.stride(0),
        view.start,
        place,
        _rule(request, view),
        view.columns,
        view.columns - request.q.shape[2] + first,
        count,
        view.first_page,
        view.page_table.shape[1],
        view.dense_from,
        view.keys.slot,
        view.own_from,
        plan.sealed,
        plan.span,
        TILE=plan.tile,
        BLOCK=BLOCK,
        MANY=request.q.shape[2] > 1,
        num_warps=4 if plan.tile < 64 else 8,  # or weighted sums spill from the registers
        num_stages=_stages(view, plan.tile),
        enable_fp_fusion=True,
    )
    _merge(found, request, plan.ranges, range(first, stop), out, lse)


def _merge(
    found: Any, request: Request, ranges: int, which: range, out: Tensor, lse: Tensor | None
) -> None:
    """What the ranges gave `which` of the queries."""
    from kvant.attention.triton.kernels import merge

    (batch, heads, queries, dim), logits = out.shape, request.sink_logits
    if logits is not None:
        logits = logits.contiguous()
    merge.merge[batch * heads * len(which),](
        found,
        out,
        out if lse is None else lse,
        out if logits is None else logits,
        ranges,
        len(which),
        which.start,
        queries,
        dim=dim,
        WIDE=power(dim),
        HEADS=heads,
        SINK=logits is not None,
        LSE=lse is not None,
        enable_fp_fusion=True,
    )


def shared(view: View, tile: int, stages: int) -> int:
    """Bytes of shared memory that a program takes, at most: blocks of rows, queries, weights."""
    keys, values = view.keys.room, view.values.room
    size = max(keys.element_size(), values.element_size())
    blocks = _blocks(view)
    rows = max(blocks) if stages == 1 else stages * sum(blocks)
    return rows + tile * (power(keys.shape[3]) + BLOCK) * size


@lru_cache(maxsize=64)
def available(device: torch.device) -> int:
    """Bytes of shared memory that a program may take; without a GPU nobody counts them."""
    if device.type != "cuda":
        return sys.maxsize
    # What is not said, as of AMD's, is 64 KiB.
    there = torch.cuda.get_device_properties(device)
    return getattr(there, "shared_memory_per_block_optin", 1 << 16)


def _stages(view: View, tile: int) -> int:
    """How many blocks of rows are loaded ahead: as many as the shared memory has room for."""
    most = max(1, min(3, SHARED // sum(_blocks(view))))
    room = available(view.start.device)
    return next((n for n in range(most, 1, -1) if shared(view, tile, n) <= room), 1)


def _blocks(view: View) -> list[int]:
    """Bytes of a block of keys, and of one of values."""
    rooms = view.keys.room, view.values.room
    return [BLOCK * power(room.shape[3]) * room.element_size() for room in rooms]


def _side(side: Side) -> Any:
    room, sinks, types = side.room, side.sinks, records()
    return types.Side(
        *beginning(cast(Hashable, side.codec), room.shape[3], room.dtype, room.is_cpu),
        pages(side),
        types.Rows(room, *room.stride()[:3]),
        types.Rows(sinks, *sinks.stride()[:3]),
    )


def _asked(request: Request, q: Tensor, view: View) -> Any:
    room, cap, types = view.keys.room, request.softcap, records()
    heads, scale = room.shape[1], float(request.scale)
    before = 2.0 ** (frexp(scale)[1] - 1)
    split = q.dtype != torch.bfloat16 and not q.is_cpu and room.dtype == torch.bfloat16
    return types.Asked(
        types.Rows(q, *q.stride()[:3]),
        constant(heads),
        constant(q.shape[1] // heads),
        constant(split),
        before,
        scale / before,
        constant(cap is not None),
        float(cap or 0.0),
    )


def _rule(request: Request, view: View) -> Any:
    mask, paging = request.mask, view.paging
    assert isinstance(mask, Mask)
    return records().Rule(
        constant(mask.causal),
        constant(mask.window is not None),
        min(mask.window or 0, FAR),
        min(mask.sinks, FAR),
        constant(mask.chunk is not None),
        min(mask.chunk or 0, FAR),
        constant(paging.page),
        -1 if paging.tail is None else min(paging.tail, FAR),
        min(paging.dense_until, FAR),
        view.keys.sinks.shape[2],
    )
