"""Attention of a tile of queries over one range of rows, a program each, and the ranges merged."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.kernels.arguments import (
    FIRST_OPEN,
    FIRST_SEALED,
    FIRST_VISIBLE,
    LENGTH,
    MAX_LENGTH,
    NUM_SEQUENCE_NUMBERS,
    STOP_SEALED,
    KernelSequence,
    QueryTile,
)
from kvant.attention.triton.kernels.ranges import (
    attend_dense_rows,
    attend_sealed_pages,
    compute_dense_from,
    find_lowest_row,
)

MIN_RANGE_BLOCKS = tl.constexpr(4)  # blocks a range: less is not worth a merge
UNSPECIALIZED_ARGS = (
    "table_width",
    "open_offset",
    "num_new",
    "first_query_distance",
    "num_queries",
    "num_sealed_ranges",
    "num_selected",
)


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def attend(  # no kernel is compiled for a value of what varies from call to call
    partials,
    query_args,
    keys,
    values,
    page_table,
    table_width,  # of a row of it
    open_offset,  # where the table of open pages begins in one
    rule,
    num_new,  # columns that came with the forward itself
    first_query_distance,  # by how many tokens the first query stands behind the length
    num_queries,
    num_sealed_ranges,
    selected_pages,  # of sealed pages these only: [B, H, queries, num_chosen] numbers, then -1
    num_selected,
    TILE: tl.constexpr,  # queries, of all heads of a group
    BLOCK: tl.constexpr,  # rows at a time
    MULTI_QUERY: tl.constexpr,  # more than one query a head
    HAS_NEW_ROWS: tl.constexpr,  # are there rows that came with the forward itself?
    HAS_SELECTION: tl.constexpr,  # is not all read? Then a program has one position
):
    # Ranges are few: whatever may be many shares the axis that is long enough, tiles side by side.
    tiles = tl.cdiv(num_queries * query_args.group, TILE)
    pair, begin = tl.program_id(0) // tiles, tl.program_id(0) % tiles * TILE
    b, head, mine = pair // query_args.heads, pair % query_args.heads, tl.program_id(1)
    extent = _load_sequence(
        page_table + b.to(tl.int64) * table_width,
        open_offset,
        rule,
        num_new,
        first_query_distance,
        num_queries,
    )
    number = begin + tl.arange(0, TILE)
    t, q_head = (
        (number // query_args.group).to(tl.int64),
        head * query_args.group + number % query_args.group,
    )
    tile = _make_query_tile(query_args, rule, extent, b, head, begin, q_head, t, num_queries, TILE)
    sequence = mine * (tl.num_programs(0) // tiles // query_args.heads) + tile.batch_index
    to = (sequence * (query_args.heads * query_args.group) + q_head) * num_queries + t
    if mine < num_sealed_ranges:
        if HAS_SELECTION:
            rows = num_selected * rule.page
        else:
            stop = tl.minimum(
                extent.stop_sealed * rule.page,
                compute_dense_from(rule, extent.new_from, extent.last_query),
            )
            rows = stop - extent.first_sealed * rule.page
        span = _compute_range_rows(rows, num_sealed_ranges, BLOCK)
        own = selected_pages + pair.to(tl.int64) * num_queries * num_selected
        ahead = mine * span
        found = attend_sealed_pages(
            tile,
            query_args,
            keys,
            values,
            rule,
            extent,
            ahead,
            span,
            own,
            num_selected,
            BLOCK,
            MULTI_QUERY,
            HAS_SELECTION,
        )
        _store_partial(partials, values.dim, tile, to, found)
    else:
        ranges = tl.num_programs(1) - num_sealed_ranges
        span = _compute_range_rows(extent.length - extent.dense_from, ranges, BLOCK)
        after = (mine - num_sealed_ranges) * span
        dense = attend_dense_rows(
            tile,
            query_args,
            keys,
            values,
            rule,
            extent,
            after,
            span,
            BLOCK,
            MULTI_QUERY,
            HAS_NEW_ROWS,
        )
        _store_partial(partials, values.dim, tile, to, dense)


@triton.jit
def _compute_range_rows(num_rows, num_ranges, BLOCK: tl.constexpr):
    """How many of the rows that there are each range takes."""
    return tl.maximum(MIN_RANGE_BLOCKS, tl.cdiv(tl.cdiv(num_rows, num_ranges), BLOCK)) * BLOCK


@triton.jit
def _load_sequence(row, open_offset, rule, num_new, first_query_distance, num_queries):
    """Where a sequence is, by its row of the place."""
    length = tl.minimum(tl.load(row + LENGTH), tl.load(row + MAX_LENGTH)).to(tl.int32)
    first = tl.maximum(length - num_new, 0)
    oldest = length - first_query_distance
    # A dense row below the first seam is nobody's, and open pages may begin behind own rows.
    dense_from = tl.load(row + FIRST_OPEN).to(tl.int32) * rule.page
    dense_from = tl.minimum(tl.maximum(dense_from, compute_dense_from(rule, first, oldest)), first)
    return KernelSequence(
        length,
        first,
        length - num_new,
        tl.load(row + FIRST_VISIBLE).to(tl.int32),
        oldest,
        oldest + num_queries - 1,
        tl.load(row + FIRST_SEALED).to(tl.int32),
        tl.load(row + STOP_SEALED).to(tl.int32),
        dense_from,
        row + NUM_SEQUENCE_NUMBERS,
        row + open_offset,
    )


@triton.jit
def _make_query_tile(
    query_args, rule, sequence, b, head, begin, q_head, t, num_queries, TILE: tl.constexpr
):
    at = (
        b.to(tl.int64) * query_args.rows.outer_stride
        + q_head.to(tl.int64) * query_args.rows.head_stride
    )
    rows = query_args.rows.data + at + t * query_args.rows.row_stride
    oldest = sequence.first_query
    first = oldest + begin // query_args.group
    last = oldest + tl.minimum((begin + TILE - 1) // query_args.group, num_queries - 1)
    query = oldest + t.to(tl.int32)
    low, border = find_lowest_row(rule, first), compute_dense_from(rule, sequence.new_from, query)
    b, head = b.to(tl.int64), head.to(tl.int64)  # whose strides may lead beyond 2^31
    return QueryTile(b, head, rows, t < num_queries, query, first, last, low, border)


@triton.jit
def _store_partial(partials, dim: tl.constexpr, tile, offsets, outputs):
    """Where `merge` finds it."""
    top, total, out, channel, there = outputs
    mask = tile.valid[:, None] & there[None, :]
    tl.store(partials.out + offsets[:, None] * dim + channel[None, :], out, mask=mask)
    tl.store(partials.max_scores + offsets, top, mask=tile.valid)
    tl.store(partials.weight_sums + offsets, total, mask=tile.valid)


@triton.jit(do_not_specialize=["num_ranges", "num_queries", "first_query", "num_all_queries"])
def merge(
    partials,
    out,
    lse,
    logits,
    num_ranges,
    num_queries,
    first_query,  # of these queries among
    num_all_queries,
    dim: tl.constexpr,
    PADDED_DIM: tl.constexpr,  # the power of two that holds dim
    HEADS: tl.constexpr,  # of queries
    HAS_SINK_LOGITS: tl.constexpr,  # are there logits that lead nowhere?
    HAS_LSE: tl.constexpr,
):
    """A query that sees nothing gets zeros, and -inf."""
    place = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64)
    channel = tl.arange(0, PADDED_DIM)
    if HAS_SINK_LOGITS:
        top = tl.load(logits + place // num_queries % HEADS).to(tl.float32) * 1.4426950408889634
    else:
        top = float("-inf")
    total = tl.where(top > float("-inf"), 1.0, 0.0)
    found = tl.zeros([PADDED_DIM], tl.float32)
    for _ in range(num_ranges):
        part_top, part_total = (
            tl.load(partials.max_scores + place),
            tl.load(partials.weight_sums + place),
        )
        part = tl.load(partials.out + place * dim + channel, mask=channel < dim, other=0.0)
        new = tl.maximum(top, part_top)
        base = tl.where(new == float("-inf"), 0.0, new)
        fade, rise = tl.exp2(top - base), tl.exp2(part_top - base)
        total = total * fade + part_total * rise
        found = found * fade + part * rise
        top = new
        place += step
    place = tl.program_id(0).to(tl.int64)
    place = place // num_queries * num_all_queries + first_query + place % num_queries
    safe = tl.where(total == 0, 1.0, total)
    tl.store(out + place * dim + channel, (found / safe).to(out.dtype.element_ty), channel < dim)
    if HAS_LSE:
        tl.store(lse + place, (top + tl.log2(total)) * 0.6931471805599453)
