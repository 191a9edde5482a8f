"""A tile of queries over rows: of sealed pages, of open ones, and those that came just now.

What a query sees is what attention/mask.py says, and from which position it reads dense rows. Its
scores of a block of rows are gathered by an online softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.kernels.pages import channels, lift, opened, opened_words, order
from kvant.attention.triton.kernels.records import Pages


@triton.jit
def sees(rule, queries, keys):
    """Positions [M] and [N] -> [M, N]."""
    q, k = queries[:, None], keys[None, :]
    seen = (k >= 0) & (q >= 0)
    if rule.causal:
        seen &= k <= q
    if rule.windowed:
        seen &= (q - k < rule.window) | (k < rule.sinks)
    if rule.chunked:
        seen &= k // rule.chunk == q // rule.chunk
    return seen


@triton.jit
def lowest(rule, query):
    """A position below which no query from `query` on sees a row that is no sink apart."""
    low = query * 0
    if rule.windowed and rule.sinks <= rule.kept:
        low = tl.maximum(low, query - rule.window + 1)
    if rule.chunked:
        low = tl.maximum(low, tl.maximum(query, 0) // rule.chunk * rule.chunk)
    return low


@triton.jit
def seam(rule, came, query):
    """The position from which on a query reads dense rows, and below which sealed ones."""
    due = tl.maximum(query + 1 - rule.tail, 0) // rule.page * rule.page
    due = tl.where((rule.tail < 0) | (query + 1 < rule.dense_until), 0, due)
    if rule.dense:
        due = tl.minimum(due, came)
    return due


@triton.jit
def askers(tile, rule, extent, MANY: tl.constexpr):
    """Positions of queries, their seams, and whether they are there: all of a token are alike."""
    query, border, there = tile.query, tile.border, tile.there
    if not MANY:
        query = tl.zeros([1], tl.int32) + tile.last
        border, there = seam(rule, extent.came, query), query >= 0
    return query, border, there


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def operand(q, asked, dot: tl.constexpr, SPLIT: tl.constexpr):
    """Queries as matrix products take them, in one part or two, and what their scores lack.

    They are scaled before the product, which might be too large for a float32 otherwise: by a power
    of two, which costs no bits. A float16 holds the values of a query over its largest; two
    bfloat16 hold them as they are.
    """
    q *= asked.before
    size = tl.full([q.shape[0]], 1.0, tl.float32)
    if dot == tl.float16:
        size = tl.max(tl.abs(q), 1)
        size = tl.where(size == 0, 1.0, size)
        q = q / size[:, None]
    high = q.to(dot)
    low = high
    if SPLIT:
        low = (q - high.to(tl.float32)).to(dot)
    return high, low, size * asked.after


@triton.jit
def scores(high, low, size, keys, asked, SPLIT: tl.constexpr):
    """Of queries [M, dim] and keys [N, dim], [M, N]."""
    turned = tl.trans(keys)
    s = tl.dot(high, turned, input_precision="ieee")
    if SPLIT:
        s = tl.dot(low, turned, s, input_precision="ieee")
    s *= size[:, None]
    if asked.capped:
        s = asked.cap * _tanh(s / asked.cap)
    return s * LOG2_E


@triton.jit
def _tanh(x):
    """Near zero a series: the difference of 1 and nearly 1 would have no bits left."""
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15)))
    return tl.where(square < 0.01, series, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def gathered(s, seen, values, top, total, out, MANY: tl.constexpr):
    """Maximum, total and weighted sums with one more block."""
    s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(s - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    out = out * fade[:, None]
    if MANY:  # zero times NaN is NaN: a row that is hidden from some must not reach these
        wide = values.to(tl.float32)
        odd = wide - wide != 0
        if tl.max(tl.max(odd.to(tl.int32), 1), 0) > 0:
            reach = tl.dot(seen.to(tl.float16), odd.to(tl.float16))
            out = tl.where(reach > 0, float("nan"), out)
            values = tl.where(odd, 0.0, wide).to(values.dtype)
    out = tl.dot(weights.to(values.dtype), values, out, input_precision="ieee")
    return new, total, out


@triton.jit
def over_rows(
    tile,
    asked,
    keys,
    values,
    rule,
    extent,
    ahead,
    span,
    BLOCK: tl.constexpr,
    MANY: tl.constexpr,
    OWN: tl.constexpr,
):
    """Maxima, totals and weighted sums over `span` rows from so many `ahead` on; channels."""
    channel = tl.arange(0, keys.wide)
    mask = tile.there[:, None] & (channel < keys.dim)[None, :]
    q = tl.load(tile.rows[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    high, low, size = operand(q, asked, keys.dot, asked.split)
    query, border, asks = askers(tile, rule, extent, MANY)
    top = tl.full(tile.query.shape, float("-inf"), tl.float32)
    total = tl.zeros(tile.query.shape, tl.float32)
    out = tl.zeros([tile.query.shape[0], values.wide], tl.float32)
    begin = tl.maximum(tile.low, seam(rule, extent.came, tile.first))
    begin = tl.maximum(tl.maximum(begin, extent.begins), extent.dense_from + ahead)
    end = tl.minimum(extent.dense_from + ahead + span, extent.length)
    if rule.causal:
        end = tl.minimum(end, tile.last + 1)
    kept = tl.where(ahead == 0, tl.minimum(rule.kept, extent.length), 0)  # sinks are read once
    for position0 in range(0, kept, BLOCK):
        position = position0 + tl.arange(0, BLOCK)
        there = (position >= extent.begins) & (position < kept)
        seen = sees(rule, query, position) & asks[:, None] & there[None, :]
        some = tl.max(seen.to(tl.int32), 0) > 0
        slot = _slot(rule, extent, position0, position, BLOCK)
        k = _rows(keys, rule, extent, tile, slot, position, some, OWN)
        s = scores(high, low, size, k, asked, asked.split)
        v = _rows(values, rule, extent, tile, slot, position, some, OWN)
        top, total, out = gathered(s, seen, v, top, total, out, MANY)
    for block in range(begin // BLOCK, tl.cdiv(end, BLOCK)):
        position0 = tl.cast(block, tl.int32) * BLOCK
        position = position0 + tl.arange(0, BLOCK)
        seen = sees(rule, query, position) & asks[:, None]
        seen &= (position >= rule.kept)[None, :] & (position[None, :] >= border[:, None])
        seen &= ((position >= begin) & (position < end))[None, :]
        some = tl.max(seen.to(tl.int32), 0) > 0
        slot = _slot(rule, extent, position0, position, BLOCK)
        k = _rows(keys, rule, extent, tile, slot, position, some, OWN)
        s = scores(high, low, size, k, asked, asked.split)
        v = _rows(values, rule, extent, tile, slot, position, some, OWN)
        top, total, out = gathered(s, seen, v, top, total, out, MANY)
    channel = tl.arange(0, values.wide)
    return top, total, out, channel, channel < values.dim


@triton.jit
def _slot(rule, extent, position0, position, BLOCK: tl.constexpr):
    """Of the open page of each position, or of all; where none is open, that of another."""
    last = tl.maximum(extent.came - 1, 0)
    if rule.page % BLOCK == 0:
        slot = tl.load(extent.open + tl.minimum(position0, last) // rule.page)
    else:
        slot = tl.load(extent.open + tl.minimum(position, last) // rule.page)
    return slot


@triton.jit
def _rows(side, rule, extent, tile, slot, position, some, OWN: tl.constexpr):
    """[N, dim]; zeros where nobody has seen `some`, whatever lies there."""
    channel = tl.arange(0, side.wide)
    row = (position % rule.page).to(tl.int64)
    rows = side.open.data + slot * side.open.first + tile.head * side.open.head
    rows = rows + row * side.open.row
    if OWN:
        own = side.own.data + tile.b * side.own.first + tile.head * side.own.head
        # The last column is that of the newest token.
        own = own + (position - extent.column).to(tl.int64) * side.own.row
        # All rows begin at multiples of 16 bytes, which the compiler does not see behind a choice.
        rows = tl.multiple_of(tl.where(position < extent.came, rows, own), 16)
    mask = some[:, None] & (channel < side.dim)[None, :]
    return tl.load(rows[:, None] + channel[None, :], mask=mask, other=0.0).to(side.dot)


@triton.jit
def over_pages(
    tile,
    asked,
    keys,
    values,
    rule,
    extent,
    ahead,
    span,
    chosen,  # pages, where not all are read
    num_chosen,
    BLOCK: tl.constexpr,
    MANY: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Maxima, totals and weighted sums over `span` rows from so many `ahead` on; channels."""
    split: tl.constexpr = asked.split and keys.form.dot == tl.bfloat16
    channel, there = _channels(keys.form)
    mask = tile.there[:, None] & there[None, :]
    q = tl.load(tile.rows[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    high, low, size = operand(q, asked, keys.form.dot, split)
    size *= lift(keys.form)
    query, border, asks = askers(tile, rule, extent, MANY)
    top = tl.full(tile.query.shape, float("-inf"), tl.float32)
    total = tl.zeros(tile.query.shape, tl.float32)
    channel, there = _channels(values.form)
    out = tl.zeros([tile.query.shape[0], channel.shape[0]], tl.float32)
    if CHOSEN:
        begin = ahead // BLOCK
        end = tl.minimum(ahead + span, num_chosen * rule.page) // BLOCK
    else:
        base = extent.first_sealed * rule.page
        begin = tl.maximum(base + ahead, tile.low) // BLOCK
        end = tl.minimum(base + ahead + span, extent.stop_sealed * rule.page)
        end = tl.cdiv(tl.minimum(end, seam(rule, extent.came, tile.last)), BLOCK)
    for block in range(begin, end):
        first = tl.cast(block, tl.int32) * BLOCK
        if CHOSEN:
            number = tl.load(chosen + first // rule.page).to(tl.int32)
            first = tl.maximum(number, 0) * rule.page + first % rule.page
        position = first + tl.arange(0, BLOCK)
        seen = sees(rule, query, position) & asks[:, None]
        if CHOSEN:
            seen &= number >= 0
        seen &= (position >= tl.maximum(rule.kept, extent.begins))[None, :]
        seen &= position[None, :] < border[:, None]
        some = tl.max(seen.to(tl.int32), 0) > 0
        slot = tl.load(extent.sealed + first // rule.page)
        row = first % rule.page + tl.arange(0, BLOCK)
        k = _opened(_page(keys.pages, slot, tile.head), keys.form, row, some)
        s = scores(high, low, size, k, asked, split)
        v = _opened(_page(values.pages, slot, tile.head), values.form, row, some)
        top, total, out = gathered(s, seen, v, top, total, out, MANY)
    return top, total, out * lift(values.form), channel, there


@triton.jit
def _channels(form):
    if form.words:
        channel = order(form)
        there = channel >= 0
    else:
        channel, there = channels(form)
    return channel, there


@triton.jit
def _opened(page, form, rows, seen):
    return opened_words(page, form, rows, seen) if form.words else opened(page, form, rows, seen)


@triton.jit
def _page(pages, slot, head):
    """The fields of one page of one head."""
    codes = slot * pages.codes_slot + head * pages.codes_head
    scale = slot * pages.scale_slot + head * pages.scale_head
    return Pages(
        pages.codes + codes, pages.scale + scale, pages.bias + scale, pages.levels, 0, 0, 0, 0
    )
