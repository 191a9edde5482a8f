"""Kernels for attention of query tiles over ranges of rows, and for merging the ranges.

program (tile, range)    ranges 0 ... num_sealed_ranges - 1: sealed pages
                         the following ranges: sinks, open pages and new rows

Visibility follows attention/mask.py. Below `dense_from` a query reads sealed rows, from it dense
ones. Blocks of scores are merged by an online softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.kernels.arguments import (
    FIRST_OPEN,
    FIRST_SEALED,
    FIRST_SINK,
    FIRST_VISIBLE,
    LENGTH,
    MAX_LENGTH,
    NUM_SEQUENCE_NUMBERS,
    STOP_SEALED,
    KernelSequence,
    QueryTile,
    SealedFields,
)
from kvant.attention.triton.kernels.sealed_pages import (
    compute_channels,
    compute_word_channels,
    decode_rows,
    decode_rows_by_word,
    get_value_multiplier,
)

MIN_RANGE_BLOCKS = tl.constexpr(4)  # a shorter range costs more to merge than it saves
LOG2_E = tl.constexpr(1.4426950408889634)
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
    args,
    page_table,
    table_width,  # columns of the page table
    open_offset,  # its first column with slots of open pages
    num_new,  # columns of the new rows
    first_query_distance,  # length minus the position of the first query
    num_queries,
    num_sealed_ranges,
    selected_pages,  # sealed pages to read: [B, H, queries, num_selected] numbers, then -1
    num_selected,
    TILE: tl.constexpr,  # query rows, those of all heads of a group together
):
    # Axis 0 of the grid allows the most programs: tiles, heads and sequences share it.
    tiles = tl.cdiv(num_queries * args.queries.group, TILE)
    pair, base = tl.program_id(0) // tiles, tl.program_id(0) % tiles * TILE
    b, head, range_id = pair // args.queries.heads, pair % args.queries.heads, tl.program_id(1)
    row = page_table + b.to(tl.int64) * table_width
    sequence = _load_sequence(
        row, open_offset, args.rule, num_new, first_query_distance, num_queries
    )
    number = base + tl.arange(0, TILE)
    t = (number // args.queries.group).to(tl.int64)
    q_head = head * args.queries.group + number % args.queries.group
    tile = _make_query_tile(
        args.queries, args.rule, sequence, b, head, base, q_head, t, num_queries, TILE
    )
    partial = range_id * (tl.num_programs(0) // tiles // args.queries.heads) + tile.batch_index
    offsets = (partial * (args.queries.heads * args.queries.group) + q_head) * num_queries + t
    if range_id < num_sealed_ranges:
        if args.has_selection:
            rows = num_selected * args.rule.page
        else:
            stop = compute_dense_from(args.rule, sequence.new_from, sequence.last_query)
            stop = tl.minimum(sequence.stop_sealed * args.rule.page, stop)
            rows = stop - sequence.first_sealed * args.rule.page
        range_rows = _compute_range_rows(rows, num_sealed_ranges, args.block)
        page_numbers = selected_pages + pair.to(tl.int64) * num_queries * num_selected
        sealed_out = _attend_sealed_pages(
            args, sequence, tile, range_id * range_rows, range_rows, page_numbers, num_selected
        )
        _store_partial(partials, args.value_side.dim, tile, offsets, sealed_out)
    else:
        ranges = tl.num_programs(1) - num_sealed_ranges
        range_rows = _compute_range_rows(sequence.length - sequence.dense_from, ranges, args.block)
        row_offset = (range_id - num_sealed_ranges) * range_rows
        dense_out = _attend_dense_rows(args, sequence, tile, row_offset, range_rows)
        _store_partial(partials, args.value_side.dim, tile, offsets, dense_out)


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
    # Pages of sinks stay open. If the other open pages follow them, all pages are open.
    sink_rows = tl.cdiv(rule.layer_sinks, rule.page) * rule.page
    dense_from = tl.where(dense_from <= sink_rows, 0, dense_from)
    dense_from = tl.maximum(dense_from, compute_dense_from(rule, new_from, oldest))
    dense_from = tl.minimum(dense_from, new_from)
    return KernelSequence(
        length,
        new_from,
        length - num_new,
        tl.load(row + FIRST_VISIBLE).to(tl.int32),
        tl.load(row + FIRST_SINK).to(tl.int32),
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
    queries, rule, sequence, b, head, base, q_head, t, num_queries, TILE: tl.constexpr
):
    """Gather the queries of a tile, with bounds on the rows that they see."""
    offset = (
        b.to(tl.int64) * queries.rows.outer_stride + q_head.to(tl.int64) * queries.rows.head_stride
    )
    rows = queries.rows.data + offset + t * queries.rows.row_stride
    oldest = sequence.first_query
    first = oldest + base // queries.group
    last = oldest + tl.minimum((base + TILE - 1) // queries.group, num_queries - 1)
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


@triton.jit
def evaluate_mask(rule, queries, keys):
    """Return which keys [N] each query [M] sees, by positions, [M, N]."""
    q, k = queries[:, None], keys[None, :]
    visible = (k >= 0) & (q >= 0)
    if rule.causal:
        visible &= k <= q
    if rule.has_window:
        visible &= (q - k < rule.window) | (k < rule.mask_sinks)
    if rule.has_chunk:
        visible &= k // rule.chunk == q // rule.chunk
    return visible


@triton.jit
def find_lowest_row(rule, query):
    """Return a position below which queries from `query` on see no rows except sinks."""
    low = query * 0
    if rule.has_window and rule.mask_sinks <= rule.layer_sinks:
        low = tl.maximum(low, query - rule.window + 1)
    if rule.has_chunk:
        low = tl.maximum(low, tl.maximum(query, 0) // rule.chunk * rule.chunk)
    return low


@triton.jit
def compute_dense_from(rule, new_from, query):
    """Return the position below which a query reads sealed rows, and dense ones from it."""
    due = tl.maximum(query + 1 - rule.tail, 0) // rule.page * rule.page
    due = tl.where((rule.tail < 0) | (query + 1 < rule.dense_until), 0, due)
    if rule.new_rows_dense:
        due = tl.minimum(due, new_from)
    return due


@triton.jit
def get_query_positions(args, sequence, tile):
    """Return positions, `dense_from` and validity of the queries; one value for a single token."""
    query, dense_from, valid = tile.positions, tile.dense_from, tile.valid
    if not args.multi_query:
        query = tl.zeros([1], tl.int32) + tile.last_position
        dense_from, valid = compute_dense_from(args.rule, sequence.new_from, query), query >= 0
    return query, dense_from, valid


@triton.jit
def load_queries(args, tile, channel, is_channel, dot_dtype: tl.constexpr, SPLIT: tl.constexpr):
    """Load queries for matrix products: a high part, a low part, and a factor for the scores.

    Queries are scaled first, by a power of two, which is exact; unscaled products might overflow
    float32. For float16 each query is divided by its largest magnitude. With SPLIT two bfloat16
    parts hold a query exactly.
    """
    mask = tile.valid[:, None] & is_channel[None, :]
    q = tl.load(tile.row_pointers[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    q *= args.queries.query_scale
    size = tl.full([q.shape[0]], 1.0, tl.float32)
    if dot_dtype == tl.float16:
        size = tl.max(tl.abs(q), 1)
        size = tl.where(size == 0, 1.0, size)
        q = q / size[:, None]
    high = q.to(dot_dtype)
    low = high
    if SPLIT:
        low = (q - high.to(tl.float32)).to(dot_dtype)
    return high, low, size * args.queries.score_scale


@triton.jit
def compute_scores(query_high, query_low, score_factor, keys, queries, SPLIT: tl.constexpr):
    """Return the scores of queries [M, dim] and keys [N, dim] to base 2, [M, N]."""
    transposed = tl.trans(keys)
    s = tl.dot(query_high, transposed, input_precision="ieee")
    if SPLIT:
        s = tl.dot(query_low, transposed, s, input_precision="ieee")
    s *= score_factor[:, None]
    if queries.has_softcap:
        s = queries.softcap * _tanh(s / queries.softcap)
    return s * LOG2_E


@triton.jit
def _tanh(x):
    """Return tanh(x); a series near zero, where 1 - 2 / (exp(2 x) + 1) cancels."""
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15)))
    return tl.where(square < 0.01, series, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def accumulate_block(
    scores, visible, values, max_scores, weight_sums, out, MULTI_QUERY: tl.constexpr
):
    """Add a block of rows to the running maximum, weight sum and weighted values."""
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(max_scores, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(max_scores - base)
    weight_sums = weight_sums * fade + tl.sum(weights, 1)
    out = out * fade[:, None]
    if MULTI_QUERY:  # zero times NaN is NaN: a masked row must not spoil a query's output
        wide = values.to(tl.float32)
        # A difference of products may be fused, and then x - x is not zero.
        nonfinite = ~(tl.abs(wide) < float("inf"))
        if tl.max(tl.max(nonfinite.to(tl.int32), 1), 0) > 0:
            spoiled = tl.dot(visible.to(tl.float16), nonfinite.to(tl.float16))
            out = tl.where(spoiled > 0, float("nan"), out)
            values = tl.where(nonfinite, 0.0, wide).to(values.dtype)
    out = tl.dot(weights.to(values.dtype), values, out, input_precision="ieee")
    return new_max, weight_sums, out


@triton.jit
def _attend_dense_rows(args, sequence, tile, row_offset, num_rows):
    """Attend to `num_rows` dense rows from `row_offset` on.

    Returns maxima, weight sums, weighted values, and their channels with validity.
    """
    split: tl.constexpr = args.queries.split_queries
    channel = tl.arange(0, args.key_side.padded_dim)
    high, low, size = load_queries(
        args, tile, channel, channel < args.key_side.dim, args.key_side.dot_dtype, split
    )
    query, dense_from, valid = get_query_positions(args, sequence, tile)
    top = tl.full(tile.positions.shape, float("-inf"), tl.float32)
    total = tl.zeros(tile.positions.shape, tl.float32)
    out = tl.zeros([tile.positions.shape[0], args.value_side.padded_dim], tl.float32)
    begin = tl.maximum(
        tile.lowest_row, compute_dense_from(args.rule, sequence.new_from, tile.first_position)
    )
    begin = tl.maximum(tl.maximum(begin, sequence.first_visible), sequence.dense_from + row_offset)
    end = tl.minimum(sequence.dense_from + row_offset + num_rows, sequence.length)
    if args.rule.causal:
        end = tl.minimum(end, tile.last_position + 1)
    # The first range alone reads the sinks.
    num_sinks = tl.where(row_offset == 0, tl.minimum(args.rule.layer_sinks, sequence.length), 0)
    for position0 in range(0, num_sinks, args.block):
        position = position0 + tl.arange(0, args.block)
        is_sink = (position >= sequence.first_sink) & (position < num_sinks)
        visible = evaluate_mask(args.rule, query, position) & valid[:, None] & is_sink[None, :]
        any_visible = _find_visible_rows(visible, args.multi_query)
        slot = _load_open_slot(args, sequence, position0, position)
        k = _load_dense_rows(args.key_side, args, sequence, tile, slot, position, any_visible)
        s = compute_scores(high, low, size, k, args.queries, split)
        v = _load_dense_rows(args.value_side, args, sequence, tile, slot, position, any_visible)
        top, total, out = accumulate_block(s, visible, v, top, total, out, args.multi_query)
    for block in range(begin // args.block, tl.cdiv(end, args.block)):
        position0 = tl.cast(block, tl.int32) * args.block
        position = position0 + tl.arange(0, args.block)
        visible = evaluate_mask(args.rule, query, position) & valid[:, None]
        visible &= (position >= args.rule.layer_sinks)[None, :] & (
            position[None, :] >= dense_from[:, None]
        )
        visible &= ((position >= begin) & (position < end))[None, :]
        any_visible = _find_visible_rows(visible, args.multi_query)
        slot = _load_open_slot(args, sequence, position0, position)
        k = _load_dense_rows(args.key_side, args, sequence, tile, slot, position, any_visible)
        s = compute_scores(high, low, size, k, args.queries, split)
        v = _load_dense_rows(args.value_side, args, sequence, tile, slot, position, any_visible)
        top, total, out = accumulate_block(s, visible, v, top, total, out, args.multi_query)
    channel = tl.arange(0, args.value_side.padded_dim)
    return top, total, out, channel, channel < args.value_side.dim


@triton.jit
def _load_open_slot(args, sequence, first_position, position):
    """Load the slot of the open page of each position, or of all; any slot beyond open pages."""
    last = tl.maximum(sequence.new_from - 1, 0)
    if args.rule.page % args.block == 0:
        slot = tl.load(sequence.open + tl.minimum(first_position, last) // args.rule.page)
    else:
        slot = tl.load(sequence.open + tl.minimum(position, last) // args.rule.page)
    return slot


@triton.jit
def _load_dense_rows(side, args, sequence, tile, slot, position, visible):
    """Load dense rows, [N, dim], from open pages or new rows; zeros where none is visible."""
    channel = tl.arange(0, side.padded_dim)
    row = (position % args.rule.page).to(tl.int64)
    rows = side.open.data + slot * side.open.outer_stride + tile.head * side.open.head_stride
    rows = rows + row * side.open.row_stride
    if args.has_new_rows:
        new = (
            side.new_rows.data
            + tile.batch_index * side.new_rows.outer_stride
            + tile.head * side.new_rows.head_stride
        )
        # The last column is the newest token.
        new = new + (position - sequence.new_rows_start).to(tl.int64) * side.new_rows.row_stride
        # All rows begin at multiples of 16 bytes; the compiler cannot infer it through `where`.
        rows = tl.multiple_of(tl.where(position < sequence.new_from, rows, new), 16)
    mask = visible[:, None] & (channel < side.dim)[None, :]
    return tl.load(rows[:, None] + channel[None, :], mask=mask, other=0.0).to(side.dot_dtype)


@triton.jit
def _attend_sealed_pages(args, sequence, tile, row_offset, num_rows, selected_pages, num_selected):
    """Attend to `num_rows` sealed rows from `row_offset` on.

    Returns maxima, weight sums, weighted values, and their channels with validity.
    """
    split: tl.constexpr = (
        args.queries.split_queries and args.key_side.layout.dot_dtype == tl.bfloat16
    )
    channel, is_channel = _compute_channels(args.key_side.layout, False)
    high, low, size = load_queries(
        args, tile, channel, is_channel, args.key_side.layout.dot_dtype, split
    )
    size *= get_value_multiplier(args.key_side.layout)
    query, dense_from, valid = get_query_positions(args, sequence, tile)
    top = tl.full(tile.positions.shape, float("-inf"), tl.float32)
    total = tl.zeros(tile.positions.shape, tl.float32)
    channel, is_channel = _compute_channels(args.value_side.layout, True)
    out = tl.zeros([tile.positions.shape[0], channel.shape[0]], tl.float32)
    if args.has_selection:
        begin = row_offset // args.block
        end = tl.minimum(row_offset + num_rows, num_selected * args.rule.page) // args.block
    else:
        base = sequence.first_sealed * args.rule.page
        begin = tl.maximum(base + row_offset, tile.lowest_row) // args.block
        end = tl.minimum(base + row_offset + num_rows, sequence.stop_sealed * args.rule.page)
        end = tl.cdiv(
            tl.minimum(end, compute_dense_from(args.rule, sequence.new_from, tile.last_position)),
            args.block,
        )
    for block in range(begin, end):
        first = tl.cast(block, tl.int32) * args.block
        if args.has_selection:
            number = tl.load(selected_pages + first // args.rule.page).to(tl.int32)
            first = tl.maximum(number, 0) * args.rule.page + first % args.rule.page
        position = first + tl.arange(0, args.block)
        visible = evaluate_mask(args.rule, query, position) & valid[:, None]
        if args.has_selection:
            visible &= number >= 0
        visible &= (position >= tl.maximum(args.rule.layer_sinks, sequence.first_visible))[None, :]
        visible &= position[None, :] < dense_from[:, None]
        any_visible = _find_visible_rows(visible, args.multi_query)
        slot = tl.load(sequence.sealed + first // args.rule.page)
        row = first % args.rule.page + tl.arange(0, args.block)
        k = _decode_page_rows(args.key_side, slot, tile.head, row, any_visible, False)
        s = compute_scores(high, low, size, k, args.queries, split)
        v = _decode_page_rows(args.value_side, slot, tile.head, row, any_visible, True)
        top, total, out = accumulate_block(s, visible, v, top, total, out, args.multi_query)
    return top, total, out * get_value_multiplier(args.value_side.layout), channel, is_channel


@triton.jit
def _find_visible_rows(visible, MULTI_QUERY: tl.constexpr):
    """Return which rows any query sees, [N]."""
    if MULTI_QUERY:
        rows = tl.max(visible.to(tl.int32), 0) > 0
    else:  # no exchange between threads
        rows = tl.reshape(visible, [visible.shape[1]])
    return rows


@triton.jit
def _compute_channels(layout, CODES_FIRST: tl.constexpr):
    if layout.by_words:
        channel = compute_word_channels(layout, CODES_FIRST)
        is_channel = channel >= 0
    else:
        channel, is_channel = compute_channels(layout)
    return channel, is_channel


@triton.jit
def _decode_page_rows(side, slot, head, rows, visible, CODES_FIRST: tl.constexpr):
    """Decode rows of one page of one head."""
    codes = slot * side.sealed.codes_slot_stride + head * side.sealed.codes_head_stride
    scale = slot * side.sealed.scale_slot_stride + head * side.sealed.scale_head_stride
    page = SealedFields(
        side.sealed.codes + codes,
        side.sealed.scale + scale,
        side.sealed.bias + scale,
        side.sealed.levels,
        0,
        0,
        0,
        0,
    )
    if side.layout.by_words:
        values = decode_rows_by_word(page, side.layout, rows, visible, CODES_FIRST)
    else:
        values = decode_rows(page, side.layout, rows, visible)
    return values


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
        top = tl.load(logits + index // num_queries % HEADS).to(tl.float32) * LOG2_E
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
