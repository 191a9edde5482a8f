"""Pack codes of a few bits into bytes without padding, and round scales to float16.

A code's bits are split into planes of 8, 4, 2 or 1 bits, stored one after the other. The first
plane has the low-order bits:

    bits 3    | plane of bits 0-1, dim / 4 bytes | plane of bit 2, dim / 8 bytes |
    bits 5    | plane of bits 0-3, dim / 2 bytes | plane of bit 4, dim / 8 bytes |
    bits 6    | plane of bits 0-3, dim / 2 bytes | plane of bits 4-5, dim / 4 bytes |

In a plane of w bits, a byte has m = 8 / w parts. Channels are interleaved within blocks of
gcd(dim, 32) channels: byte e of a block has channels e, e + block / m, e + 2 block / m, ...; the
first is in the lowest bits. For w = 4 and a block of 32 channels:

    byte       0           1          ...     15
    bits 4-7   channel 16  channel 17 ...  channel 31
    bits 0-3   channel 0   channel 1  ...  channel 15

So a masked vector register of bytes has neighbouring channels.

`tree_sum` adds in a fixed order, so scales are the same to the bit everywhere.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import reduce
from math import gcd
from operator import or_

import torch
from torch import Tensor


def check_choice(name: str, value: int, allowed: Collection[int]) -> None:
    # 4.0 and True equal integers, but sizes computed from them would be wrong.
    if type(value) is not int or value not in allowed:
        choices = ", ".join(map(str, allowed))
        raise ValueError(f"{name} is {value!r}; it must be one of {choices}")


def check_dim(dim: int, multiple: int = 8) -> None:
    if dim < 1 or dim % multiple:
        raise ValueError(f"rows have {dim} values; this format needs a multiple of {multiple}")


# Planes of each code width, as (bits of the plane, first bit of the code).
BIT_PLANES: dict[int, tuple[tuple[int, int], ...]] = {
    2: ((2, 0),),
    3: ((2, 0), (1, 2)),
    4: ((4, 0),),
    5: ((4, 0), (1, 4)),
    6: ((4, 0), (2, 4)),
    8: ((8, 0),),
}
INTERLEAVE_BLOCK = 32  # channels: 16 bytes of a 4-bit plane, the narrowest vector register


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes below 2**bits, [..., dim], into uint8 [..., dim * bits / 8]."""
    check_dim(codes.shape[-1])
    parts = ((codes >> shift & (1 << width) - 1, width) for width, shift in BIT_PLANES[bits])
    return torch.cat([_pack_plane(part, width) for part, width in parts], dim=-1)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Unpack uint8 [..., dim * bits / 8] into uint8 codes [..., dim]."""
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
    """Sum over the last dimension, [..., 1], by adding halves; overwrites x."""
    width = x.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        x[..., : width - half] += x[..., half:width]
        width = half
    return x[..., :1]


FLOAT16_MAX = 65504.0  # the largest finite float16


def saturate(x: Tensor) -> Tensor:
    """Return a float32 copy clamped to +-FLOAT16_MAX; NaN stays NaN."""
    return x.to(torch.float32).clamp(-FLOAT16_MAX, FLOAT16_MAX)


def round_down(x: Tensor) -> Tensor:
    """Return the largest float16 that is at most x, for float32 x within +-FLOAT16_MAX."""
    nearest = x.to(torch.float16)
    return torch.where(nearest.to(torch.float32) > x, _next_float16_below(nearest), nearest)


def round_up(x: Tensor) -> Tensor:
    return -round_down(-x)


def find_finite_rows(x: Tensor) -> Tensor:
    """Return whether each row has finite values only, [..., 1]."""
    return x.amin(-1, keepdim=True).isfinite() & x.amax(-1, keepdim=True).isfinite()


def _next_float16_below(x: Tensor) -> Tensor:
    # The magnitudes of floats are ordered as integers; the next one below zero is 0x8001.
    bits = x.view(torch.int16)
    below = torch.where(bits > 0, bits - 1, bits + 1)
    return torch.where(x == 0, below.new_tensor(-0x7FFF), below).view(torch.float16)
