"""Decode sealed pages to values, in the order of the stored bytes; queries are permuted to it.

Where the layout allows, codes are read as words of 32 bits and decoded two at a time, as the
halves of a word. For 4 bits, a word has 8 codes in bytes 0 to 3 (l: low half, h: high half):

    word    | 3h 3l | 2h 2l | 1h 1l | 0h 0l |    pairs: (0l, 2l), (0h, 2h), (1l, 3l), (1h, 3h)
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.kernels.arguments import AFFINE, CODEBOOK, FLOAT16_MAX, RAW


@triton.jit
def compute_channels(layout):
    """Return the channel of each value of `decode_rows`, and whether it exists."""
    x = tl.arange(0, layout.num_units * layout.unit_bytes * layout.values_per_byte)
    byte, part = x // layout.values_per_byte, x % layout.values_per_byte
    step: tl.constexpr = layout.interleave_block // layout.values_per_byte
    return byte // step * layout.interleave_block + byte % step + part * step, byte < layout.width


@triton.jit
def decode_rows(page, layout, rows, visible):
    """Decode rows of a page, [N, values]; rows that are not visible decode to zeros."""
    n, mask = rows[:, None, None], visible[:, None, None]
    unit = tl.arange(0, layout.num_units)[None, :, None]
    byte = unit * layout.unit_bytes + tl.arange(0, layout.unit_bytes)[None, None, :]
    codes = page.codes + n * layout.stride
    if layout.kind == RAW:
        values = tl.load(codes + byte, mask=mask & (byte < layout.width), other=0.0).to(
            layout.dot_dtype
        )
    else:
        low, high = _load_bytes(codes, byte, layout), _load_high_bytes(codes, byte, layout)
        if layout.bits == 8:
            values = _decode_code(low, high, 0, page, layout, n, unit, byte, mask)
        elif layout.bits == 4:
            values = tl.interleave(
                _decode_code(low, high, 0, page, layout, n, unit, byte, mask),
                _decode_code(low, high, 1, page, layout, n, unit, byte, mask),
            )
        else:
            values = tl.interleave(
                tl.interleave(
                    _decode_code(low, high, 0, page, layout, n, unit, byte, mask),
                    _decode_code(low, high, 2, page, layout, n, unit, byte, mask),
                ),
                tl.interleave(
                    _decode_code(low, high, 1, page, layout, n, unit, byte, mask),
                    _decode_code(low, high, 3, page, layout, n, unit, byte, mask),
                ),
            )
    return tl.reshape(
        values, [rows.shape[0], layout.num_units * layout.unit_bytes * layout.values_per_byte]
    )


@triton.jit
def _load_bytes(codes, byte, layout):
    if layout.num_units * layout.unit_bytes == layout.width:
        low = tl.load(codes + byte)
    else:
        low = tl.load(codes + byte, mask=byte < layout.width, other=0)
    return low.to(tl.int32)


@triton.jit
def _load_high_bytes(codes, byte, layout):
    """Load the bytes of the second plane of 3 bits that belong to each byte of the first one."""
    if layout.bits == 3:
        step: tl.constexpr = layout.interleave_block // 8
        index = byte // (2 * step) * step + byte % step
        high = tl.load(codes + layout.width + index, mask=byte < layout.width, other=0).to(tl.int32)
    else:
        high = 0
    return high


@triton.jit
def _decode_code(low, high, part: tl.constexpr, page, layout, n, unit, byte, mask):
    """Decode one code of every byte."""
    bits: tl.constexpr = 8 // layout.values_per_byte
    code = low >> bits * part & 2**bits - 1
    if layout.bits == 3:
        step: tl.constexpr = layout.interleave_block // 8
        code |= (high >> 2 * part + byte % (2 * step) // step & 1) << 2
    if layout.kind == CODEBOOK:
        scale = tl.load(page.scale + n, mask=mask, other=0.0).to(tl.float32)
        # The table stays in L1, where the lookups of a warp are one access.
        value = tl.load(page.levels + code).to(tl.float32) * scale
    else:
        group = (
            unit * layout.groups_per_unit + part * layout.groups_per_unit // layout.values_per_byte
        )
        valid, index = mask & (group < layout.num_groups), n * layout.num_groups + group
        scale = tl.load(page.scale + index, mask=valid, other=0.0).to(tl.float32)
        bias = tl.load(page.bias + index, mask=valid, other=0.0).to(tl.float32)
        value = code.to(tl.float32) * scale + bias
    if layout.dot_dtype == tl.float16:  # decoded values are finite or NaN
        value = tl.clamp(value, -FLOAT16_MAX, FLOAT16_MAX, propagate_nan=tl.PropagateNan.ALL)
    return value.to(layout.dot_dtype)


MAX_LEVEL = tl.constexpr(4.0)  # bound on the magnitude of codebook levels


@triton.jit
def compute_word_channels(layout, CODES_FIRST: tl.constexpr):
    """Return the channel of each value of `decode_rows_by_word`."""
    x = tl.arange(0, layout.num_units * layout.unit_bytes * layout.values_per_byte)
    if CODES_FIRST:
        words: tl.constexpr = layout.num_units * layout.unit_bytes // 4
        x = x % words * (4 * layout.values_per_byte) + x // words
    byte = x // (4 * layout.values_per_byte) * 4 + x % 2 * 2 + x // (2 * layout.values_per_byte) % 2
    part = x // 2 % layout.values_per_byte
    step: tl.constexpr = layout.interleave_block // layout.values_per_byte
    return byte // step * layout.interleave_block + byte % step + part * step


@triton.jit
def get_value_multiplier(layout):
    """Return the factor of decoded values: codebook values are divided by MAX_LEVEL for float16."""
    return MAX_LEVEL if layout.by_words and layout.kind != AFFINE else 1.0


@triton.jit
def decode_rows_by_word(page, layout, rows, visible, CODES_FIRST: tl.constexpr):
    """Decode rows of a page, [N, values]; rows that are not visible decode to zeros.

    The values have the order of the words, or with CODES_FIRST those of the first code of all words
    come first. Each order lets one operand of a matrix product be decoded in place: words for keys,
    whose channels are summed, and codes first for values.
    """
    words: tl.constexpr = layout.unit_bytes // 4
    unit, word = tl.arange(0, layout.num_units)[None, :, None], tl.arange(0, words)[None, None, :]
    index = rows[:, None, None] * (layout.stride // 4) + unit * words + word
    codes = tl.load(page.codes.to(tl.pointer_type(tl.int32)) + index)
    if layout.kind == AFFINE:
        even, odd = (
            _decode_byte_pair(codes, codes, layout),
            _decode_byte_pair(codes >> 8, codes, layout),
        )
    else:  # twice the codes, so that midpoints between codes are integers
        high, higher = _load_third_bits(page, layout, rows, word)
        even, odd = (
            _decode_byte_pair(codes << 1, high, layout),
            _decode_byte_pair(codes >> 7, higher, layout),
        )
    values = tl.join(even, odd)
    if layout.kind == AFFINE:
        group, mask = rows[:, None, None] * layout.num_units + unit, visible[:, None, None]
        scale = tl.load(page.scale + group, mask=mask, other=0.0)
        bias = tl.load(page.bias + group, mask=mask, other=0.0)
        # Relies on a fused multiply-add: the product alone may exceed float16.
        values *= _append_axes(_limit_scale(scale, bias, layout), len(values.shape))
        values += _append_axes(bias, len(values.shape))
    else:
        scale = _load_row_scales(page.scale, rows, visible)
        scale = (scale.to(tl.float32) * (1 / MAX_LEVEL)).to(tl.float16)
        values *= _append_axes(scale, len(values.shape))
    return tl.reshape(
        _order_values(values, layout, CODES_FIRST),
        [rows.shape[0], layout.num_units * layout.unit_bytes * layout.values_per_byte],
    )


@triton.jit
def _append_axes(x, ndim: tl.constexpr):
    """Append axes of one element to x [N, units, 1] until it has `ndim`."""
    for axis in tl.static_range(3, ndim):
        x = tl.expand_dims(x, axis)
    return x


@triton.jit
def _order_values(values, layout, CODES_FIRST: tl.constexpr):
    """Order values [N, units, words, 2, ...] by word and then by code, or by code first."""
    if layout.values_per_byte == 1:
        if CODES_FIRST:
            values = tl.permute(values, (0, 4, 3, 1, 2))
        else:
            values = tl.permute(values, (0, 1, 2, 4, 3))
    elif layout.values_per_byte == 2:
        if CODES_FIRST:
            values = tl.permute(values, (0, 5, 4, 3, 1, 2))
        else:
            values = tl.permute(values, (0, 1, 2, 5, 4, 3))
    else:
        if CODES_FIRST:
            values = tl.permute(values, (0, 6, 5, 4, 3, 1, 2))
        else:
            values = tl.permute(values, (0, 1, 2, 6, 5, 4, 3))
    return values


@triton.jit
def _load_row_scales(scales, rows, visible):
    """Load the float16 scales of rows from an even one on, [N, 1, 1], two in a word of 32 bits.

    The compiler prefetches no loads of 16 bits.
    """
    words: tl.constexpr = rows.shape[0] // 2
    pair = tl.min(rows, 0) // 2 + tl.arange(0, words)
    word = tl.load(scales.to(tl.pointer_type(tl.int32)) + pair)
    even = word.to(tl.int16).to(tl.float16, bitcast=True)
    odd = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    scale = tl.where(visible, tl.reshape(tl.join(even, odd), [rows.shape[0]]), 0.0)
    return scale[:, None, None]


@triton.jit
def _limit_scale(scale, bias, layout):
    """Reduce a scale so that no code decodes beyond float16; sealed values may reach its limit."""
    max_code: tl.constexpr = 255 if layout.bits == 8 else 15
    wide, low = scale.to(tl.float32), bias.to(tl.float32)
    over = low + wide * max_code > FLOAT16_MAX
    return tl.where(over, (FLOAT16_MAX - low) * (1 / max_code) * (1 - 2**-9), wide).to(tl.float16)


@triton.jit
def _load_third_bits(page, layout, rows, word):
    """Load the second plane of 3 bits, shifted into place for even and for odd bytes."""
    if layout.bits == 3:
        index = rows[:, None, None] * (layout.stride // 4) + layout.width // 4 + word // 2
        bits = tl.load(page.codes.to(tl.pointer_type(tl.int32)) + index)
        first = word % 2 == 0
        even, odd = tl.where(first, bits << 3, bits << 2), tl.where(first, bits >> 5, bits >> 6)
    else:
        even, odd = word, word
    return even, odd


@triton.jit
def _decode_byte_pair(word, high, layout):
    """Decode bytes 0 and 2 of each word, [..., 2], with another 2 for each code of a byte."""
    if layout.bits == 8:
        decoded = _decode_word_pair(word, high, 1, layout)
    elif layout.bits == 4:
        decoded = tl.join(
            _decode_word_pair(word, high, 1, layout), _decode_word_pair(word, high, 16, layout)
        )
    else:
        decoded = tl.join(
            tl.join(
                _decode_word_pair(word, high, 1, layout), _decode_word_pair(word, high, 4, layout)
            ),
            tl.join(
                _decode_word_pair(word, high, 16, layout), _decode_word_pair(word, high, 64, layout)
            ),
        )
    return decoded


@triton.jit
def _decode_word_pair(word, high, multiplier: tl.constexpr, layout):
    """Decode the codes in both halves of a word, without the scale and the bias.

    A code occupies the lowest bits of its half, or bits further up that are `multiplier` times as
    large. OR-ed into the mantissa of 1,024.0 it gives 1,024 + code * multiplier, without a shift:

        float16    0 | 11001 | mantissa: code * multiplier    = 0x6400 | code * multiplier
    """
    code_mask: tl.constexpr = 0xFF if layout.bits == 8 else 0xF if layout.bits == 4 else 3
    doubled: tl.constexpr = 1 if layout.kind == AFFINE else 2
    spread: tl.constexpr = 0x10001 * multiplier * doubled
    word = word & code_mask * spread | 0x64006400
    if layout.bits == 3:
        word |= high & 4 * spread
    low = word.to(tl.int16).to(tl.float16, bitcast=True)
    numbers = tl.join(low, (word >> 16).to(tl.int16).to(tl.float16, bitcast=True))
    if layout.kind == AFFINE:
        values = numbers * (1 / multiplier) - 1024.0 / multiplier
    else:
        x = numbers * (layout.polynomial[0] / multiplier) - (
            1024.0 / multiplier * layout.polynomial[0] + layout.polynomial[1]
        )
        square = x * x
        values = square * layout.polynomial[2] + layout.polynomial[3]
        for i in tl.static_range(4, len(layout.polynomial)):
            values = values * square + layout.polynomial[i]
        values *= x
    return values
