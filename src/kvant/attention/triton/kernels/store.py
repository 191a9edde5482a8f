"""Kernels that copy rows into pages, and seal pages to the bytes of the codecs.

A launch of `put` copies the entries of an append plan for all sides; `put_token` copies the newest
token of a decode step. A program of `seal` seals some rows of a page of one head. Sealed bytes
equal the codecs' to the bit: divisions round to nearest, launches disable fused operations, and
sums over a row are float64 in the codec's order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.kernels.arguments import (
    AFFINE,
    FLOAT16_MAX,
    LENGTH,
    MAX_LENGTH,
    StoreEntry,
)
from kvant.attention.triton.kernels.sealed_pages import compute_channels


@triton.jit
def put(copies, entries, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Copy ROWS rows of one head of an entry, for all sides."""
    entry, head = _load_entry(entries, HEADS)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    for i in tl.static_range(len(copies)):
        _copy_rows(copies[i], entry, head, n, n < entry.num_rows)


@triton.jit
def put_token(
    copies, page_table, table_width, open_offset, PAGE: tl.constexpr, HEADS: tl.constexpr
):
    """Copy the newest token of a sequence for one head, if its length is at most MAX_LENGTH."""
    b, head = (tl.program_id(0) // HEADS).to(tl.int64), (tl.program_id(0) % HEADS).to(tl.int64)
    page_table += b * table_width
    zero = tl.arange(0, 1).to(tl.int64)  # [1]: the only row
    length = tl.load(page_table + LENGTH + zero)
    valid = (length > 0) & (length <= tl.load(page_table + MAX_LENGTH + zero))
    position = tl.where(valid, length - 1, 0)
    slot = tl.load(page_table + open_offset + position // PAGE)
    entry = StoreEntry(slot, position % PAGE, 1, zero - 1, b, 0)
    for i in tl.static_range(len(copies)):
        _copy_rows(copies[i], entry, head, zero, valid)


@triton.jit
def _load_entry(entries, HEADS: tl.constexpr):
    """Return the entry of this program, and its head."""
    pair = tl.program_id(0).to(tl.int64)
    entry = entries + pair // HEADS * 6
    loaded = StoreEntry(
        tl.load(entry),
        tl.load(entry + 1),
        tl.load(entry + 2),
        tl.load(entry + 3),
        tl.load(entry + 4),
        tl.load(entry + 5),
    )
    return loaded, pair % HEADS


@triton.jit
def compute_row_pointers(copy_args, entry, head, n):
    """Return pointers to the source rows of a head: in an open page, or in the new rows."""
    stored = copy_args.open.data + tl.maximum(entry.source, 0) * copy_args.open.outer_stride
    stored = stored + head * copy_args.open.head_stride + n * copy_args.open.row_stride
    new = (
        copy_args.new_rows.data
        + entry.sequence * copy_args.new_rows.outer_stride
        + head * copy_args.new_rows.head_stride
    )
    new = new + (entry.column + n) * copy_args.new_rows.row_stride
    rows = tl.where(entry.source < 0, new, stored)
    if copy_args.aligned:  # the compiler cannot infer it through `where`
        rows = tl.multiple_of(rows, 16)
    return rows


@triton.jit
def _copy_rows(copy_args, entry, head, n, valid):
    rows = compute_row_pointers(copy_args, entry, head, n)
    channel = tl.arange(0, copy_args.padded_dim)[None, :]
    mask = valid[:, None] & (channel < copy_args.dim)
    values = tl.load(rows[:, None] + channel, mask=mask)
    target = (
        copy_args.target.data
        + entry.slot * copy_args.target.outer_stride
        + head * copy_args.target.head_stride
        + (entry.row + n) * copy_args.target.row_stride
    )
    tl.store(target[:, None] + channel, values, mask=mask)


@triton.jit
def compute_leaf_channels(
    GROUP: tl.constexpr, COUNT: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr
):
    """Return the channel of each leaf of `tree_sum`, [COUNT, GROUP], and whether it exists.

    GROUPS of the COUNT groups exist; the last one may be shorter than GROUP channels. Its tree is
    a part of a whole group's tree: missing leaves count as zeros.
    """
    group, leaf = tl.arange(0, COUNT)[:, None], tl.arange(0, GROUP)[None, :]
    if GROUP * GROUPS == DIM:
        channel = group * GROUP + leaf
        valid = channel < DIM
    else:
        # The tensor comes first: Triton 3.7's interpreter cannot subtract it from a constexpr.
        width = tl.minimum(tl.maximum(group * -GROUP + DIM, 0), GROUP)
        index, valid = leaf * 0, leaf < GROUP
        for i in tl.static_range(8):
            if GROUP >> i > 1:
                # Bit i of a leaf selects the half; an odd width has a larger lower half.
                index = index + (leaf >> i & 1) * (((width << i) + GROUP - 1) // GROUP)
                valid = valid & (index < ((width << i + 1) + GROUP - 1) // GROUP)
        channel = group * GROUP + index
    return channel, valid


@triton.jit
def tree_sum(x):
    """Sum [N, leaves] to [N, 1], adding the halves as the codecs do."""
    width: tl.constexpr = x.shape[1]
    for half in tl.static_range(1, 9):
        if width >> half > 0:
            x = tl.sum(tl.reshape(x, [x.shape[0], 2, width >> half]), 1)
    return x


FLOAT16_NAN_BITS = tl.constexpr(0x7E00)


@triton.jit
def saturate(x):
    return tl.minimum(tl.maximum(x, -FLOAT16_MAX), FLOAT16_MAX)


@triton.jit
def round_down_to_half(x):
    """Return the largest float16 that is at most x; the next one below zero is 0x8001."""
    near = x.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    below = tl.where(bits > 0, bits - 1, bits + 1)
    below = tl.where(near == 0, -0x7FFF, below).to(tl.int16)
    return tl.where(near.to(tl.float32) > x, below.to(tl.float16, bitcast=True), near)


@triton.jit
def round_to_half(x):
    """Round x to float32, then to the nearest float16; never a negative zero."""
    return (saturate(x.to(tl.float32)).to(tl.float16).to(tl.float32) + 0.0).to(tl.float16)


@triton.jit
def replace_broken_with_nan(half, broken):
    """Store the codecs' NaN bits where `broken`; devices produce other NaN bits."""
    bits = tl.where(broken, FLOAT16_NAN_BITS, half.to(tl.int16, bitcast=True)).to(tl.int16)
    return bits.to(tl.float16, bitcast=True)


# 1.5 * 2^23: adding and subtracting it rounds to the nearest integer.
ROUNDING_OFFSET = tl.constexpr(12582912.0)


@triton.jit
def compute_covering_scale(row, valid, MAX_CODE: tl.constexpr):
    """Return the scale and the bias whose codes cover each group."""
    low = tl.min(tl.where(valid, row, float("inf")), 2, keep_dims=True)
    high = tl.max(tl.where(valid, row, float("-inf")), 2, keep_dims=True)
    bias = round_down_to_half(low + 0.0)  # adding 0.0 makes a negative zero positive
    max_code = tl.full(low.shape, MAX_CODE, tl.float32)
    return -round_down_to_half(-tl.div_rn(high + 0.0 - bias.to(tl.float32), max_code)), bias


@triton.jit
def find_nearest_codes(row, scale, bias, MAX_CODE: tl.constexpr):
    step = scale.to(tl.float32)
    step = tl.where(step > 0, step, 1.0)
    codes = tl.div_rn(row - bias.to(tl.float32), tl.broadcast_to(step, row.shape))
    return tl.minimum(tl.maximum(codes + ROUNDING_OFFSET - ROUNDING_OFFSET, 0.0), MAX_CODE)


@triton.jit
def fit_scale(row, codes, n, scale, bias):
    """Return the least squares scale and bias, or the given pair if its error is no larger."""
    # Sums of codes are exact in any order (below 2^24), and so are products of a code and a value.
    total = tl.sum(codes, 2, keep_dims=True).to(tl.float64)
    n = tl.maximum(n, 1).to(tl.float64)
    spread = n * tl.sum(codes * codes, 2, keep_dims=True).to(tl.float64) - total * total
    level = _sum_groups(row.to(tl.float64))
    overlap = _sum_groups(codes.to(tl.float64) * row.to(tl.float64))
    slope = (n * overlap - total * level) / tl.where(spread > 0, spread, 1.0)
    fit = round_to_half(slope)
    base = round_to_half((level - fit.to(tl.float64) * total) / n)
    before = _compute_excess_error(scale, bias, slope, spread, total, n, level)
    after = _compute_excess_error(fit, base, slope, spread, total, n, level)
    # Equal codes have no unique fit.
    better = (spread > 0) & (fit > 0) & (after < before)
    return tl.where(better, fit, scale), tl.where(better, base, bias)


@triton.jit
def _compute_excess_error(scale, bias, slope, spread, total, n, level):
    """Return n times the squared error in excess of the unrounded fit's."""
    scale, bias = scale.to(tl.float64), bias.to(tl.float64)
    slope_error, mean_error = scale - slope, scale * total + n * bias - level
    return slope_error * slope_error * spread + mean_error * mean_error


@triton.jit
def _sum_groups(x):
    total = tree_sum(tl.reshape(x, [x.shape[0] * x.shape[1], x.shape[2]]))
    return tl.reshape(total, [x.shape[0], x.shape[1], 1])


@triton.jit
def seal(copy_args, entries, args, HEADS: tl.constexpr):
    """Seal some rows of one head of a page; the slots of these entries are sealed slots."""
    entry, head = _load_entry(entries, HEADS)
    n = tl.program_id(1) * args.rows + tl.arange(0, args.rows).to(tl.int64)
    x = compute_row_pointers(copy_args, entry, head, n)[:, None]
    n += (entry.slot * HEADS + head) * args.page
    if args.layout.kind == AFFINE:
        _seal_affine(x, n, args, args.layout)
    else:
        _seal_codebook(x, n, args, args.layout)


@triton.jit
def _seal_affine(x, n, args, layout):
    group_values: tl.constexpr = (
        layout.unit_bytes * layout.values_per_byte // layout.groups_per_unit
    )
    count: tl.constexpr = layout.num_units * layout.groups_per_unit
    max_code: tl.constexpr = 2**layout.bits - 1
    channel, valid = compute_leaf_channels(group_values, count, layout.num_groups, args.dim)
    row = tl.load(x[:, None] + channel[None, :, :], mask=valid[None, :, :], other=0.0)
    row = row.to(tl.float32)
    broken = tl.max((row - row != 0).to(tl.int32), 2, keep_dims=True) > 0
    row = saturate(tl.where(broken, 0.0, row))
    scale, bias = compute_covering_scale(row, valid[None, :, :], max_code)
    if args.corrected:
        codes = tl.where(valid[None, :, :], find_nearest_codes(row, scale, bias, max_code), 0.0)
        num_values = tl.sum(valid.to(tl.int32), 1, keep_dims=True)[None, :, :]
        scale, bias = fit_scale(row, codes, num_values, scale, bias)
    group = tl.arange(0, count)[None, :, None]
    index, mask = n[:, None, None] * layout.num_groups + group, group < layout.num_groups
    tl.store(args.fields.scale + index, replace_broken_with_nan(scale, broken), mask=mask)
    tl.store(args.fields.bias + index, replace_broken_with_nan(bias, broken), mask=mask)
    # Compute the codes again, in the order of the stored bytes.
    channel, valid = compute_channels(layout)
    row = tl.load(x + channel[None, :], mask=valid[None, :], other=0.0).to(tl.float32)
    row = tl.reshape(row, [args.rows, layout.num_units, group_values, layout.groups_per_unit])
    row = saturate(row)
    scale = tl.reshape(scale, [args.rows, layout.num_units, 1, layout.groups_per_unit])
    bias = tl.reshape(bias, [args.rows, layout.num_units, 1, layout.groups_per_unit])
    broken = tl.reshape(broken, [args.rows, layout.num_units, 1, layout.groups_per_unit])
    codes = tl.where(broken, 0.0, find_nearest_codes(row, scale, bias, max_code)).to(tl.int32)
    codes = tl.reshape(codes, [args.rows, row.numel // args.rows])
    _store_codes(args.fields.codes, n, codes, layout, 0, 0)


@triton.jit
def _seal_codebook(x, n, args, layout):
    row = tl.load(x + tl.arange(0, args.dim)[None, :]).to(tl.float32)
    broken = tl.max((row - row != 0).to(tl.int32), 1)[:, None] > 0
    row = saturate(tl.where(broken, 0.0, row))
    wide = row.to(tl.float64)
    scale = tl.sqrt(tree_sum(wide * wide) / args.dim)
    size = scale.to(tl.float32)
    size = tl.where(size > 0, size, 1.0)
    if args.corrected:
        codes = _find_nearest_levels(row, size, args)
        level = tl.load(args.fields.levels + codes).to(tl.float64)
        scale = (tree_sum(level * wide) + 0.0) / tree_sum(level * level)
    half = tl.minimum(scale.to(tl.float32), FLOAT16_MAX).to(tl.float16)
    tl.store(args.fields.scale + n[:, None], replace_broken_with_nan(half, broken))
    _seal_plane(x, n, args, size, broken, layout, 0, 0)
    if layout.bits == 3:
        _seal_plane(x, n, args, size, broken, args.third_layout, 2, layout.width)


@triton.jit
def _seal_plane(x, n, args, size, broken, plane_layout, SHIFT: tl.constexpr, OFFSET: tl.constexpr):
    """Compute the codes again, in the byte order of a plane, and store that plane."""
    channel, valid = compute_channels(plane_layout)
    row = tl.load(x + channel[None, :], mask=valid[None, :], other=0.0).to(tl.float32)
    codes = tl.where(broken, 0, _find_nearest_levels(saturate(row), size, args))
    _store_codes(args.fields.codes, n, codes, plane_layout, SHIFT, OFFSET)


@triton.jit
def _find_nearest_levels(row, size, args):
    """Count the boundaries that each scaled value reaches."""
    unit = tl.div_rn(row, tl.broadcast_to(size, row.shape))
    codes = tl.zeros(row.shape, tl.int32)
    for i in tl.static_range(2**args.layout.bits - 1):
        codes += (unit >= tl.load(args.boundaries + i)).to(tl.int32)
    return codes


@triton.jit
def _store_codes(target, n, codes, plane_layout, SHIFT: tl.constexpr, OFFSET: tl.constexpr):
    """Pack the bits of a plane (of each code, from bit SHIFT on) and store its bytes."""
    bits: tl.constexpr = 8 // plane_layout.values_per_byte
    size: tl.constexpr = plane_layout.num_units * plane_layout.unit_bytes
    part = tl.arange(0, plane_layout.values_per_byte)[None, None, :]
    codes = codes >> SHIFT & 2**bits - 1
    codes = tl.reshape(codes, [n.shape[0], size, plane_layout.values_per_byte])
    packed = tl.sum(codes << part * bits, 2).to(tl.uint8)
    byte = tl.arange(0, size)[None, :]
    target = target + n[:, None] * plane_layout.stride + OFFSET
    tl.store(target + byte, packed, mask=byte < plane_layout.width)
