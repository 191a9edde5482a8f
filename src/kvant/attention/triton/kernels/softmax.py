"""The scores of some queries and a block of rows, and the online softmax that gathers blocks.

Scores are to base 2. A query that has seen nothing yet has a maximum of -inf.
"""

import triton
import triton.language as tl

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
