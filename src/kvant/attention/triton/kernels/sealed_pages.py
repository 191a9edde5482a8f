"""Sealed pages as values: bytes are loaded as they lie, and the queries come in their order.

Affine codes and codebooks are read as words of 32 bits, two values at a time in the halves of one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.kernels.arguments import AFFINE, CODEBOOK, FLOAT16_MAX, RAW


@triton.jit
def compute_channels(layout):
    """The channel of every value that `opened` gives, and whether there is one."""
    x = tl.arange(0, layout.num_units * layout.unit_bytes * layout.values_per_byte)
    byte, part = x // layout.values_per_byte, x % layout.values_per_byte
    step: tl.constexpr = layout.interleave_block // layout.values_per_byte
    return byte // step * layout.interleave_block + byte % step + part * step, byte < layout.width


@triton.jit
def decode_rows(page, layout, rows, visible):
    """Rows of a page, [N, values]; zeros where nobody has `seen` them, whatever lies there."""
    n, some = rows[:, None, None], visible[:, None, None]
    unit = tl.arange(0, layout.num_units)[None, :, None]
    byte = unit * layout.unit_bytes + tl.arange(0, layout.unit_bytes)[None, None, :]
    codes = page.codes + n * layout.stride
    if layout.kind == RAW:
        values = tl.load(codes + byte, mask=some & (byte < layout.width), other=0.0).to(
            layout.dot_dtype
        )
    else:
        low = _load_bytes(codes, byte, layout)
        if layout.bits == 8:
            values = _decode_code(low, page, layout, n, unit, 0, some)
        elif layout.bits == 4:
            values = tl.interleave(
                _decode_code(low & 15, page, layout, n, unit, 0, some),
                _decode_code(low >> 4, page, layout, n, unit, 1, some),
            )
        else:
            high = _load_high_bytes(codes, byte, layout)
            values = tl.interleave(
                tl.interleave(
                    _decode_code(
                        _extract_code(low, high, 0, byte, layout), page, layout, n, unit, 0, some
                    ),
                    _decode_code(
                        _extract_code(low, high, 2, byte, layout), page, layout, n, unit, 2, some
                    ),
                ),
                tl.interleave(
                    _decode_code(
                        _extract_code(low, high, 1, byte, layout), page, layout, n, unit, 1, some
                    ),
                    _decode_code(
                        _extract_code(low, high, 3, byte, layout), page, layout, n, unit, 3, some
                    ),
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
    """Of 3 bits, the bytes that hold the third one of what each byte of the first plane holds."""
    if layout.bits == 3:
        step: tl.constexpr = layout.interleave_block // 8
        place = byte // (2 * step) * step + byte % step
        high = tl.load(codes + layout.width + place, mask=byte < layout.width, other=0).to(tl.int32)
    else:
        high = 0
    return high


@triton.jit
def _extract_code(low, high, part: tl.constexpr, byte, layout):
    """Codes of 2 or 3 bits."""
    code = low >> 2 * part & 3
    if layout.bits == 3:
        step: tl.constexpr = layout.interleave_block // 8
        code |= (high >> 2 * part + byte % (2 * step) // step & 1) << 2
    return code


@triton.jit
def _decode_code(code, page, layout, n, unit, part: tl.constexpr, mask):
    """The values of one part of every byte."""
    if layout.kind == CODEBOOK:
        scale = tl.load(page.scale + n, mask=mask, other=0.0).to(tl.float32)
        # The table stays in the first cache, where a warp's lookups are one access.
        value = tl.load(page.levels + code).to(tl.float32) * scale
    else:
        group = (
            unit * layout.groups_per_unit + part * layout.groups_per_unit // layout.values_per_byte
        )
        there, place = mask & (group < layout.num_groups), n * layout.num_groups + group
        scale = tl.load(page.scale + place, mask=there, other=0.0).to(tl.float32)
        bias = tl.load(page.bias + place, mask=there, other=0.0).to(tl.float32)
        value = code.to(tl.float32) * scale + bias
    if layout.dot_dtype == tl.float16:  # what was decoded is finite, or no number
        value = tl.clamp(value, -FLOAT16_MAX, FLOAT16_MAX, propagate_nan=tl.PropagateNan.ALL)
    return value.to(layout.dot_dtype)


MAX_LEVEL = tl.constexpr(4.0)  # no level is further out


@triton.jit
def compute_word_channels(layout):
    """The channel of every value that `opened_words` gives."""
    x = tl.arange(0, layout.num_units * layout.unit_bytes * layout.values_per_byte)
    byte = x // (4 * layout.values_per_byte) * 4 + x % 2 * 2 + x // (2 * layout.values_per_byte) % 2
    part = x // 2 % layout.values_per_byte
    step: tl.constexpr = layout.interleave_block // layout.values_per_byte
    return byte // step * layout.interleave_block + byte % step + part * step


@triton.jit
def get_value_multiplier(layout):
    """What values are to be multiplied by: a float16 holds those of a codebook over LIFT."""
    return MAX_LEVEL if layout.by_words and layout.kind != AFFINE else 1.0


@triton.jit
def decode_rows_by_word(page, layout, rows, visible):
    """Rows of a page, [N, values]; zeros where nobody has `seen` them, whatever lies there."""
    words: tl.constexpr = layout.unit_bytes // 4
    unit, word = tl.arange(0, layout.num_units)[None, :, None], tl.arange(0, words)[None, None, :]
    place = rows[:, None, None] * (layout.stride // 4) + unit * words + word
    codes = tl.load(page.codes.to(tl.pointer_type(tl.int32)) + place)
    if layout.kind == AFFINE:
        even, odd = (
            _decode_byte_pair(codes, codes, layout),
            _decode_byte_pair(codes >> 8, codes, layout),
        )
    else:  # twice the codes: the middle between two of them is a whole number then
        high, higher = _load_third_bits(page, layout, rows, word)
        even, odd = (
            _decode_byte_pair(codes << 1, high, layout),
            _decode_byte_pair(codes >> 7, higher, layout),
        )
    if layout.values_per_byte == 1:
        made = tl.permute(tl.join(even, odd), (0, 1, 2, 4, 3))
    elif layout.values_per_byte == 2:
        made = tl.permute(tl.join(even, odd), (0, 1, 2, 5, 4, 3))
    else:
        made = tl.permute(tl.join(even, odd), (0, 1, 2, 6, 5, 4, 3))
    values = tl.reshape(
        made, [rows.shape[0], layout.num_units, layout.unit_bytes * layout.values_per_byte]
    )
    group, some = rows[:, None, None] * layout.num_units + unit, visible[:, None, None]
    scale = tl.load(page.scale + group, mask=some, other=0.0)
    if layout.kind == AFFINE:
        bias = tl.load(page.bias + group, mask=some, other=0.0)
        # Fused, as it is on a GPU: the product alone may be more than a float16 holds.
        values = values * _limit_scale(scale, bias, layout) + bias
    else:
        values *= (scale.to(tl.float32) * (1 / MAX_LEVEL)).to(tl.float16)
    return tl.reshape(
        values, [rows.shape[0], layout.num_units * layout.unit_bytes * layout.values_per_byte]
    )


@triton.jit
def _limit_scale(scale, bias, layout):
    """A scale under which no code passes what a float16 holds: rows may end there."""
    most: tl.constexpr = 255 if layout.bits == 8 else 15
    wide, low = scale.to(tl.float32), bias.to(tl.float32)
    over = low + wide * most > FLOAT16_MAX
    return tl.where(over, (FLOAT16_MAX - low) * (1 / most) * (1 - 2**-9), wide).to(tl.float16)


@triton.jit
def _load_third_bits(page, layout, rows, word):
    """Of 3 bits, the second plane: its bits for even bytes and odd ones, where they belong."""
    if layout.bits == 3:
        place = rows[:, None, None] * (layout.stride // 4) + layout.width // 4 + word // 2
        found = tl.load(page.codes.to(tl.pointer_type(tl.int32)) + place)
        first = word % 2 == 0
        even, odd = tl.where(first, found << 3, found << 2), tl.where(first, found >> 5, found >> 6)
    else:
        even, odd = word, word
    return even, odd


@triton.jit
def _decode_byte_pair(word, high, layout):
    """What the first byte of a word and the third one hold, [.., 2] and a 2 for each halving."""
    if layout.bits == 8:
        made = _decode_word_pair(word, high, 1, layout)
    elif layout.bits == 4:
        made = tl.join(
            _decode_word_pair(word, high, 1, layout), _decode_word_pair(word, high, 16, layout)
        )
    else:
        made = tl.join(
            tl.join(
                _decode_word_pair(word, high, 1, layout), _decode_word_pair(word, high, 4, layout)
            ),
            tl.join(
                _decode_word_pair(word, high, 16, layout), _decode_word_pair(word, high, 64, layout)
            ),
        )
    return made


@triton.jit
def _decode_word_pair(word, high, multiplier: tl.constexpr, layout):
    """The values of the codes in both halves of a word, but for the scale and the bias.

    They lie in its lowest bits, or so many `times` as far up, where they can stay.
    """
    lowest: tl.constexpr = 0xFF if layout.bits == 8 else 0xF if layout.bits == 4 else 3
    twice: tl.constexpr = 1 if layout.kind == AFFINE else 2
    both: tl.constexpr = 0x10001 * multiplier * twice
    # The bits of 1,024 beside a code make a float16 of both.
    word = word & lowest * both | 0x64006400
    if layout.bits == 3:
        word |= high & 4 * both
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
