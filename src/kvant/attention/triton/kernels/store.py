"""Rows on their way into pages: copied to where they stay, and pages sealed, the codecs' own bytes.

Rows are copied all sides together: a change's entries, or a step's token. A program seals some rows
of a page of one head. Divisions round to nearest and nothing is fused (whoever launches says so),
and sums over a row are float64 in the order of the codec: the bytes are the same to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.kernels.pages import channels
from kvant.attention.triton.kernels.records import AFFINE, LENGTH, MOST

# What an entry says: the slot, the first row and the number of rows that are written, the open slot
# that they come from (below zero: they came just now), their sequence and their first column.
TO, ROW, COUNT, SOURCE, SEQUENCE, COLUMN = (tl.constexpr(n) for n in range(6))
ENTRY = tl.constexpr(6)


@triton.jit
def put(ways, entries, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """A program takes ROWS rows of one head of an entry."""
    entry = entries + tl.program_id(0).to(tl.int64) // HEADS * ENTRY
    head = tl.program_id(0).to(tl.int64) % HEADS
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    there = n < tl.load(entry + COUNT)
    slot, row = tl.load(entry + TO), tl.load(entry + ROW)
    source, sequence = tl.load(entry + SOURCE), tl.load(entry + SEQUENCE)
    column = tl.load(entry + COLUMN)
    for i in tl.static_range(len(ways)):
        found = begin(ways[i], source, sequence, head, column, n)
        _copy(found, ways[i], slot, head, row + n, there)


@triton.jit
def put_token(ways, place, width, open_at, PAGE: tl.constexpr, HEADS: tl.constexpr):
    """The rows of the newest token of each sequence, where there is room for them."""
    b, head = (tl.program_id(0) // HEADS).to(tl.int64), (tl.program_id(0) % HEADS).to(tl.int64)
    place += b * width
    one = tl.arange(0, 1).to(tl.int64)
    length = tl.load(place + LENGTH + one)
    there = (length > 0) & (length <= tl.load(place + MOST + one))
    position = tl.where(there, length - 1, 0)
    slot = tl.load(place + open_at + position // PAGE)
    for i in tl.static_range(len(ways)):
        found = begin(ways[i], one - 1, b, head, 0, one)
        _copy(found, ways[i], slot, head, position % PAGE, there)


@triton.jit
def begin(way, source, sequence, head, column, n):
    """Where rows of a head begin: those of an open page, or those that came just now."""
    paged = way.open.data + tl.maximum(source, 0) * way.open.first
    paged = paged + head * way.open.head + n * way.open.row
    came = way.own.data + sequence * way.own.first + head * way.own.head
    rows = tl.where(source < 0, came + (column + n) * way.own.row, paged)
    if way.aligned:  # which the compiler does not see behind the choice
        rows = tl.multiple_of(rows, 16)
    return rows


@triton.jit
def _copy(rows, way, slot, head, row, there):
    channel = tl.arange(0, way.wide)[None, :]
    mask = there[:, None] & (channel < way.dim)
    found = tl.load(rows[:, None] + channel, mask=mask)
    to = way.to.data + slot * way.to.first + head * way.to.head + row * way.to.row
    tl.store(to[:, None] + channel, found, mask=mask)


@triton.jit
def leaves(GROUP: tl.constexpr, COUNT: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr):
    """[COUNT, GROUP]: the channel of each leaf of the trees of `GROUPS` groups, and is there one?

    The tree of a shorter group is a part of that of a whole one: what it lacks counts as zeros.
    """
    group, leaf = tl.arange(0, COUNT)[:, None], tl.arange(0, GROUP)[None, :]
    if GROUP * GROUPS == DIM:
        channel = group * GROUP + leaf
        there = channel < DIM
    else:
        width = tl.minimum(tl.maximum(DIM - group * GROUP, 0), GROUP)
        place, there = leaf * 0, leaf < GROUP
        for i in tl.static_range(8):
            if GROUP >> i > 1:
                # A bit says in which half the leaf is; of an odd width the lower one is larger.
                place = place + (leaf >> i & 1) * (((width << i) + GROUP - 1) // GROUP)
                there = there & (place < ((width << i + 1) + GROUP - 1) // GROUP)
        channel = group * GROUP + place
    return channel, there


@triton.jit
def tree_sum(x):
    """[N, leaves] -> [N, 1]."""
    width: tl.constexpr = x.shape[1]
    for half in tl.static_range(1, 9):
        if width >> half > 0:
            x = tl.sum(tl.reshape(x, [x.shape[0], 2, width >> half]), 1)
    return x


LIMIT = tl.constexpr(65504.0)
NOT_A_NUMBER = tl.constexpr(0x7E00)


@triton.jit
def saturated(x):
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def half_below(x):
    """The largest float16 that is not above x; below either zero comes 0x8001."""
    near = x.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    below = tl.where(bits > 0, bits - 1, bits + 1)
    below = tl.where(near == 0, -0x7FFF, below).to(tl.int16)
    return tl.where(near.to(tl.float32) > x, below.to(tl.float16, bitcast=True), near)


@triton.jit
def nearest_half(x):
    """The float16 nearest to x as a float32 has it; never a negative zero."""
    return (saturated(x.to(tl.float32)).to(tl.float16).to(tl.float32) + 0.0).to(tl.float16)


@triton.jit
def or_nan(half, broken):
    """The NaN that the codecs write: devices have others."""
    bits = tl.where(broken, NOT_A_NUMBER, half.to(tl.int16, bitcast=True)).to(tl.int16)
    return bits.to(tl.float16, bitcast=True)


ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away, it leaves the nearest integer


@triton.jit
def covering(row, there, MOST: tl.constexpr):
    """The scale and the bias that cover each group."""
    low = tl.min(tl.where(there, row, float("inf")), 2, keep_dims=True)
    high = tl.max(tl.where(there, row, float("-inf")), 2, keep_dims=True)
    bias = half_below(low + 0.0)  # of two zeros the positive one
    most = tl.full(low.shape, MOST, tl.float32)
    return -half_below(-tl.div_rn(high + 0.0 - bias.to(tl.float32), most)), bias


@triton.jit
def nearest_codes(row, scale, bias, MOST: tl.constexpr):
    step = scale.to(tl.float32)
    step = tl.where(step > 0, step, 1.0)
    codes = tl.div_rn(row - bias.to(tl.float32), tl.broadcast_to(step, row.shape))
    return tl.minimum(tl.maximum(codes + ROUND - ROUND, 0.0), MOST)


@triton.jit
def fitted(row, codes, n, scale, bias):
    """The least squares scale and bias, or the given ones where these lose no more."""
    # Sums of codes are exact in any order, below 2^24; and so are products of a code and a value.
    total = tl.sum(codes, 2, keep_dims=True).to(tl.float64)
    n = tl.maximum(n, 1).to(tl.float64)
    spread = n * tl.sum(codes * codes, 2, keep_dims=True).to(tl.float64) - total * total
    level = _group_sum(row.to(tl.float64))
    overlap = _group_sum(codes.to(tl.float64) * row.to(tl.float64))
    slope = (n * overlap - total * level) / tl.where(spread > 0, spread, 1.0)
    fit = nearest_half(slope)
    base = nearest_half((level - fit.to(tl.float64) * total) / n)
    before = _excess(scale, bias, slope, spread, total, n, level)
    after = _excess(fit, base, slope, spread, total, n, level)
    # Codes that are all the same have no fit.
    better = (spread > 0) & (fit > 0) & (after < before)
    return tl.where(better, fit, scale), tl.where(better, base, bias)


@triton.jit
def _excess(scale, bias, slope, spread, total, n, level):
    """n times the squared error, beyond that of the fit before it is rounded."""
    scale, bias = scale.to(tl.float64), bias.to(tl.float64)
    off, rest = scale - slope, scale * total + n * bias - level
    return off * off * spread + rest * rest


@triton.jit
def _group_sum(x):
    total = tree_sum(tl.reshape(x, [x.shape[0] * x.shape[1], x.shape[2]]))
    return tl.reshape(total, [x.shape[0], x.shape[1], 1])


@triton.jit
def seal(
    way,  # from where rows are
    entries,  # as `put` has them: the slot is that of a sealed page
    pages,
    boundaries,
    form,
    third,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    CORRECTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    entry = entries + tl.program_id(0).to(tl.int64) // HEADS * ENTRY
    head = tl.program_id(0).to(tl.int64) % HEADS
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    source, sequence = tl.load(entry + SOURCE), tl.load(entry + SEQUENCE)
    column = tl.load(entry + COLUMN)
    x = begin(way, source, sequence, head, column, n)[:, None]
    n += (tl.load(entry + TO) * HEADS + head) * PAGE
    if form.kind == AFFINE:
        _affine(x, n, pages, form, DIM, CORRECTED, ROWS)
    else:
        _codebook(x, n, pages, boundaries, form, third, DIM, CORRECTED, ROWS)


@triton.jit
def _affine(x, n, pages, form, DIM: tl.constexpr, CORRECTED: tl.constexpr, ROWS: tl.constexpr):
    run: tl.constexpr = form.each * form.parts // form.spread  # values of a group
    count: tl.constexpr = form.units * form.spread
    most: tl.constexpr = 2**form.bits - 1
    channel, there = leaves(run, count, form.groups, DIM)
    row = tl.load(x[:, None] + channel[None, :, :], mask=there[None, :, :], other=0.0)
    row = row.to(tl.float32)
    broken = tl.max((row - row != 0).to(tl.int32), 2, keep_dims=True) > 0
    row = saturated(tl.where(broken, 0.0, row))
    scale, bias = covering(row, there[None, :, :], most)
    if CORRECTED:
        codes = tl.where(there[None, :, :], nearest_codes(row, scale, bias, most), 0.0)
        values = tl.sum(there.to(tl.int32), 1, keep_dims=True)[None, :, :]
        scale, bias = fitted(row, codes, values, scale, bias)
    group = tl.arange(0, count)[None, :, None]
    place, some = n[:, None, None] * form.groups + group, group < form.groups
    tl.store(pages.scale + place, or_nan(scale, broken), mask=some)
    tl.store(pages.bias + place, or_nan(bias, broken), mask=some)
    # Codes once more, in the order in which the bytes hold them.
    channel, there = channels(form)
    row = tl.load(x + channel[None, :], mask=there[None, :], other=0.0).to(tl.float32)
    row = saturated(tl.reshape(row, [ROWS, form.units, run, form.spread]))
    scale = tl.reshape(scale, [ROWS, form.units, 1, form.spread])
    bias = tl.reshape(bias, [ROWS, form.units, 1, form.spread])
    broken = tl.reshape(broken, [ROWS, form.units, 1, form.spread])
    codes = tl.where(broken, 0.0, nearest_codes(row, scale, bias, most)).to(tl.int32)
    _put_codes(pages.codes, n, tl.reshape(codes, [ROWS, row.numel // ROWS]), form, 0, 0, ROWS)


@triton.jit
def _codebook(
    x,
    n,
    pages,
    boundaries,
    form,
    third,
    DIM: tl.constexpr,
    CORRECTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.load(x + tl.arange(0, DIM)[None, :]).to(tl.float32)
    broken = tl.max((row - row != 0).to(tl.int32), 1)[:, None] > 0
    row = saturated(tl.where(broken, 0.0, row))
    wide = row.to(tl.float64)
    scale = tl.sqrt(tree_sum(wide * wide) / DIM)
    size = scale.to(tl.float32)
    size = tl.where(size > 0, size, 1.0)
    if CORRECTED:
        level = tl.load(pages.levels + _nearest(row, size, boundaries, form)).to(tl.float64)
        scale = (tree_sum(level * wide) + 0.0) / tree_sum(level * level)
    half = tl.minimum(scale.to(tl.float32), LIMIT).to(tl.float16)
    tl.store(pages.scale + n[:, None], or_nan(half, broken))
    _plane(x, n, pages.codes, size, broken, boundaries, form, form, 0, 0, ROWS)
    if form.bits == 3:
        _plane(x, n, pages.codes, size, broken, boundaries, form, third, 2, form.width, ROWS)


@triton.jit
def _plane(
    x,
    n,
    codes,
    size,
    broken,
    boundaries,
    form,
    plane,
    SHIFT: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Codes once more, in the order in which the bytes of a plane hold them."""
    channel, there = channels(plane)
    row = tl.load(x + channel[None, :], mask=there[None, :], other=0.0).to(tl.float32)
    found = _nearest(saturated(row), size, boundaries, form)
    _put_codes(codes, n, tl.where(broken, 0, found), plane, SHIFT, OFFSET, ROWS)


@triton.jit
def _nearest(row, size, boundaries, form):
    """How many boundaries a value does not fall below."""
    unit = tl.div_rn(row, tl.broadcast_to(size, row.shape))
    codes = tl.zeros(row.shape, tl.int32)
    for i in tl.static_range(2**form.bits - 1):
        codes += (unit >= tl.load(boundaries + i)).to(tl.int32)
    return codes


@triton.jit
def _put_codes(to, n, codes, plane, SHIFT: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr):
    bits: tl.constexpr = 8 // plane.parts
    size: tl.constexpr = plane.units * plane.each
    part = tl.arange(0, plane.parts)[None, None, :]
    codes = tl.reshape(codes >> SHIFT & 2**bits - 1, [ROWS, size, plane.parts])
    packed = tl.sum(codes << part * bits, 2).to(tl.uint8)
    byte = tl.arange(0, size)[None, :]
    tl.store(to + n[:, None] * plane.stride + OFFSET + byte, packed, mask=byte < plane.width)
