"""Sealing pages: the codecs' own bytes, to the bit.

Divisions round to nearest and nothing is fused (whoever launches says so), and sums over a row are
float64 in the order of the codec. A program takes some rows of a page of one head.
"""

import triton
import triton.language as tl

from kvant.attention.triton.kernels.fit import covering, fitted, nearest_codes
from kvant.attention.triton.kernels.float16 import LIMIT, or_nan, saturated
from kvant.attention.triton.kernels.pages import channels
from kvant.attention.triton.kernels.put import COLUMN, ENTRY, SEQUENCE, SOURCE, TO, begin
from kvant.attention.triton.kernels.records import AFFINE
from kvant.attention.triton.kernels.sums import leaves, tree_sum


@triton.jit
def seal(
    way,  # from where rows are
    entries,  # as put.py has them: the slot is that of a sealed page
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
