"""What a 16-bit scale can hold: as codecs/float16.py has it, to the bit."""

import triton
import triton.language as tl

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
