"""Attention of a tile of queries over one range of columns: a program each.

A tile holds queries of one key head, all heads of its group. A range is of sealed pages or of dense
rows, never both, since their values come in different orders; the first of the dense ones reads the
sinks too. What the ranges give is merged by merge.py. Nothing here knows a frame.
"""

import triton
import triton.language as tl

from kvant.attention.triton.kernels.dense import over_rows
from kvant.attention.triton.kernels.records import (
    COLUMNS,
    FIRST_COLUMN,
    FIRST_PAGE,
    MOST,
    Extent,
    Tile,
)
from kvant.attention.triton.kernels.rules import lowest, seam
from kvant.attention.triton.kernels.sealed import over_pages

VARYING = (  # from call to call: no kernel is compiled for one of their values
    "table_batch",
    "columns",
    "oldest",
    "queries",
    "first_page",
    "num_pages",
    "dense_from",
    "slot",
    "own_from",
    "sealed_ranges",
    "span",
)


@triton.jit(do_not_specialize=VARYING)
def attend(
    partial,
    asked,
    keys,
    values,
    table,
    table_batch,
    starts,
    place,  # None, or the place of a `Step`
    rule,
    columns,
    oldest,
    queries,
    first_page,
    num_pages,
    dense_from,
    slot,
    own_from,
    sealed_ranges,
    span,  # columns a range
    TILE: tl.constexpr,  # queries, of all heads of a group
    BLOCK: tl.constexpr,  # columns at a time
    MANY: tl.constexpr,  # more than one query a head
):
    if place is not None:
        columns = tl.minimum(tl.load(place + COLUMNS), tl.load(place + MOST)).to(tl.int32)
        first_page = tl.load(place + FIRST_PAGE).to(tl.int32)
        dense_from = tl.load(place + FIRST_COLUMN).to(tl.int32)
        oldest, own_from = columns - queries, columns
    extent = Extent(columns, oldest, first_page, num_pages, dense_from, slot, own_from)
    # Ranges are few: whatever may be many shares the axis that is long enough, tiles side by side.
    tiles = tl.cdiv(queries * asked.group, TILE)
    pair, begin = tl.program_id(0) // tiles, tl.program_id(0) % tiles * TILE
    b, head, mine = pair // asked.heads, pair % asked.heads, tl.program_id(1)
    number = begin + tl.arange(0, TILE)
    t, q_head = (number // asked.group).to(tl.int64), head * asked.group + number % asked.group
    start = tl.load(starts + b)
    tile = _tile(asked, rule, extent, b, head, start, begin, q_head, t, queries, TILE)
    sequence = mine * (tl.num_programs(0) // tiles // asked.heads) + tile.b
    to = (sequence * (asked.heads * asked.group) + q_head) * queries + t
    if mine < sealed_ranges:
        if place is not None:
            span = _share(seam(rule, extent, oldest) - first_page * rule.page, sealed_ranges, BLOCK)
        table += b.to(tl.int64) * table_batch
        ahead = mine * span
        found = over_pages(tile, asked, keys, values, table, rule, extent, ahead, span, BLOCK, MANY)
        _put(partial, values.dim, tile, to, found)
    else:
        if place is not None:
            span = _share(columns - dense_from, tl.num_programs(1) - sealed_ranges, BLOCK)
        ahead = (mine - sealed_ranges) * span
        dense = over_rows(tile, asked, keys, values, rule, extent, ahead, span, BLOCK, MANY)
        _put(partial, values.dim, tile, to, dense)


@triton.jit
def _share(columns, ranges, BLOCK: tl.constexpr):
    """How many of the columns that are there now each range takes."""
    return tl.maximum(4, tl.cdiv(tl.cdiv(columns, ranges), BLOCK)) * BLOCK


@triton.jit
def _tile(asked, rule, extent, b, head, start, begin, q_head, t, queries, TILE: tl.constexpr):
    at = b.to(tl.int64) * asked.rows.batch + q_head.to(tl.int64) * asked.rows.head
    rows = asked.rows.data + at + t * asked.rows.row
    oldest, start = extent.oldest, start.to(tl.int32)
    first = oldest + begin // asked.group
    last = oldest + tl.minimum((begin + TILE - 1) // asked.group, queries - 1)
    query = oldest + t.to(tl.int32)
    low, border = lowest(rule, first, start), seam(rule, extent, query)
    b, head = b.to(tl.int64), head.to(tl.int64)  # whose strides may lead beyond 2^31
    return Tile(b, head, start, rows, t < queries, query, first, last, low, border)


@triton.jit
def _put(partial, dim: tl.constexpr, tile, to, found):
    """Where merge.py finds it."""
    top, total, out, channel, there = found
    mask = tile.there[:, None] & there[None, :]
    tl.store(partial.out + to[:, None] * dim + channel[None, :], out, mask=mask)
    tl.store(partial.top + to, top, mask=tile.there)
    tl.store(partial.total + to, total, mask=tile.there)
