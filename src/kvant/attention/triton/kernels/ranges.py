"""A tile of queries over rows: of sealed pages, of open ones, and those that came just now.

What a query sees is what attention/mask.py says, and from which position it reads dense rows. Its
scores of a block of rows are gathered by an online softmax.
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
    """Positions [M] and [N] -> [M, N]."""
    q, k = queries[:, None], keys[None, :]
    seen = (k >= 0) & (q >= 0)
    if rule.causal:
        seen &= k <= q
    if rule.has_window:
        seen &= (q - k < rule.window) | (k < rule.mask_sinks)
    if rule.has_chunk:
        seen &= k // rule.chunk == q // rule.chunk
    return seen


@triton.jit
def find_lowest_row(rule, query):
    """A position below which no query from `query` on sees a row that is no sink apart."""
    low = query * 0
    if rule.has_window and rule.mask_sinks <= rule.layer_sinks:
        low = tl.maximum(low, query - rule.window + 1)
    if rule.has_chunk:
        low = tl.maximum(low, tl.maximum(query, 0) // rule.chunk * rule.chunk)
    return low


@triton.jit
def compute_dense_from(rule, new_from, query):
    """The position from which on a query reads dense rows, and below which sealed ones."""
    due = tl.maximum(query + 1 - rule.tail, 0) // rule.page * rule.page
    due = tl.where((rule.tail < 0) | (query + 1 < rule.dense_until), 0, due)
    if rule.new_rows_dense:
        due = tl.minimum(due, new_from)
    return due


@triton.jit
def get_query_positions(tile, rule, sequence, MULTI_QUERY: tl.constexpr):
    """Positions of queries, their seams, and whether they are there: all of a token are alike."""
    query, border, there = tile.positions, tile.dense_from, tile.valid
    if not MULTI_QUERY:
        query = tl.zeros([1], tl.int32) + tile.last_position
        border, there = compute_dense_from(rule, sequence.new_from, query), query >= 0
    return query, border, there


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def prepare_queries(q, query_args, dot_dtype: tl.constexpr, SPLIT: tl.constexpr):
    """Queries as matrix products take them, in one part or two, and what their scores lack.

    They are scaled before the product, which might be too large for a float32 otherwise: by a power
    of two, which costs no bits. A float16 holds the values of a query over its largest; two
    bfloat16 hold them as they are.
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
    """Of queries [M, dim] and keys [N, dim], [M, N]."""
    turned = tl.trans(keys)
    s = tl.dot(query_high, turned, input_precision="ieee")
    if SPLIT:
        s = tl.dot(query_low, turned, s, input_precision="ieee")
    s *= score_factor[:, None]
    if query_args.has_softcap:
        s = query_args.softcap * _tanh(s / query_args.softcap)
    return s * LOG2_E


