"""A tile of queries over sealed pages."""

import triton
import triton.language as tl

from kvant.attention.triton.kernels.pages import channels, opened
from kvant.attention.triton.kernels.records import Pages
from kvant.attention.triton.kernels.rules import askers, seam, sees
from kvant.attention.triton.kernels.softmax import gathered, operand, scores
from kvant.attention.triton.kernels.words import lift, opened_words, order


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
