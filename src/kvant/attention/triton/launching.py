"""One request: how many queries and columns a program takes, and the two launches."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from math import frexp
from typing import Any

import torch
from torch import Tensor

from kvant.attention.triton.forms import (
    Half,
    Place,
    beginning,
    beside,
    constant,
    known,
    pages,
    power,
    records,
    rows,
)
from kvant.contracts import Mask, Request, View
from kvant.extent import Kind
from kvant.launches import on

BLOCK = 64  # rows at a time: every sealed page is a multiple of it
PROGRAMS = 264  # two for each multiprocessor of the larger GPUs: ranges are split until there are
LEAST = 4 * BLOCK  # rows a range: less is not worth a merge
SHARED = 1 << 17  # bytes for rows on their way: more would leave no room for a second program
NARROW = 16  # queries that a program takes at least: a matrix product does
FAR = (1 << 31) - 1  # beyond any position; kernels count in 32 bits
SCRATCH = 1 << 25  # values that ranges give before they are merged, at a time


@dataclass(frozen=True)
class Scope:
    """What kernels read: the rows of one layer, and where its sequences are."""

    keys: Half
    values: Half
    place: Place
    kind: Kind
    dense: bool = False  # are own rows dense to all queries?
    chosen: Tensor | None = None  # sealed pages, where not all are read

    @classmethod
    def of(cls, view: View, chosen: Tensor | None = None) -> Scope:
        own = {} if view.own is None else {n: beside(rows) for n, rows in view.own.items()}
        keys, values = (
            Half(known(stored.codec), stored.open, stored.sealed, own.get(name))
            for name, stored in (("keys", view.keys), ("values", view.values))
        )
        place = Place.of(view.extent, view.keys.open.device)
        return cls(keys, values, place, view.extent.kind, view.dense, chosen)

    @property
    def came(self) -> int:
        """The columns that came with the forward itself."""
        return 0 if self.keys.own is None else self.keys.own.shape[2]

    @property
    def stored(self) -> int:
        """Sealed rows of a sequence that are read, at most."""
        return self.place.stored if self.chosen is None else self.chosen.shape[3] * self.kind.page


@dataclass(frozen=True)
class Plan:
    """How so many queries of each sequence are cut into programs."""

    tile: int  # queries of a group, all its heads together
    tiles: int
    sealed: int  # ranges of sealed pages; of dense rows one at least: it reads the sinks
    dense: int

    @classmethod
    def of(cls, scope: Scope, heads: int, queries: int) -> Plan:
        """For so many key heads in all, and queries of each; ranges are for the longest."""
        both = scope.keys.open, scope.values.open
        widest = 32 if both[0].dtype == torch.float32 else 64
        tile = min(widest, max(NARROW, power(queries)))
        while tile > NARROW and shared(*both, tile, 1) > available(both[0].device):
            tile //= 2
        tiles = -(-queries // tile)
        stored, dense = scope.stored, max(scope.place.opened, scope.came)
        ranges = max(1, PROGRAMS // (heads * tiles))
        span = max(LEAST, -(-(stored + dense) // ranges))
        span = -(-span // BLOCK) * BLOCK
        return cls(tile, tiles, -(-stored // span), max(1, -(-dense // span)))

    @property
    def ranges(self) -> int:
        return self.sealed + self.dense


def launch(request: Request, scope: Scope) -> tuple[Tensor, Tensor | None]:
    """Outputs and log-sum-exp, of as many queries at a time as the scratch allows."""
    batch, heads, queries, _ = request.q.shape
    dim = scope.values.open.shape[3]
    out = torch.empty(batch, heads, queries, dim, dtype=request.out_dtype, device=request.q.device)
    lse = out.new_empty(out.shape[:3], dtype=torch.float32) if request.lse else None
    # Each position chooses for itself.
    step = max(1, SCRATCH // (2 * batch * heads * dim)) if scope.chosen is None else 1
    with on(out.device):
        for first in range(0, queries, step):
            _launch(request, scope, range(first, min(first + step, queries)), out, lse)
    return out, lse


def _launch(request: Request, scope: Scope, which: range, out: Tensor, lse: Tensor | None) -> None:
    """These of the queries that are asked for."""
    from kvant.attention.triton.kernels import attend

    q, place = request.q[:, :, which.start : which.stop], scope.place
    batch, all_heads, count, _ = q.shape
    heads, dim = scope.keys.open.shape[1], scope.values.open.shape[3]
    plan = Plan.of(scope, batch * heads, count * (all_heads // heads))
    shape = (plan.ranges, batch, all_heads, count)
    sizes = (*shape, dim), shape, shape
    found = records().Partial(*(out.new_empty(size, dtype=torch.float32) for size in sizes))
    chosen = scope.chosen
    if chosen is not None:
        chosen = chosen[:, :, which.start : which.stop].contiguous()
    attend.attend[plan.tiles * batch * heads, plan.ranges](
        found,
        _asked(request, q, scope),
        _side(scope.keys),
        _side(scope.values),
        place.rows,
        place.rows.shape[1],
        place.open_at,
        _rule(request, scope),
        scope.came,
        request.q.shape[2] - which.start,
        count,
        plan.sealed,
        place.rows if chosen is None else chosen,
        0 if chosen is None else chosen.shape[3],
        TILE=plan.tile,
        BLOCK=BLOCK,
        MANY=request.q.shape[2] > 1,
        OWN=scope.came > 0,
        CHOSEN=chosen is not None,
        num_warps=4 if plan.tile < 64 else 8,  # or weighted sums spill from the registers
        num_stages=_stages(scope, plan.tile),
        enable_fp_fusion=True,
    )
    _merge(found, request, plan.ranges, which, out, lse)


def _merge(
    found: Any, request: Request, ranges: int, which: range, out: Tensor, lse: Tensor | None
) -> None:
    """What the ranges gave `which` of the queries."""
    from kvant.attention.triton.kernels import attend

    (batch, heads, queries, dim), logits = out.shape, request.sink_logits
    if logits is not None:
        logits = logits.contiguous()
    attend.merge[batch * heads * len(which),](
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


def shared(keys: Tensor, values: Tensor, tile: int, stages: int) -> int:
    """Bytes of shared memory that a program takes, at most: blocks of rows, queries, weights."""
    size = max(keys.element_size(), values.element_size())
    blocks = _blocks(keys, values)
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


def _stages(scope: Scope, tile: int) -> int:
    """How many blocks of rows are loaded ahead: as many as the shared memory has room for."""
    both = scope.keys.open, scope.values.open
    most = max(1, min(3, SHARED // sum(_blocks(*both))))
    room = available(both[0].device)
    return next((n for n in range(most, 1, -1) if shared(*both, tile, n) <= room), 1)


def _blocks(*both: Tensor) -> list[int]:
    """Bytes of a block of keys, and of one of values."""
    return [BLOCK * power(pages.shape[3]) * pages.element_size() for pages in both]


def _side(half: Half) -> Any:
    paged = half.open
    return records().Side(
        *beginning(half.form, paged.shape[3], paged.dtype, paged.is_cpu),
        pages(half),
        rows(paged),
        rows(paged if half.own is None else half.own),
    )


def _asked(request: Request, q: Tensor, scope: Scope) -> Any:
    paged, cap = scope.keys.open, request.softcap
    heads, scale = paged.shape[1], float(request.scale)
    before = 2.0 ** (frexp(scale)[1] - 1)
    split = q.dtype != torch.bfloat16 and not q.is_cpu and paged.dtype == torch.bfloat16
    return records().Asked(
        rows(q),
        constant(heads),
        constant(q.shape[1] // heads),
        constant(split),
        before,
        scale / before,
        constant(cap is not None),
        float(cap or 0.0),
    )


def _rule(request: Request, scope: Scope) -> Any:
    mask, paging = request.mask, scope.kind.paging
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
        min(scope.kind.sinks, FAR),
        constant(scope.dense and scope.came > 0),
    )