@triton.jit
def _tanh(x):
    """Near zero a series: the difference of 1 and nearly 1 would have no bits left."""
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15)))
    return tl.where(square < 0.01, series, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def accumulate_block(
    scores, visible, values, max_scores, weight_sums, out, MULTI_QUERY: tl.constexpr
):
    """Maximum, total and weighted sums with one more block."""
    scores = tl.where(visible, scores, float("-inf"))
    new = tl.maximum(max_scores, tl.max(scores, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(max_scores - base)
    weight_sums = weight_sums * fade + tl.sum(weights, 1)
    out = out * fade[:, None]
    if MULTI_QUERY:  # zero times NaN is NaN: a row that is hidden from some must not reach these
        wide = values.to(tl.float32)
        odd = wide - wide != 0
        if tl.max(tl.max(odd.to(tl.int32), 1), 0) > 0:
            reach = tl.dot(visible.to(tl.float16), odd.to(tl.float16))
            out = tl.where(reach > 0, float("nan"), out)
            values = tl.where(odd, 0.0, wide).to(values.dtype)
    out = tl.dot(weights.to(values.dtype), values, out, input_precision="ieee")
    return new, weight_sums, out


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
    """Maxima, totals and weighted sums over `span` rows from so many `ahead` on; channels."""
    channel = tl.arange(0, keys.padded_dim)
    mask = tile.valid[:, None] & (channel < keys.dim)[None, :]
    q = tl.load(tile.row_pointers[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    high, low, size = prepare_queries(q, query_args, keys.dot_dtype, query_args.split_queries)
    query, border, asks = get_query_positions(tile, rule, sequence, MULTI_QUERY)
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
    kept = tl.where(
        row_offset == 0, tl.minimum(rule.layer_sinks, sequence.length), 0
    )  # sinks are read once
    for position0 in range(0, kept, BLOCK):
        position = position0 + tl.arange(0, BLOCK)
        there = (position >= sequence.first_visible) & (position < kept)
        seen = evaluate_mask(rule, query, position) & asks[:, None] & there[None, :]
        some = tl.max(seen.to(tl.int32), 0) > 0
        slot = _load_open_slot(rule, sequence, position0, position, BLOCK)
        k = _load_dense_rows(keys, rule, sequence, tile, slot, position, some, HAS_NEW_ROWS)
        s = compute_scores(high, low, size, k, query_args, query_args.split_queries)
        v = _load_dense_rows(values, rule, sequence, tile, slot, position, some, HAS_NEW_ROWS)
        top, total, out = accumulate_block(s, seen, v, top, total, out, MULTI_QUERY)
    for block in range(begin // BLOCK, tl.cdiv(end, BLOCK)):
        position0 = tl.cast(block, tl.int32) * BLOCK
        position = position0 + tl.arange(0, BLOCK)
        seen = evaluate_mask(rule, query, position) & asks[:, None]
        seen &= (position >= rule.layer_sinks)[None, :] & (position[None, :] >= border[:, None])
        seen &= ((position >= begin) & (position < end))[None, :]
        some = tl.max(seen.to(tl.int32), 0) > 0
        slot = _load_open_slot(rule, sequence, position0, position, BLOCK)
        k = _load_dense_rows(keys, rule, sequence, tile, slot, position, some, HAS_NEW_ROWS)
        s = compute_scores(high, low, size, k, query_args, query_args.split_queries)
        v = _load_dense_rows(values, rule, sequence, tile, slot, position, some, HAS_NEW_ROWS)
        top, total, out = accumulate_block(s, seen, v, top, total, out, MULTI_QUERY)
    channel = tl.arange(0, values.padded_dim)
    return top, total, out, channel, channel < values.dim


@triton.jit
def _load_open_slot(rule, sequence, first_position, position, BLOCK: tl.constexpr):
    """Of the open page of each position, or of all; where none is open, that of another."""
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
    """[N, dim]; zeros where nobody has seen `some`, whatever lies there."""
    channel = tl.arange(0, side.padded_dim)
    row = (position % rule.page).to(tl.int64)
    rows = side.open.data + slot * side.open.outer_stride + tile.head * side.open.head_stride
    rows = rows + row * side.open.row_stride
    if HAS_NEW_ROWS:
        own = (
            side.new_rows.data
            + tile.batch_index * side.new_rows.outer_stride
            + tile.head * side.new_rows.head_stride
        )
        # The last column is that of the newest token.
        own = own + (position - sequence.new_rows_start).to(tl.int64) * side.new_rows.row_stride
        # All rows begin at multiples of 16 bytes, which the compiler does not see behind a choice.
        rows = tl.multiple_of(tl.where(position < sequence.new_from, rows, own), 16)
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
    selected_pages,  # pages, where not all are read
    num_selected,
    BLOCK: tl.constexpr,
    MULTI_QUERY: tl.constexpr,
    HAS_SELECTION: tl.constexpr,
):
    """Maxima, totals and weighted sums over `span` rows from so many `ahead` on; channels."""
    split: tl.constexpr = query_args.split_queries and keys.layout.dot_dtype == tl.bfloat16
    channel, there = _compute_channels(keys.layout)
    mask = tile.valid[:, None] & there[None, :]
    q = tl.load(tile.row_pointers[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    high, low, size = prepare_queries(q, query_args, keys.layout.dot_dtype, split)
    size *= get_value_multiplier(keys.layout)
    query, border, asks = get_query_positions(tile, rule, sequence, MULTI_QUERY)
    top = tl.full(tile.positions.shape, float("-inf"), tl.float32)
    total = tl.zeros(tile.positions.shape, tl.float32)
    channel, there = _compute_channels(values.layout)
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
        seen = evaluate_mask(rule, query, position) & asks[:, None]
        if HAS_SELECTION:
            seen &= number >= 0
        seen &= (position >= tl.maximum(rule.layer_sinks, sequence.first_visible))[None, :]
        seen &= position[None, :] < border[:, None]
        some = tl.max(seen.to(tl.int32), 0) > 0
        slot = tl.load(sequence.sealed + first // rule.page)
        row = first % rule.page + tl.arange(0, BLOCK)
        k = _decode_rows(_get_page(keys.sealed, slot, tile.head), keys.layout, row, some)
        s = compute_scores(high, low, size, k, query_args, split)
        v = _decode_rows(_get_page(values.sealed, slot, tile.head), values.layout, row, some)
        top, total, out = accumulate_block(s, seen, v, top, total, out, MULTI_QUERY)
    return top, total, out * get_value_multiplier(values.layout), channel, there


@triton.jit
def _compute_channels(layout):
    if layout.by_words:
        channel = compute_word_channels(layout)
        there = channel >= 0
    else:
        channel, there = compute_channels(layout)
    return channel, there


@triton.jit
def _decode_rows(page, layout, rows, visible):
    return (
        decode_rows_by_word(page, layout, rows, visible)
        if layout.by_words
        else decode_rows(page, layout, rows, visible)
    )


@triton.jit
def _get_page(fields, slot, head):
    """The fields of one page of one head."""
    codes = slot * fields.codes_slot_stride + head * fields.codes_head_stride
    scale = slot * fields.scale_slot_stride + head * fields.scale_head_stride
    return SealedFields(
        fields.codes + codes, fields.scale + scale, fields.bias + scale, fields.levels, 0, 0, 0, 0
    )
