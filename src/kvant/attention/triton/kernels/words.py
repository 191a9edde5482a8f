"""Sealed pages as values, from words of 32 bits: two values at a time in the halves of one.

Codes are exact in a float16, a scale and a bias are one, so a value is rounded once. This takes a
third of the instructions that pages.py does, and it is instructions that decoding waits for.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(65504.0)  # of a float16


@triton.jit
def order(form):
    """The channel of every value that `opened_words` gives."""
    x = tl.arange(0, form.units * form.each * form.parts)
    byte = x // (4 * form.parts) * 4 + x % 2 * 2 + x // (2 * form.parts) % 2
    part = x // 2 % form.parts
    step: tl.constexpr = form.block // form.parts
    return byte // step * form.block + byte % step + part * step


@triton.jit
def opened_words(page, form, rows, seen):
    """Rows of a page, [N, values]; zeros where nobody has `seen` them, whatever lies there."""
    words: tl.constexpr = form.each // 4
    unit, word = tl.arange(0, form.units)[None, :, None], tl.arange(0, words)[None, None, :]
    place = rows[:, None, None] * (form.stride // 4) + unit * words + word
    codes = tl.load(page.codes.to(tl.pointer_type(tl.int32)) + place)
    even, odd = _of_bytes(codes, form), _of_bytes(codes >> 8, form)
    if form.parts == 1:
        made = tl.permute(tl.join(even, odd), (0, 1, 2, 4, 3))
    else:
        made = tl.permute(tl.join(even, odd), (0, 1, 2, 5, 4, 3))
    values = tl.reshape(made, [rows.shape[0], form.units, form.each * form.parts])
    group = rows[:, None, None] * form.units + unit
    some = seen[:, None, None]
    scale = tl.load(page.scale + group, mask=some, other=0.0)
    bias = tl.load(page.bias + group, mask=some, other=0.0)
    values = values * _within(scale, bias, form) + bias
    return tl.reshape(values, [rows.shape[0], form.units * form.each * form.parts])


@triton.jit
def _within(scale, bias, form):
    """A scale under which no code passes what a float16 holds: rows may end there."""
    most: tl.constexpr = 255 if form.bits == 8 else 15
    wide, low = scale.to(tl.float32), bias.to(tl.float32)
    over = low + wide * most > LARGEST
    return tl.where(over, (LARGEST - low) * (1 / most) * (1 - 2**-9), wide).to(tl.float16)


@triton.jit
def _of_bytes(word, form):
    """The codes of the first byte of a word and of the third one, [.., 2], or [.., 2, parts]."""
    if form.bits == 8:
        made = _halves(word & 0x00FF00FF)
    else:
        made = tl.join(_halves(word & 0x000F000F), _halves(word >> 4 & 0x000F000F))
    return made


@triton.jit
def _halves(pair):
    """The numbers in both halves of a word."""
    pair |= 0x64006400  # which makes of each the bits of 1,024 and itself
    low = pair.to(tl.int16).to(tl.float16, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high) - 1024.0
