"""Sealed pages as values: bytes are loaded as they lie, and the queries come in their order.

What is decoded is exact in float32, and then rounded once to what matrix products take.
"""

import triton
import triton.language as tl

from kvant.attention.triton.kernels.records import CODEBOOK, LARGEST, RAW


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
