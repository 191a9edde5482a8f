"""What the ranges of columns give, merged by log-sum-exp: a program for each query of a head."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["ranges", "queries", "first", "all_queries"])
def merge(
    partial,
    out,
    lse,
    logits,
    ranges,
    queries,
    first,  # of these queries among
    all_queries,
    dim: tl.constexpr,
    WIDE: tl.constexpr,  # the power of two that holds dim
    HEADS: tl.constexpr,  # of queries
    SINK: tl.constexpr,  # are there logits that lead nowhere?
    LSE: tl.constexpr,
):
    """A query that sees nothing gets zeros, and -inf."""
    place = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64)
    channel = tl.arange(0, WIDE)
    if SINK:
        top = tl.load(logits + place // queries % HEADS).to(tl.float32) * 1.4426950408889634
    else:
        top = float("-inf")
    total = tl.where(top > float("-inf"), 1.0, 0.0)
    found = tl.zeros([WIDE], tl.float32)
    for _ in range(ranges):
        part_top, part_total = tl.load(partial.top + place), tl.load(partial.total + place)
        part = tl.load(partial.out + place * dim + channel, mask=channel < dim, other=0.0)
        new = tl.maximum(top, part_top)
        base = tl.where(new == float("-inf"), 0.0, new)
        fade, rise = tl.exp2(top - base), tl.exp2(part_top - base)
        total = total * fade + part_total * rise
        found = found * fade + part * rise
        top = new
        place += step
    place = tl.program_id(0).to(tl.int64)
    place = place // queries * all_queries + first + place % queries
    safe = tl.where(total == 0, 1.0, total)
    tl.store(out + place * dim + channel, (found / safe).to(out.dtype.element_ty), channel < dim)
    if LSE:
        tl.store(lse + place, (top + tl.log2(total)) * 0.6931471805599453)
