"""What a query sees, as attention/mask.py says it, and from which position it reads dense rows."""

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
