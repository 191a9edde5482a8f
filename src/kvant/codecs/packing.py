"""What sealed rows are made of: codes of a few bits in whole bytes, and scales of 16 bits.

No bit is wasted. A width is a sum of planes of 8, 4, 2 or 1 bits: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2.
The first plane holds the low-order bits, the second the high-order ones, one plane after the other.

In a plane of w-bit parts a byte holds m = 8 / w of them. Channels are interleaved within blocks of
gcd(dim, 32): byte e of a block holds channels e, e + block / m, e + 2 block / m, ..., the first in
the lowest bits. So a vector register of bytes, masked, is a run of neighbouring channels.

Scales are computed with sums that are the same to the bit, and within what a 16-bit float holds.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import reduce
from math import gcd
from operator import or_

import torch
from torch import Tensor


def check_choice(name: str, value: int, allowed: Collection[int]) -> None:
    # 4.0 and True would pass for integers, and then give sizes that are none.
    if type(value) is not int or value not in allowed:
        choices = ", ".join(map(str, allowed))
        raise ValueError(f"{name} is {value!r}; it must be one of {choices}")


def check_dim(dim: int, multiple: int = 8) -> None:
    if dim < 1 or dim % multiple:
        raise ValueError(f"rows have {dim} values; this format needs a multiple of {multiple}")


# Of each width, its planes: how many bits they hold, and from which bit on.
BIT_PLANES: dict[int, tuple[tuple[int, int], ...]] = {
    2: ((2, 0),),
    3: ((2, 0), (1, 2)),
    4: ((4, 0),),
    5: ((4, 0), (1, 4)),
    6: ((4, 0), (2, 4)),
    8: ((8, 0),),
}
INTERLEAVE_BLOCK = (
    32  # channels: a nibble plane then has 16 bytes a block, the narrowest vector register
)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2**bits, [..., dim] -> uint8 [..., dim * bits / 8]."""
    check_dim(codes.shape[-1])
    parts = ((codes >> shift & (1 << width) - 1, width) for width, shift in BIT_PLANES[bits])
    return torch.cat([_pack_plane(part, width) for part, width in parts], dim=-1)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """uint8 [..., dim * bits / 8] -> uint8 codes [..., dim]."""
    dim = packed.shape[-1] * 8 // bits
    check_dim(dim)
    planes = torch.split(packed, [dim * width // 8 for width, _ in BIT_PLANES[bits]], dim=-1)
    parts = zip(planes, BIT_PLANES[bits], strict=True)
    return reduce(or_, (_unpack_plane(plane, width) << shift for plane, (width, shift) in parts))


def _pack_plane(parts: Tensor, width: int) -> Tensor:
    dim, per_byte = parts.shape[-1], 8 // width
    block = gcd(dim, INTERLEAVE_BLOCK)
    lanes = parts.reshape(*parts.shape[:-1], dim // block, per_byte, block // per_byte)
    packed = reduce(or_, (lanes[..., i, :] << width * i for i in range(per_byte)))
    return packed.flatten(-2)


def _unpack_plane(packed: Tensor, width: int) -> Tensor:
    per_byte, size = 8 // width, packed.shape[-1]
    step = gcd(size * per_byte, INTERLEAVE_BLOCK) // per_byte
    lanes = packed.reshape(*packed.shape[:-1], size // step, step)
    parts = [lanes >> width * i & (1 << width) - 1 for i in range(per_byte)]
    return torch.stack(parts, dim=-2).flatten(-3)


def tree_sum(x: Tensor) -> Tensor:
    """Sums over the last dimension, [..., 1]; in place."""
    width = x.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        x[..., : width - half] += x[..., half:width]
        width = half
    return x[..., :1]


FLOAT16_MAX = 65504.0  # the largest finite float16


def saturate(x: Tensor) -> Tensor:
    """A float32 copy within +-LIMIT; NaN stays NaN."""
    return x.to(torch.float32).clamp(-FLOAT16_MAX, FLOAT16_MAX)


def round_down(x: Tensor) -> Tensor:
    """The largest float16 that is not above x, for float32 x within +-LIMIT."""
    nearest = x.to(torch.float16)
    return torch.where(nearest.to(torch.float32) > x, _next_float16_below(nearest), nearest)


def round_up(x: Tensor) -> Tensor:
    return -round_down(-x)


def find_finite_rows(x: Tensor) -> Tensor:
    """[..., 1]: whether no value of a row is NaN or infinite, in the dtype it came in."""
    return x.amin(-1, keepdim=True).isfinite() & x.amax(-1, keepdim=True).isfinite()


def _next_float16_below(x: Tensor) -> Tensor:
    # As integers the magnitudes of floats are in order; below either zero comes 0x8001.
    bits = x.view(torch.int16)
    below = torch.where(bits > 0, bits - 1, bits + 1)
    return torch.where(x == 0, below.new_tensor(-0x7FFF), below).view(torch.float16)
