"""Attention of a query tile over a range of rows: sealed pages, open pages, or new rows.

Visibility follows attention/mask.py. Below `dense_from` a query reads sealed rows, from it dense
ones. Blocks of scores are merged by an online softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.kernels.arguments import SealedFields
from kvant.attention.triton.kernels.sealed_pages import (
    compute_channels,
    compute_word_channels,
    decode_rows,
    decode_rows_by_word,
    get_value_multiplier,
)


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
def get_query_positions(tile, rule, sequence, MULTI_QUERY: tl.constexpr):
    """Return positions, `dense_from` and validity of the queries; one value for a single token."""
    query, dense_from, valid = tile.positions, tile.dense_from, tile.valid
    if not MULTI_QUERY:
        query = tl.zeros([1], tl.int32) + tile.last_position
        dense_from, valid = compute_dense_from(rule, sequence.new_from, query), query >= 0
    return query, dense_from, valid


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def prepare_queries(q, query_args, dot_dtype: tl.constexpr, SPLIT: tl.constexpr):
    """Convert queries for matrix products: a high part, a low part, and a factor for the scores.

    Queries are scaled first, by a power of two, which is exact; unscaled products might overflow
    float32. For float16 each query is divided by its largest magnitude. With SPLIT two bfloat16
    parts hold a query exactly.
    """
    q *= query_args.query_scale
    size = tl.full([q.shape[0]], 1.0, tl.float32)
    if dot_dtype == tl.float16:
        size = tl.max(tl.abs(q), 1)
        size = tl.where(size == 0, 1.0, size)
        q = q / size[:, None]
    high = q.to(dot_dtype)
    low = high
    if SPLIT:
        low = (q - high.to(tl.float32)).to(dot_dtype)
    return high, low, size * query_args.score_scale


@triton.jit
def compute_scores(query_high, query_low, score_factor, keys, query_args, SPLIT: tl.constexpr):
    """Return the scores of queries [M, dim] and keys [N, dim] to base 2, [M, N]."""
    transposed = tl.trans(keys)
    s = tl.dot(query_high, transposed, input_precision="ieee")
    if SPLIT:
        s = tl.dot(query_low, transposed, s, input_precision="ieee")
    s *= score_factor[:, None]
    if query_args.has_softcap:
        s = query_args.softcap * _tanh(s / query_args.softcap)
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
        nonfinite = wide - wide != 0
        if tl.max(tl.max(nonfinite.to(tl.int32), 1), 0) > 0:
            spoiled = tl.dot(visible.to(tl.float16), nonfinite.to(tl.float16))
            out = tl.where(spoiled > 0, float("nan"), out)
            values = tl.where(nonfinite, 0.0, wide).to(values.dtype)
    out = tl.dot(weights.to(values.dtype), values, out, input_precision="ieee")
    return new_max, weight_sums, out


@triton.jit
def attend_dense_rows(
    tile,
    query_args,
    keys,
    values,
    rule,
    sequence,
    row_offset,
    num_rows,
    BLOCK: tl.constexpr,
    MULTI_QUERY: tl.constexpr,
    HAS_NEW_ROWS: tl.constexpr,
):
    """Attend to `num_rows` dense rows from `row_offset` on.

    Returns maxima, weight sums, weighted values, and their channels with validity.
    """
    channel = tl.arange(0, keys.padded_dim)
    mask = tile.valid[:, None] & (channel < keys.dim)[None, :]
    q = tl.load(tile.row_pointers[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    high, low, size = prepare_queries(q, query_args, keys.dot_dtype, query_args.split_queries)
    query, dense_from, valid = get_query_positions(tile, rule, sequence, MULTI_QUERY)
    top = tl.full(tile.positions.shape, float("-inf"), tl.float32)
    total = tl.zeros(tile.positions.shape, tl.float32)
    out = tl.zeros([tile.positions.shape[0], values.padded_dim], tl.float32)
    begin = tl.maximum(
        tile.lowest_row, compute_dense_from(rule, sequence.new_from, tile.first_position)
    )
    begin = tl.maximum(tl.maximum(begin, sequence.first_visible), sequence.dense_from + row_offset)
    end = tl.minimum(sequence.dense_from + row_offset + num_rows, sequence.length)
    if rule.causal:
        end = tl.minimum(end, tile.last_position + 1)
    # The first range alone reads the sinks.
    num_sinks = tl.where(row_offset == 0, tl.minimum(rule.layer_sinks, sequence.length), 0)
    for position0 in range(0, num_sinks, BLOCK):
        position = position0 + tl.arange(0, BLOCK)
        is_sink = (position >= sequence.first_visible) & (position < num_sinks)
        visible = evaluate_mask(rule, query, position) & valid[:, None] & is_sink[None, :]
        any_visible = tl.max(visible.to(tl.int32), 0) > 0
        slot = _load_open_slot(rule, sequence, position0, position, BLOCK)
        k = _load_dense_rows(keys, rule, sequence, tile, slot, position, any_visible, HAS_NEW_ROWS)
        s = compute_scores(high, low, size, k, query_args, query_args.split_queries)
        v = _load_dense_rows(
            values, rule, sequence, tile, slot, position, any_visible, HAS_NEW_ROWS
        )
        top, total, out = accumulate_block(s, visible, v, top, total, out, MULTI_QUERY)
    for block in range(begin // BLOCK, tl.cdiv(end, BLOCK)):
        position0 = tl.cast(block, tl.int32) * BLOCK
        position = position0 + tl.arange(0, BLOCK)
        visible = evaluate_mask(rule, query, position) & valid[:, None]
        visible &= (position >= rule.layer_sinks)[None, :] & (
            position[None, :] >= dense_from[:, None]
        )
        visible &= ((position >= begin) & (position < end))[None, :]
        any_visible = tl.max(visible.to(tl.int32), 0) > 0
        slot = _load_open_slot(rule, sequence, position0, position, BLOCK)
        k = _load_dense_rows(keys, rule, sequence, tile, slot, position, any_visible, HAS_NEW_ROWS)
        s = compute_scores(high, low, size, k, query_args, query_args.split_queries)
        v = _load_dense_rows(
            values, rule, sequence, tile, slot, position, any_visible, HAS_NEW_ROWS
        )
        top, total, out = accumulate_block(s, visible, v, top, total, out, MULTI_QUERY)
    channel = tl.arange(0, values.padded_dim)
    return top, total, out, channel, channel < values.dim


@triton.jit
def _load_open_slot(rule, sequence, first_position, position, BLOCK: tl.constexpr):
    """Load the slot of the open page of each position, or of all; any slot beyond open pages."""
    last = tl.maximum(sequence.new_from - 1, 0)
    if rule.page % BLOCK == 0:
        slot = tl.load(sequence.open + tl.minimum(first_position, last) // rule.page)
    else:
        slot = tl.load(sequence.open + tl.minimum(position, last) // rule.page)
    return slot


@triton.jit
def _load_dense_rows(
    side, rule, sequence, tile, slot, position, visible, HAS_NEW_ROWS: tl.constexpr
):
    """Load dense rows, [N, dim], from open pages or new rows; zeros where none is visible."""
    channel = tl.arange(0, side.padded_dim)
    row = (position % rule.page).to(tl.int64)
    rows = side.open.data + slot * side.open.outer_stride + tile.head * side.open.head_stride
    rows = rows + row * side.open.row_stride
    if HAS_NEW_ROWS:
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
def attend_sealed_pages(
    tile,
    query_args,
    keys,
    values,
    rule,
    sequence,
    row_offset,
    num_rows,
    selected_pages,  # page numbers, with HAS_SELECTION
    num_selected,
    BLOCK: tl.constexpr,
    MULTI_QUERY: tl.constexpr,
    HAS_SELECTION: tl.constexpr,
):
    """Attend to `num_rows` sealed rows from `row_offset` on.

    Returns maxima, weight sums, weighted values, and their channels with validity.
    """
    split: tl.constexpr = query_args.split_queries and keys.layout.dot_dtype == tl.bfloat16
    channel, is_channel = _compute_channels(keys.layout)
    mask = tile.valid[:, None] & is_channel[None, :]
    q = tl.load(tile.row_pointers[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    high, low, size = prepare_queries(q, query_args, keys.layout.dot_dtype, split)
    size *= get_value_multiplier(keys.layout)
    query, dense_from, valid = get_query_positions(tile, rule, sequence, MULTI_QUERY)
    top = tl.full(tile.positions.shape, float("-inf"), tl.float32)
    total = tl.zeros(tile.positions.shape, tl.float32)
    channel, is_channel = _compute_channels(values.layout)
    out = tl.zeros([tile.positions.shape[0], channel.shape[0]], tl.float32)
    if HAS_SELECTION:
        begin = row_offset // BLOCK
        end = tl.minimum(row_offset + num_rows, num_selected * rule.page) // BLOCK
    else:
        base = sequence.first_sealed * rule.page
        begin = tl.maximum(base + row_offset, tile.lowest_row) // BLOCK
        end = tl.minimum(base + row_offset + num_rows, sequence.stop_sealed * rule.page)
        end = tl.cdiv(
            tl.minimum(end, compute_dense_from(rule, sequence.new_from, tile.last_position)), BLOCK
        )
    for block in range(begin, end):
        first = tl.cast(block, tl.int32) * BLOCK
        if HAS_SELECTION:
            number = tl.load(selected_pages + first // rule.page).to(tl.int32)
            first = tl.maximum(number, 0) * rule.page + first % rule.page
        position = first + tl.arange(0, BLOCK)
        visible = evaluate_mask(rule, query, position) & valid[:, None]
        if HAS_SELECTION:
            visible &= number >= 0
        visible &= (position >= tl.maximum(rule.layer_sinks, sequence.first_visible))[None, :]
        visible &= position[None, :] < dense_from[:, None]
        any_visible = tl.max(visible.to(tl.int32), 0) > 0
        slot = tl.load(sequence.sealed + first // rule.page)
        row = first % rule.page + tl.arange(0, BLOCK)
        k = _decode_rows(_get_page(keys.sealed, slot, tile.head), keys.layout, row, any_visible)
        s = compute_scores(high, low, size, k, query_args, split)
        v = _decode_rows(_get_page(values.sealed, slot, tile.head), values.layout, row, any_visible)
        top, total, out = accumulate_block(s, visible, v, top, total, out, MULTI_QUERY)
    return top, total, out * get_value_multiplier(values.layout), channel, is_channel


@triton.jit
def _compute_channels(layout):
    if layout.by_words:
        channel = compute_word_channels(layout)
        is_channel = channel >= 0
    else:
        channel, is_channel = compute_channels(layout)
    return channel, is_channel


@triton.jit
def _decode_rows(page, layout, rows, visible):
    return (
        decode_rows_by_word(page, layout, rows, visible)
        if layout.by_words
        else decode_rows(page, layout, rows, visible)
    )


@triton.jit
def _get_page(fields, slot, head):
    """Return the fields of one page of one head."""
    codes = slot * fields.codes_slot_stride + head * fields.codes_head_stride
    scale = slot * fields.scale_slot_stride + head * fields.scale_head_stride
    return SealedFields(
        fields.codes + codes, fields.scale + scale, fields.bias + scale, fields.levels, 0, 0, 0, 0
    )
