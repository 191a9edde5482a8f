"""Kernels for attention of query tiles over ranges of rows, and for merging the ranges.

program (tile, range)    ranges 0 ... num_sealed_ranges - 1: sealed pages
                         the following ranges: sinks, open pages and new rows
"""

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

MIN_RANGE_BLOCKS = tl.constexpr(4)  # a shorter range costs more to merge than it saves
UNSPECIALIZED_ARGS = (  # vary from call to call: compile no kernel for their values
    "table_width",
    "open_offset",
    "num_new",
    "first_query_distance",
    "num_queries",
    "num_sealed_ranges",
    "num_selected",
)


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def attend(
    partials,
    query_args,
    keys,
    values,
    page_table,
    table_width,  # columns of the page table
    open_offset,  # its first column with slots of open pages
    rule,
    num_new,  # columns of the new rows
    first_query_distance,  # length minus the position of the first query
    num_queries,
    num_sealed_ranges,
    selected_pages,  # sealed pages to read: [B, H, queries, num_selected] numbers, then -1
    num_selected,
    TILE: tl.constexpr,  # query rows, those of all heads of a group together
    BLOCK: tl.constexpr,  # rows per iteration
    MULTI_QUERY: tl.constexpr,  # more than one query per head
    HAS_NEW_ROWS: tl.constexpr,
    HAS_SELECTION: tl.constexpr,  # read selected pages only; all queries have one position
):
    # Axis 0 of the grid allows the most programs: tiles, heads and sequences share it.
    tiles = tl.cdiv(num_queries * query_args.group, TILE)
    pair, base = tl.program_id(0) // tiles, tl.program_id(0) % tiles * TILE
    b, head, range_id = pair // query_args.heads, pair % query_args.heads, tl.program_id(1)
    row = page_table + b.to(tl.int64) * table_width
    sequence = _load_sequence(row, open_offset, rule, num_new, first_query_distance, num_queries)
    number = base + tl.arange(0, TILE)
    t = (number // query_args.group).to(tl.int64)
    q_head = head * query_args.group + number % query_args.group
    tile = _make_query_tile(query_args, rule, sequence, b, head, base, q_head, t, num_queries, TILE)
    partial = range_id * (tl.num_programs(0) // tiles // query_args.heads) + tile.batch_index
    offsets = (partial * (query_args.heads * query_args.group) + q_head) * num_queries + t
    if range_id < num_sealed_ranges:
        if HAS_SELECTION:
            rows = num_selected * rule.page
        else:
            stop = compute_dense_from(rule, sequence.new_from, sequence.last_query)
            stop = tl.minimum(sequence.stop_sealed * rule.page, stop)
            rows = stop - sequence.first_sealed * rule.page
        range_rows = _compute_range_rows(rows, num_sealed_ranges, BLOCK)
        page_numbers = selected_pages + pair.to(tl.int64) * num_queries * num_selected
        sealed_out = attend_sealed_pages(
            tile,
            query_args,
            keys,
            values,
            rule,
            sequence,
            range_id * range_rows,
            range_rows,
            page_numbers,
            num_selected,
            BLOCK,
            MULTI_QUERY,
            HAS_SELECTION,
        )
        _store_partial(partials, values.dim, tile, offsets, sealed_out)
    else:
        ranges = tl.num_programs(1) - num_sealed_ranges
        range_rows = _compute_range_rows(sequence.length - sequence.dense_from, ranges, BLOCK)
        row_offset = (range_id - num_sealed_ranges) * range_rows
        dense_out = attend_dense_rows(
            tile,
            query_args,
            keys,
            values,
            rule,
            sequence,
            row_offset,
            range_rows,
            BLOCK,
            MULTI_QUERY,
            HAS_NEW_ROWS,
        )
        _store_partial(partials, values.dim, tile, offsets, dense_out)


@triton.jit
def _compute_range_rows(num_rows, num_ranges, BLOCK: tl.constexpr):
    """Return the rows of each range, a multiple of BLOCK."""
    return tl.maximum(MIN_RANGE_BLOCKS, tl.cdiv(tl.cdiv(num_rows, num_ranges), BLOCK)) * BLOCK


@triton.jit
def _load_sequence(row, open_offset, rule, num_new, first_query_distance, num_queries):
    """Read a sequence from its row of the page table."""
    length = tl.minimum(tl.load(row + LENGTH), tl.load(row + MAX_LENGTH)).to(tl.int32)
    new_from = tl.maximum(length - num_new, 0)
    oldest = length - first_query_distance
    # No query reads dense rows below the oldest query's; open pages may begin after new_from.
    dense_from = tl.load(row + FIRST_OPEN).to(tl.int32) * rule.page
    dense_from = tl.maximum(dense_from, compute_dense_from(rule, new_from, oldest))
    dense_from = tl.minimum(dense_from, new_from)
    return KernelSequence(
        length,
        new_from,
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
    query_args, rule, sequence, b, head, base, q_head, t, num_queries, TILE: tl.constexpr
):
    """Gather the queries of a tile, with bounds on the rows that they see."""
    offset = (
        b.to(tl.int64) * query_args.rows.outer_stride
        + q_head.to(tl.int64) * query_args.rows.head_stride
    )
    rows = query_args.rows.data + offset + t * query_args.rows.row_stride
    oldest = sequence.first_query
    first = oldest + base // query_args.group
    last = oldest + tl.minimum((base + TILE - 1) // query_args.group, num_queries - 1)
    query = oldest + t.to(tl.int32)
    lowest_row = find_lowest_row(rule, first)
    dense_from = compute_dense_from(rule, sequence.new_from, query)
    b, head = b.to(tl.int64), head.to(tl.int64)  # offsets may exceed 2^31
    return QueryTile(b, head, rows, t < num_queries, query, first, last, lowest_row, dense_from)


@triton.jit
def _store_partial(partials, dim: tl.constexpr, tile, offsets, outputs):
    """Store the outputs of a range for `merge`."""
    max_scores, weight_sums, out, channel, is_channel = outputs
    mask = tile.valid[:, None] & is_channel[None, :]
    tl.store(partials.out + offsets[:, None] * dim + channel[None, :], out, mask=mask)
    tl.store(partials.max_scores + offsets, max_scores, mask=tile.valid)
    tl.store(partials.weight_sums + offsets, weight_sums, mask=tile.valid)


@triton.jit(do_not_specialize=["num_ranges", "num_queries", "first_query", "num_all_queries"])
def merge(
    partials,
    out,
    lse,
    logits,
    num_ranges,
    num_queries,
    first_query,  # index of the first one among all queries of the request
    num_all_queries,
    dim: tl.constexpr,
    PADDED_DIM: tl.constexpr,  # dim rounded up to a power of two
    HEADS: tl.constexpr,  # query heads
    HAS_SINK_LOGITS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Merge the ranges of one query; one that sees no row gets zeros and a log-sum-exp of -inf."""
    index = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64)
    channel = tl.arange(0, PADDED_DIM)
    if HAS_SINK_LOGITS:
        top = tl.load(logits + index // num_queries % HEADS).to(tl.float32) * 1.4426950408889634
    else:
        top = float("-inf")
    total = tl.where(top > float("-inf"), 1.0, 0.0)
    merged = tl.zeros([PADDED_DIM], tl.float32)
    for _ in range(num_ranges):
        part_top = tl.load(partials.max_scores + index)
        part_total = tl.load(partials.weight_sums + index)
        part = tl.load(partials.out + index * dim + channel, mask=channel < dim, other=0.0)
        new = tl.maximum(top, part_top)
        base = tl.where(new == float("-inf"), 0.0, new)
        fade, rise = tl.exp2(top - base), tl.exp2(part_top - base)
        total = total * fade + part_total * rise
        merged = merged * fade + part * rise
        top = new
        index += step
    index = tl.program_id(0).to(tl.int64)
    index = index // num_queries * num_all_queries + first_query + index % num_queries
    safe = tl.where(total == 0, 1.0, total)
    tl.store(out + index * dim + channel, (merged / safe).to(out.dtype.element_ty), channel < dim)
    if HAS_LSE:
        tl.store(lse + index, (top + tl.log2(total)) * 0.6931471805599453)
