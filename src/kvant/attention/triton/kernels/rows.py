"""A tile of queries over rows: of sealed pages, of open ones, and those that came just now."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.kernels.pages import channels, lift, opened, opened_words, order
from kvant.attention.triton.kernels.records import Pages
from kvant.attention.triton.kernels.softmax import askers, gathered, operand, scores, seam, sees


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
    BLOCK: tl.constexpr,
    MANY: tl.constexpr,
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
    base = extent.first_sealed * rule.page
    begin = tl.maximum(base + ahead, tile.low) // BLOCK
    end = tl.minimum(base + ahead + span, extent.stop_sealed * rule.page)
    end = tl.cdiv(tl.minimum(end, seam(rule, extent.came, tile.last)), BLOCK)
    for block in range(begin, end):
        first = tl.cast(block, tl.int32) * BLOCK
        position = first + tl.arange(0, BLOCK)
        seen = sees(rule, query, position) & asks[:, None]
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
