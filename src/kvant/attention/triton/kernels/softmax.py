"""What a query sees, its scores of a block of rows, and the online softmax that gathers blocks.

What it sees is what attention/mask.py says, and from which position it reads dense rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
