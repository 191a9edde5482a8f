"""Attention of a tile of queries over one range of rows, a program each, and the ranges merged."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.kernels.records import (
    BEGINS,
    FIRST_OPEN,
    FIRST_SEALED,
    LENGTH,
    MOST,
    NUMBERS,
    STOP_SEALED,
    Extent,
    Tile,
)
from kvant.attention.triton.kernels.rows import lowest, over_pages, over_rows, seam

LEAST = tl.constexpr(4)  # blocks a range: less is not worth a merge
VARYING = ("width", "open_at", "came", "behind", "queries", "sealed_ranges", "num_chosen")


@triton.jit(do_not_specialize=VARYING)
def attend(  # no kernel is compiled for a value of what varies from call to call
    partial,
    asked,
    keys,
    values,
    place,
    width,  # of a row of it
    open_at,  # where the table of open pages begins in one
    rule,
    came,  # columns that came with the forward itself
    behind,  # by how many tokens the first query stands behind the length
    queries,
    sealed_ranges,
    chosen,  # of sealed pages these only: [B, H, queries, num_chosen] numbers, then -1
    num_chosen,
    TILE: tl.constexpr,  # queries, of all heads of a group
    BLOCK: tl.constexpr,  # rows at a time
    MANY: tl.constexpr,  # more than one query a head
    OWN: tl.constexpr,  # are there rows that came with the forward itself?
    CHOSEN: tl.constexpr,  # is not all read? Then a program has one position
):
    # Ranges are few: whatever may be many shares the axis that is long enough, tiles side by side.
    tiles = tl.cdiv(queries * asked.group, TILE)
    pair, begin = tl.program_id(0) // tiles, tl.program_id(0) % tiles * TILE
    b, head, mine = pair // asked.heads, pair % asked.heads, tl.program_id(1)
    extent = _extent(place + b.to(tl.int64) * width, open_at, rule, came, behind, queries)
    number = begin + tl.arange(0, TILE)
    t, q_head = (number // asked.group).to(tl.int64), head * asked.group + number % asked.group
    tile = _tile(asked, rule, extent, b, head, begin, q_head, t, queries, TILE)
    sequence = mine * (tl.num_programs(0) // tiles // asked.heads) + tile.b
    to = (sequence * (asked.heads * asked.group) + q_head) * queries + t
    if mine < sealed_ranges:
        if CHOSEN:
            rows = num_chosen * rule.page
        else:
            stop = tl.minimum(
                extent.stop_sealed * rule.page, seam(rule, extent.came, extent.newest)
            )
            rows = stop - extent.first_sealed * rule.page
        span = _share(rows, sealed_ranges, BLOCK)
        own = chosen + pair.to(tl.int64) * queries * num_chosen
        ahead = mine * span
        found = over_pages(
            tile,
            asked,
            keys,
            values,
            rule,
            extent,
            ahead,
            span,
            own,
            num_chosen,
            BLOCK,
            MANY,
            CHOSEN,
        )
        _put(partial, values.dim, tile, to, found)
    else:
        ranges = tl.num_programs(1) - sealed_ranges
        span = _share(extent.length - extent.dense_from, ranges, BLOCK)
        after = (mine - sealed_ranges) * span
        dense = over_rows(tile, asked, keys, values, rule, extent, after, span, BLOCK, MANY, OWN)
        _put(partial, values.dim, tile, to, dense)


@triton.jit
def _share(rows, ranges, BLOCK: tl.constexpr):
    """How many of the rows that there are each range takes."""
    return tl.maximum(LEAST, tl.cdiv(tl.cdiv(rows, ranges), BLOCK)) * BLOCK


@triton.jit
def _extent(row, open_at, rule, came, behind, queries):
    """Where a sequence is, by its row of the place."""
    length = tl.minimum(tl.load(row + LENGTH), tl.load(row + MOST)).to(tl.int32)
    first = tl.maximum(length - came, 0)
    oldest = length - behind
    # A dense row below the first seam is nobody's, and open pages may begin behind own rows.
    dense_from = tl.load(row + FIRST_OPEN).to(tl.int32) * rule.page
    dense_from = tl.minimum(tl.maximum(dense_from, seam(rule, first, oldest)), first)
    return Extent(
        length,
        first,
        length - came,
        tl.load(row + BEGINS).to(tl.int32),
        oldest,
        oldest + queries - 1,
        tl.load(row + FIRST_SEALED).to(tl.int32),
        tl.load(row + STOP_SEALED).to(tl.int32),
        dense_from,
        row + NUMBERS,
        row + open_at,
    )


@triton.jit
def _tile(asked, rule, extent, b, head, begin, q_head, t, queries, TILE: tl.constexpr):
    at = b.to(tl.int64) * asked.rows.first + q_head.to(tl.int64) * asked.rows.head
    rows = asked.rows.data + at + t * asked.rows.row
    oldest = extent.oldest
    first = oldest + begin // asked.group
    last = oldest + tl.minimum((begin + TILE - 1) // asked.group, queries - 1)
    query = oldest + t.to(tl.int32)
    low, border = lowest(rule, first), seam(rule, extent.came, query)
    b, head = b.to(tl.int64), head.to(tl.int64)  # whose strides may lead beyond 2^31
    return Tile(b, head, rows, t < queries, query, first, last, low, border)


@triton.jit
def _put(partial, dim: tl.constexpr, tile, to, found):
    """Where `merge` finds it."""
    top, total, out, channel, there = found
    mask = tile.there[:, None] & there[None, :]
    tl.store(partial.out + to[:, None] * dim + channel[None, :], out, mask=mask)
    tl.store(partial.top + to, top, mask=tile.there)
    tl.store(partial.total + to, total, mask=tile.there)


@triton.jit(do_not_specialize=["ranges", "queries", "first", "all_queries"])
def merge(
    partial,
    out,
    lse,
    logits,
    ranges,
    queries,
    first,  # of these queries among
    all_queries,
    dim: tl.constexpr,
    WIDE: tl.constexpr,  # the power of two that holds dim
    HEADS: tl.constexpr,  # of queries
    SINK: tl.constexpr,  # are there logits that lead nowhere?
    LSE: tl.constexpr,
):
    """A query that sees nothing gets zeros, and -inf."""
    place = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64)
    channel = tl.arange(0, WIDE)
    if SINK:
        top = tl.load(logits + place // queries % HEADS).to(tl.float32) * 1.4426950408889634
    else:
        top = float("-inf")
    total = tl.where(top > float("-inf"), 1.0, 0.0)
    found = tl.zeros([WIDE], tl.float32)
    for _ in range(ranges):
        part_top, part_total = tl.load(partial.top + place), tl.load(partial.total + place)
        part = tl.load(partial.out + place * dim + channel, mask=channel < dim, other=0.0)
        new = tl.maximum(top, part_top)
        base = tl.where(new == float("-inf"), 0.0, new)
        fade, rise = tl.exp2(top - base), tl.exp2(part_top - base)
        total = total * fade + part_total * rise
        found = found * fade + part * rise
        top = new
        place += step
    place = tl.program_id(0).to(tl.int64)
    place = place // queries * all_queries + first + place % queries
    safe = tl.where(total == 0, 1.0, total)
    tl.store(out + place * dim + channel, (found / safe).to(out.dtype.element_ty), channel < dim)
    if LSE:
        tl.store(lse + place, (top + tl.log2(total)) * 0.6931471805599453)
