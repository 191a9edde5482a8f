"""Rows on their way into pages: copied to where they stay, and pages sealed, the codecs' own bytes.

Rows are copied all sides together: a change's entries, or a step's token. A program seals some rows
of a page of one head. Divisions round to nearest and nothing is fused (whoever launches says so),
and sums over a row are float64 in the order of the codec: the bytes are the same to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.kernels.arguments import AFFINE, LENGTH, MAX_LENGTH
from kvant.attention.triton.kernels.sealed_pages import compute_channels

# What an entry says: the slot, the first row and the number of rows that are written, the open slot
# that they come from (below zero: they came just now), their sequence and their first column.
ENTRY_SLOT, ENTRY_ROW, ENTRY_NUM_ROWS, ENTRY_SOURCE, ENTRY_SEQUENCE, ENTRY_COLUMN = (
    tl.constexpr(n) for n in range(6)
)
ENTRY_WIDTH = tl.constexpr(6)


@triton.jit
def put(copies, entries, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """A program takes ROWS rows of one head of an entry."""
    entry = entries + tl.program_id(0).to(tl.int64) // HEADS * ENTRY_WIDTH
    head = tl.program_id(0).to(tl.int64) % HEADS
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    there = n < tl.load(entry + ENTRY_NUM_ROWS)
    slot, row = tl.load(entry + ENTRY_SLOT), tl.load(entry + ENTRY_ROW)
    source, sequence = tl.load(entry + ENTRY_SOURCE), tl.load(entry + ENTRY_SEQUENCE)
    column = tl.load(entry + ENTRY_COLUMN)
    for i in tl.static_range(len(copies)):
        found = compute_row_pointers(copies[i], source, sequence, head, column, n)
        _copy_rows(found, copies[i], slot, head, row + n, there)


@triton.jit
def put_token(
    copies, page_table, table_width, open_offset, PAGE: tl.constexpr, HEADS: tl.constexpr
):
    """The rows of the newest token of each sequence, where there is room for them."""
    b, head = (tl.program_id(0) // HEADS).to(tl.int64), (tl.program_id(0) % HEADS).to(tl.int64)
    page_table += b * table_width
    one = tl.arange(0, 1).to(tl.int64)
    length = tl.load(page_table + LENGTH + one)
    there = (length > 0) & (length <= tl.load(page_table + MAX_LENGTH + one))
    position = tl.where(there, length - 1, 0)
    slot = tl.load(page_table + open_offset + position // PAGE)
    for i in tl.static_range(len(copies)):
        found = compute_row_pointers(copies[i], one - 1, b, head, 0, one)
        _copy_rows(found, copies[i], slot, head, position % PAGE, there)


@triton.jit
def compute_row_pointers(copy_args, source, sequence, head, column, n):
    """Where rows of a head begin: those of an open page, or those that came just now."""
    paged = copy_args.open.data + tl.maximum(source, 0) * copy_args.open.outer_stride
    paged = paged + head * copy_args.open.head_stride + n * copy_args.open.row_stride
    came = (
        copy_args.new_rows.data
        + sequence * copy_args.new_rows.outer_stride
        + head * copy_args.new_rows.head_stride
    )
    rows = tl.where(source < 0, came + (column + n) * copy_args.new_rows.row_stride, paged)
    if copy_args.aligned:  # which the compiler does not see behind the choice
        rows = tl.multiple_of(rows, 16)
    return rows


@triton.jit
def _copy_rows(rows, copy_args, slot, head, row, valid):
    channel = tl.arange(0, copy_args.padded_dim)[None, :]
    mask = valid[:, None] & (channel < copy_args.dim)
    found = tl.load(rows[:, None] + channel, mask=mask)
    to = (
        copy_args.target.data
        + slot * copy_args.target.outer_stride
        + head * copy_args.target.head_stride
        + row * copy_args.target.row_stride
    )
    tl.store(to[:, None] + channel, found, mask=mask)


@triton.jit
def compute_leaf_channels(
    GROUP: tl.constexpr, COUNT: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr
):
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


FLOAT16_MAX = tl.constexpr(65504.0)
FLOAT16_NAN_BITS = tl.constexpr(0x7E00)


@triton.jit
def saturate(x):
    return tl.minimum(tl.maximum(x, -FLOAT16_MAX), FLOAT16_MAX)


@triton.jit
def round_down_to_half(x):
    """The largest float16 that is not above x; below either zero comes 0x8001."""
    near = x.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    below = tl.where(bits > 0, bits - 1, bits + 1)
    below = tl.where(near == 0, -0x7FFF, below).to(tl.int16)
    return tl.where(near.to(tl.float32) > x, below.to(tl.float16, bitcast=True), near)


@triton.jit
def round_to_half(x):
    """The float16 nearest to x as a float32 has it; never a negative zero."""
    return (saturate(x.to(tl.float32)).to(tl.float16).to(tl.float32) + 0.0).to(tl.float16)


@triton.jit
def replace_broken_with_nan(half, broken):
    """The NaN that the codecs write: devices have others."""
    bits = tl.where(broken, FLOAT16_NAN_BITS, half.to(tl.int16, bitcast=True)).to(tl.int16)
    return bits.to(tl.float16, bitcast=True)


ROUNDING_OFFSET = tl.constexpr(
    12582912.0
)  # 1.5 * 2^23: added and taken away, it leaves the nearest integer


@triton.jit
def compute_covering_scale(row, valid, MAX_CODE: tl.constexpr):
    """The scale and the bias that cover each group."""
    low = tl.min(tl.where(valid, row, float("inf")), 2, keep_dims=True)
    high = tl.max(tl.where(valid, row, float("-inf")), 2, keep_dims=True)
    bias = round_down_to_half(low + 0.0)  # of two zeros the positive one
    most = tl.full(low.shape, MAX_CODE, tl.float32)
    return -round_down_to_half(-tl.div_rn(high + 0.0 - bias.to(tl.float32), most)), bias


@triton.jit
def find_nearest_codes(row, scale, bias, MAX_CODE: tl.constexpr):
    step = scale.to(tl.float32)
    step = tl.where(step > 0, step, 1.0)
    codes = tl.div_rn(row - bias.to(tl.float32), tl.broadcast_to(step, row.shape))
    return tl.minimum(tl.maximum(codes + ROUNDING_OFFSET - ROUNDING_OFFSET, 0.0), MAX_CODE)


@triton.jit
def fit_scale(row, codes, n, scale, bias):
    """The least squares scale and bias, or the given ones where these lose no more."""
    # Sums of codes are exact in any order, below 2^24; and so are products of a code and a value.
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
    # Codes that are all the same have no fit.
    better = (spread > 0) & (fit > 0) & (after < before)
    return tl.where(better, fit, scale), tl.where(better, base, bias)


@triton.jit
def _compute_excess_error(scale, bias, slope, spread, total, n, level):
    """n times the squared error, beyond that of the fit before it is rounded."""
    scale, bias = scale.to(tl.float64), bias.to(tl.float64)
    off, rest = scale - slope, scale * total + n * bias - level
    return off * off * spread + rest * rest


@triton.jit
def _sum_groups(x):
    total = tree_sum(tl.reshape(x, [x.shape[0] * x.shape[1], x.shape[2]]))
    return tl.reshape(total, [x.shape[0], x.shape[1], 1])


@triton.jit
def seal(
    copy_args,  # from where rows are
    entries,  # as `put` has them: the slot is that of a sealed page
    fields,
    boundaries,
    layout,
    third_layout,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    CORRECTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    entry = entries + tl.program_id(0).to(tl.int64) // HEADS * ENTRY_WIDTH
    head = tl.program_id(0).to(tl.int64) % HEADS
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    source, sequence = tl.load(entry + ENTRY_SOURCE), tl.load(entry + ENTRY_SEQUENCE)
    column = tl.load(entry + ENTRY_COLUMN)
    x = compute_row_pointers(copy_args, source, sequence, head, column, n)[:, None]
    n += (tl.load(entry + ENTRY_SLOT) * HEADS + head) * PAGE
    if layout.kind == AFFINE:
        _seal_affine(x, n, fields, layout, DIM, CORRECTED, ROWS)
    else:
        _seal_codebook(x, n, fields, boundaries, layout, third_layout, DIM, CORRECTED, ROWS)


@triton.jit
def _seal_affine(
    x, n, fields, layout, DIM: tl.constexpr, CORRECTED: tl.constexpr, ROWS: tl.constexpr
):
    run: tl.constexpr = (
        layout.unit_bytes * layout.values_per_byte // layout.groups_per_unit
    )  # values of a group
    count: tl.constexpr = layout.num_units * layout.groups_per_unit
    most: tl.constexpr = 2**layout.bits - 1
    channel, there = compute_leaf_channels(run, count, layout.num_groups, DIM)
    row = tl.load(x[:, None] + channel[None, :, :], mask=there[None, :, :], other=0.0)
    row = row.to(tl.float32)
    broken = tl.max((row - row != 0).to(tl.int32), 2, keep_dims=True) > 0
    row = saturate(tl.where(broken, 0.0, row))
    scale, bias = compute_covering_scale(row, there[None, :, :], most)
    if CORRECTED:
        codes = tl.where(there[None, :, :], find_nearest_codes(row, scale, bias, most), 0.0)
        values = tl.sum(there.to(tl.int32), 1, keep_dims=True)[None, :, :]
        scale, bias = fit_scale(row, codes, values, scale, bias)
    group = tl.arange(0, count)[None, :, None]
    place, some = n[:, None, None] * layout.num_groups + group, group < layout.num_groups
    tl.store(fields.scale + place, replace_broken_with_nan(scale, broken), mask=some)
    tl.store(fields.bias + place, replace_broken_with_nan(bias, broken), mask=some)
    # Codes once more, in the order in which the bytes hold them.
    channel, there = compute_channels(layout)
    row = tl.load(x + channel[None, :], mask=there[None, :], other=0.0).to(tl.float32)
    row = saturate(tl.reshape(row, [ROWS, layout.num_units, run, layout.groups_per_unit]))
    scale = tl.reshape(scale, [ROWS, layout.num_units, 1, layout.groups_per_unit])
    bias = tl.reshape(bias, [ROWS, layout.num_units, 1, layout.groups_per_unit])
    broken = tl.reshape(broken, [ROWS, layout.num_units, 1, layout.groups_per_unit])
    codes = tl.where(broken, 0.0, find_nearest_codes(row, scale, bias, most)).to(tl.int32)
    _store_codes(fields.codes, n, tl.reshape(codes, [ROWS, row.numel // ROWS]), layout, 0, 0, ROWS)


@triton.jit
def _seal_codebook(
    x,
    n,
    fields,
    boundaries,
    layout,
    third_layout,
    DIM: tl.constexpr,
    CORRECTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.load(x + tl.arange(0, DIM)[None, :]).to(tl.float32)
    broken = tl.max((row - row != 0).to(tl.int32), 1)[:, None] > 0
    row = saturate(tl.where(broken, 0.0, row))
    wide = row.to(tl.float64)
    scale = tl.sqrt(tree_sum(wide * wide) / DIM)
    size = scale.to(tl.float32)
    size = tl.where(size > 0, size, 1.0)
    if CORRECTED:
        level = tl.load(fields.levels + _find_nearest_codes(row, size, boundaries, layout)).to(
            tl.float64
        )
        scale = (tree_sum(level * wide) + 0.0) / tree_sum(level * level)
    half = tl.minimum(scale.to(tl.float32), FLOAT16_MAX).to(tl.float16)
    tl.store(fields.scale + n[:, None], replace_broken_with_nan(half, broken))
    _seal_plane(x, n, fields.codes, size, broken, boundaries, layout, layout, 0, 0, ROWS)
    if layout.bits == 3:
        _seal_plane(
            x,
            n,
            fields.codes,
            size,
            broken,
            boundaries,
            layout,
            third_layout,
            2,
            layout.width,
            ROWS,
        )


@triton.jit
def _seal_plane(
    x,
    n,
    codes,
    size,
    broken,
    boundaries,
    layout,
    plane_layout,
    SHIFT: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Codes once more, in the order in which the bytes of a plane hold them."""
    channel, there = compute_channels(plane_layout)
    row = tl.load(x + channel[None, :], mask=there[None, :], other=0.0).to(tl.float32)
    found = _find_nearest_codes(saturate(row), size, boundaries, layout)
    _store_codes(codes, n, tl.where(broken, 0, found), plane_layout, SHIFT, OFFSET, ROWS)


@triton.jit
def _find_nearest_codes(row, size, boundaries, layout):
    """How many boundaries a value does not fall below."""
    unit = tl.div_rn(row, tl.broadcast_to(size, row.shape))
    codes = tl.zeros(row.shape, tl.int32)
    for i in tl.static_range(2**layout.bits - 1):
        codes += (unit >= tl.load(boundaries + i)).to(tl.int32)
    return codes


@triton.jit
def _store_codes(
    target, n, codes, plane_layout, SHIFT: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr
):
    bits: tl.constexpr = 8 // plane_layout.values_per_byte
    size: tl.constexpr = plane_layout.num_units * plane_layout.unit_bytes
    part = tl.arange(0, plane_layout.values_per_byte)[None, None, :]
    codes = tl.reshape(codes >> SHIFT & 2**bits - 1, [ROWS, size, plane_layout.values_per_byte])
    packed = tl.sum(codes << part * bits, 2).to(tl.uint8)
    byte = tl.arange(0, size)[None, :]
    tl.store(
        target + n[:, None] * plane_layout.stride + OFFSET + byte,
        packed,
        mask=byte < plane_layout.width,
    )
