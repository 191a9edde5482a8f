"""A tile of queries over dense rows: those of a room, and the sinks."""

import triton
import triton.language as tl

from kvant.attention.triton.kernels.rules import askers, seam, sees
from kvant.attention.triton.kernels.softmax import gathered, operand, scores


@triton.jit
def over_rows(
    tile, asked, keys, values, rule, extent, ahead, span, BLOCK: tl.constexpr, MANY: tl.constexpr
):
    """Maxima, totals and weighted sums over `span` columns from so many `ahead` on; channels."""
    channel = tl.arange(0, keys.wide)
    mask = tile.there[:, None] & (channel < keys.dim)[None, :]
    q = tl.load(tile.rows[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    high, low, size = operand(q, asked, keys.dot, asked.split)
    query, border, asks = askers(tile, rule, extent, MANY)
    top = tl.full(tile.query.shape, float("-inf"), tl.float32)
    total = tl.zeros(tile.query.shape, tl.float32)
    out = tl.zeros([tile.query.shape[0], values.wide], tl.float32)
    begin = tl.maximum(tile.low, seam(rule, extent, tile.first))
    begin = tl.maximum(begin, extent.dense_from + ahead)
    end = tl.minimum(extent.dense_from + ahead + span, extent.columns)
    if rule.causal:
        end = tl.minimum(end, tile.last + 1)
    kept = tl.where(ahead == 0, rule.kept, 0)  # the sinks are read once
    for position0 in range(0, kept, BLOCK):
        position = position0 + tl.arange(0, BLOCK)
        there = (position < kept) & (position + tile.start < extent.columns)
        seen = sees(rule, query - tile.start, position) & asks[:, None] & there[None, :]
        some = tl.max(seen.to(tl.int32), 0) > 0
        k = _rows(keys.sinks, keys, tile, position, some)
        s = scores(high, low, size, k, asked, asked.split)
        v = _rows(values.sinks, values, tile, position, some)
        top, total, out = gathered(s, seen, v, top, total, out, MANY)
    for column0 in range(begin, end, BLOCK):
        column = column0 + tl.arange(0, BLOCK)
        position = column - tile.start
        seen = sees(rule, query - tile.start, position) & asks[:, None]
        seen &= (position >= rule.kept)[None, :] & (column[None, :] >= border[:, None])
        seen &= (column < end)[None, :]
        some = tl.max(seen.to(tl.int32), 0) > 0
        row = column - extent.dense_from + extent.slot
        k = _rows(keys.room, keys, tile, row, some)
        s = scores(high, low, size, k, asked, asked.split)
        v = _rows(values.room, values, tile, row, some)
        top, total, out = gathered(s, seen, v, top, total, out, MANY)
    channel = tl.arange(0, values.wide)
    return top, total, out, channel, channel < values.dim


@triton.jit
def _rows(rows, side, tile, row, some):
    """[N, dim]; zeros where nobody has seen `some`, whatever lies there."""
    channel = tl.arange(0, side.wide)
    place = tile.b * rows.batch + tile.head * rows.head + row.to(tl.int64) * rows.row
    mask = some[:, None] & (channel < side.dim)[None, :]
    return tl.load(rows.data + place[:, None] + channel[None, :], mask=mask, other=0.0).to(side.dot)
