"""What a codec, and the rows beside its pages, are to the kernels."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from math import gcd
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from kvant.codecs import Affine, Codebook, Raw
from kvant.codecs.levels import levels
from kvant.codecs.packing import BLOCK, PLANES
from kvant.contracts import Codec, Side
from kvant.lasting import lasting

MAX_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of rows and queries
BITS: dict[type, tuple[int, ...]] = {Affine: (8, 4), Codebook: (4, 3, 2)}


def unread(codec: Codec) -> str | None:
    """Why the kernels do not read this codec."""
    if type(codec) is Raw:
        return None
    if type(codec) not in BITS:
        return type(codec).__name__
    bits, known = codec.bits, BITS[type(codec)]  # type: ignore[attr-defined]
    return None if bits in known else f"{type(codec).__name__} of {bits} bits"


@lru_cache(maxsize=1)
def records() -> Any:
    """The types of what kernels are given, which are asked for at every launch."""
    from kvant.attention.triton.kernels import records

    return records


@lru_cache(maxsize=1024, typed=True)
def constant(value: Hashable) -> Any:
    """A value that is compiled in: made once, since Triton compares them at every launch."""
    from triton import language as tl

    return tl.constexpr(value)


def form(codec: Codec, dim: int, dtype: torch.dtype, device: torch.device) -> Any:
    """The `Form` of pages of rows of `dim` values that came in `dtype`."""
    return beginning(cast(Hashable, codec), dim, dtype, device.type == "cpu")[0]


def dot_type(dtype: torch.dtype, interpreted: bool) -> Any:
    """In which rows of a dtype are multiplied; the interpreter takes bfloat16 for integers."""
    from triton import language as tl

    known = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return known[torch.float32 if interpreted and dtype == torch.bfloat16 else dtype]


@lru_cache(maxsize=256)
def beginning(codec: Hashable, dim: int, dtype: torch.dtype, interpreted: bool) -> tuple[Any, ...]:
    """What a `Side` begins with: the same at every launch."""
    form, dot = _form(codec, dim, dtype, interpreted), dot_type(dtype, interpreted)
    return form, *map(constant, (dim, power(dim), dot))


def _form(codec: Hashable, dim: int, dtype: torch.dtype, interpreted: bool) -> Any:
    from triton import language as tl

    from kvant.attention.triton.kernels.records import AFFINE, CODEBOOK, RAW, Form

    dot, kind, groups, spread = dot_type(dtype, interpreted), RAW, 1, 1
    bits, width, stride, units, each = 8, dim, dim, 1, power(dim)
    parts = block = 1
    if isinstance(codec, Affine | Codebook):
        # Sixteen bits hold what is decoded best as a float16, whatever the rows are.
        dot = tl.float32 if dtype == torch.float32 else tl.float16
        bits, block = codec.bits, gcd(dim, BLOCK)
        parts = 8 // PLANES[bits][0][0]
        width, stride = dim // parts, dim * bits // 8
        kind, each = CODEBOOK, power(width)
    if isinstance(codec, Affine):
        # All bytes of a unit have their first parts in one group, and their second ones.
        kind, unit = AFFINE, max(codec.group, block if parts > 1 else 1)
        groups, spread = -(-dim // codec.group), unit // codec.group
        units, each = power(-(-dim // unit)), unit // parts
    numbers = (bits, width, stride, units, each, parts, block, groups, spread)
    # A group may end inside of a word, and so may the second plane of 3 bits.
    words = kind is not RAW and dot == tl.float16 and spread == 1 and units * each == width
    words = words and each % (8 if bits == 3 else 4) == 0
    found = tuple(map(constant, curve(bits, dim) if kind is CODEBOOK else ()))
    return Form._make((*map(constant, (kind.value, *numbers, dot, words)), found))


def pages(side: Side) -> Any:
    """The `Pages` of a side; it may have none."""
    if not side.sealed:
        return records().Pages(*(side.room,) * 4, 0, 0, 0, 0)
    fields = side.sealed
    codes = fields["rows"] if type(side.codec) is Raw else fields["codes"]
    scale = fields.get("scale", codes)
    bias, found = fields.get("bias", scale), scale
    if isinstance(side.codec, Codebook):
        # Loads of 16 bits are left alone by Triton's pipelining, which sends wider ones elsewhere.
        dtype = torch.float32 if side.room.dtype == torch.float32 else torch.float16
        found = table(side.codec.bits, side.room.shape[3], dtype, codes.device)
    return records().Pages(codes, scale, bias, found, *codes.stride()[:2], *scale.stride()[:2])


@lru_cache(maxsize=64)
def table(bits: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The levels of a codebook, as float32 has them."""
    with lasting():
        return torch.tensor(levels(bits, dim).astype(np.float32), device=device).to(dtype)


def curve(bits: int, dim: int) -> tuple[float, ...]:
    """Levels as an odd polynomial of x = (2 code + 1) / 2^bits - 1, from its highest power down.

    It misses less than half of the last bit of a float16. Before it what twice a code is multiplied
    by, and what is taken from that, to be x: both are exact.
    """
    there, step = levels(bits, dim), 0.5**bits
    x = (2 * np.arange(len(there)) + 1) * step - 1
    powers = np.stack([x**power for power in range(1, min(10, len(there)), 2)], 1)
    found, *_ = np.linalg.lstsq(powers / there[:, None], np.ones(len(there)), rcond=None)
    return step, 1 - step, *found[::-1].tolist()


@lru_cache(maxsize=16)
def third(dim: int) -> Any:
    """The `Form` of the plane that holds the third of 3 bits."""
    from triton import language as tl

    from kvant.attention.triton.kernels.records import CODEBOOK, Form

    width, block = dim // 8, gcd(dim, BLOCK)
    numbers = (1, width, dim * 3 // 8, 1, power(width), 8, block, 1, 1)
    return Form._make((*map(constant, (CODEBOOK.value, *numbers, tl.float32, False)), ()))


def power(n: int) -> int:
    """The power of two that holds n."""
    return 1 << (n - 1).bit_length()
