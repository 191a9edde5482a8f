"""Sealed pages as values: bytes are loaded as they lie, and the queries come in their order.

Affine codes and codebooks are read as words of 32 bits, two values at a time in the halves of one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.kernels.records import AFFINE, CODEBOOK, LARGEST, RAW


@triton.jit
def channels(form):
    """The channel of every value that `opened` gives, and whether there is one."""
    x = tl.arange(0, form.units * form.each * form.parts)
    byte, part = x // form.parts, x % form.parts
    step: tl.constexpr = form.block // form.parts
    return byte // step * form.block + byte % step + part * step, byte < form.width


@triton.jit
def opened(page, form, rows, seen):
    """Rows of a page, [N, values]; zeros where nobody has `seen` them, whatever lies there."""
    n, some = rows[:, None, None], seen[:, None, None]
    unit = tl.arange(0, form.units)[None, :, None]
    byte = unit * form.each + tl.arange(0, form.each)[None, None, :]
    codes = page.codes + n * form.stride
    if form.kind == RAW:
        values = tl.load(codes + byte, mask=some & (byte < form.width), other=0.0).to(form.dot)
    else:
        low = _bytes(codes, byte, form)
        if form.bits == 8:
            values = _value(low, page, form, n, unit, 0, some)
        elif form.bits == 4:
            values = tl.interleave(
                _value(low & 15, page, form, n, unit, 0, some),
                _value(low >> 4, page, form, n, unit, 1, some),
            )
        else:
            high = _high(codes, byte, form)
            values = tl.interleave(
                tl.interleave(
                    _value(_pair(low, high, 0, byte, form), page, form, n, unit, 0, some),
                    _value(_pair(low, high, 2, byte, form), page, form, n, unit, 2, some),
                ),
                tl.interleave(
                    _value(_pair(low, high, 1, byte, form), page, form, n, unit, 1, some),
                    _value(_pair(low, high, 3, byte, form), page, form, n, unit, 3, some),
                ),
            )
    return tl.reshape(values, [rows.shape[0], form.units * form.each * form.parts])


@triton.jit
def _bytes(codes, byte, form):
    if form.units * form.each == form.width:
        low = tl.load(codes + byte)
    else:
        low = tl.load(codes + byte, mask=byte < form.width, other=0)
    return low.to(tl.int32)


@triton.jit
def _high(codes, byte, form):
    """Of 3 bits, the bytes that hold the third one of what each byte of the first plane holds."""
    if form.bits == 3:
        step: tl.constexpr = form.block // 8
        place = byte // (2 * step) * step + byte % step
        high = tl.load(codes + form.width + place, mask=byte < form.width, other=0).to(tl.int32)
    else:
        high = 0
    return high


@triton.jit
def _pair(low, high, part: tl.constexpr, byte, form):
    """Codes of 2 or 3 bits."""
    code = low >> 2 * part & 3
    if form.bits == 3:
        step: tl.constexpr = form.block // 8
        code |= (high >> 2 * part + byte % (2 * step) // step & 1) << 2
    return code


@triton.jit
def _value(code, page, form, n, unit, part: tl.constexpr, some):
    """The values of one part of every byte."""
    if form.kind == CODEBOOK:
        scale = tl.load(page.scale + n, mask=some, other=0.0).to(tl.float32)
        # The table stays in the first cache, where a warp's lookups are one access.
        value = tl.load(page.levels + code).to(tl.float32) * scale
    else:
        group = unit * form.spread + part * form.spread // form.parts
        there, place = some & (group < form.groups), n * form.groups + group
        scale = tl.load(page.scale + place, mask=there, other=0.0).to(tl.float32)
        bias = tl.load(page.bias + place, mask=there, other=0.0).to(tl.float32)
        value = code.to(tl.float32) * scale + bias
    if form.dot == tl.float16:  # what was decoded is finite, or no number
        value = tl.clamp(value, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return value.to(form.dot)


LIFT = tl.constexpr(4.0)  # no level is further out


@triton.jit
def order(form):
    """The channel of every value that `opened_words` gives."""
    x = tl.arange(0, form.units * form.each * form.parts)
    byte = x // (4 * form.parts) * 4 + x % 2 * 2 + x // (2 * form.parts) % 2
    part = x // 2 % form.parts
    step: tl.constexpr = form.block // form.parts
    return byte // step * form.block + byte % step + part * step


@triton.jit
def lift(form):
    """What values are to be multiplied by: a float16 holds those of a codebook over LIFT."""
    return LIFT if form.words and form.kind != AFFINE else 1.0


@triton.jit
def opened_words(page, form, rows, seen):
    """Rows of a page, [N, values]; zeros where nobody has `seen` them, whatever lies there."""
    words: tl.constexpr = form.each // 4
    unit, word = tl.arange(0, form.units)[None, :, None], tl.arange(0, words)[None, None, :]
    place = rows[:, None, None] * (form.stride // 4) + unit * words + word
    codes = tl.load(page.codes.to(tl.pointer_type(tl.int32)) + place)
    if form.kind == AFFINE:
        even, odd = _of_bytes(codes, codes, form), _of_bytes(codes >> 8, codes, form)
    else:  # twice the codes: the middle between two of them is a whole number then
        high, higher = _thirds(page, form, rows, word)
        even, odd = _of_bytes(codes << 1, high, form), _of_bytes(codes >> 7, higher, form)
    if form.parts == 1:
        made = tl.permute(tl.join(even, odd), (0, 1, 2, 4, 3))
    elif form.parts == 2:
        made = tl.permute(tl.join(even, odd), (0, 1, 2, 5, 4, 3))
    else:
        made = tl.permute(tl.join(even, odd), (0, 1, 2, 6, 5, 4, 3))
    values = tl.reshape(made, [rows.shape[0], form.units, form.each * form.parts])
    group, some = rows[:, None, None] * form.units + unit, seen[:, None, None]
    scale = tl.load(page.scale + group, mask=some, other=0.0)
    if form.kind == AFFINE:
        bias = tl.load(page.bias + group, mask=some, other=0.0)
        # Fused, as it is on a GPU: the product alone may be more than a float16 holds.
        values = values * _within(scale, bias, form) + bias
    else:
        values *= (scale.to(tl.float32) * (1 / LIFT)).to(tl.float16)
    return tl.reshape(values, [rows.shape[0], form.units * form.each * form.parts])


@triton.jit
def _within(scale, bias, form):
    """A scale under which no code passes what a float16 holds: rows may end there."""
    most: tl.constexpr = 255 if form.bits == 8 else 15
    wide, low = scale.to(tl.float32), bias.to(tl.float32)
    over = low + wide * most > LARGEST
    return tl.where(over, (LARGEST - low) * (1 / most) * (1 - 2**-9), wide).to(tl.float16)


@triton.jit
def _thirds(page, form, rows, word):
    """Of 3 bits, the second plane: its bits for even bytes and odd ones, where they belong."""
    if form.bits == 3:
        place = rows[:, None, None] * (form.stride // 4) + form.width // 4 + word // 2
        found = tl.load(page.codes.to(tl.pointer_type(tl.int32)) + place)
        first = word % 2 == 0
        even, odd = tl.where(first, found << 3, found << 2), tl.where(first, found >> 5, found >> 6)
    else:
        even, odd = word, word
    return even, odd


@triton.jit
def _of_bytes(word, high, form):
    """What the first byte of a word and the third one hold, [.., 2] and a 2 for each halving."""
    if form.bits == 8:
        made = _word_pair(word, high, 1, form)
    elif form.bits == 4:
        made = tl.join(_word_pair(word, high, 1, form), _word_pair(word, high, 16, form))
    else:
        made = tl.join(
            tl.join(_word_pair(word, high, 1, form), _word_pair(word, high, 4, form)),
            tl.join(_word_pair(word, high, 16, form), _word_pair(word, high, 64, form)),
        )
    return made


@triton.jit
def _word_pair(word, high, times: tl.constexpr, form):
    """The values of the codes in both halves of a word, but for the scale and the bias.

    They lie in its lowest bits, or so many `times` as far up, where they can stay.
    """
    lowest: tl.constexpr = 0xFF if form.bits == 8 else 0xF if form.bits == 4 else 3
    twice: tl.constexpr = 1 if form.kind == AFFINE else 2
    both: tl.constexpr = 0x10001 * times * twice
    # The bits of 1,024 beside a code make a float16 of both.
    word = word & lowest * both | 0x64006400
    if form.bits == 3:
        word |= high & 4 * both
    low = word.to(tl.int16).to(tl.float16, bitcast=True)
    numbers = tl.join(low, (word >> 16).to(tl.int16).to(tl.float16, bitcast=True))
    if form.kind == AFFINE:
        values = numbers * (1 / times) - 1024.0 / times
    else:
        x = numbers * (form.curve[0] / times) - (1024.0 / times * form.curve[0] + form.curve[1])
        square = x * x
        values = square * form.curve[2] + form.curve[3]
        for i in tl.static_range(4, len(form.curve)):
            values = values * square + form.curve[i]
        values *= x
    return values
