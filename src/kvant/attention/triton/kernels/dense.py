"""A tile of queries over dense rows: those of open pages, and those that came just now."""

import triton
import triton.language as tl

from kvant.attention.triton.kernels.rules import askers, seam, sees
from kvant.attention.triton.kernels.softmax import gathered, operand, scores


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
