"""Sealing pages natively: the codec's own bytes, written as the kernels read them."""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache

import torch
from torch import Tensor

from kvant.attention.native.interface import form
from kvant.attention.native.lanes import Lanes
from kvant.codecs import Affine, Codebook
from kvant.codecs.levels import boundaries
from kvant.contracts import Codec, Fields, Tiles
from kvant.native import DTYPES

RECORD = struct.Struct("@21q")
ARRANGEMENTS: dict[tuple[Tiles | None, str], int] = {
    (None, "keys"): 0,
    (None, "values"): 0,
    (Lanes(), "keys"): 1,
    (Lanes(), "values"): 2,
}
MAX_DIM, TILE = 256, 16


def sealed(
    functions: ctypes.CDLL, codec: Codec, rows: Tensor, side: str, tiles: Tiles | None
) -> Fields | None:
    """What `codec.seal` gives for rows [B, n, H, P, D]; None where it is not to be had."""
    arrangement = ARRANGEMENTS.get((tiles, side))
    batch, pages, heads, page, dim = rows.shape
    strides, size = rows.stride(), rows.element_size()
    regular = strides[4] == 1 and strides[1] == page * strides[3]
    if arrangement is None or rows.dtype not in DTYPES or dim % 16 or dim > MAX_DIM:
        return None
    kind, bits, group, table = form(codec, dim)
    if kind == 0 or not regular or page % TILE or (bits in (3, 5) and dim % 32):
        return None
    out = {
        name: torch.empty(
            (batch, pages, heads, page, field.width), dtype=field.dtype, device=rows.device
        )
        for name, field in codec.fields(dim).items()
    }
    bias = out.get("bias")
    given = RECORD.pack(
        *(rows.data_ptr(), strides[0] * size, strides[2] * size, strides[3] * size),
        *(DTYPES[rows.dtype], batch, pages, heads, page, dim, kind, bits, group),
        isinstance(codec, Affine | Codebook) and codec.corrected,
        *_codebook(codec, dim, table),
        *(arrangement, out["codes"].data_ptr(), out["scale"].data_ptr()),
        0 if bias is None else bias.data_ptr(),
        torch.get_num_threads(),
    )
    return None if functions.kvant_seal(given) else out


def _codebook(codec: Codec, dim: int, table: int) -> tuple[int, int]:
    if not isinstance(codec, Codebook):
        return 0, 0
    return table, ctypes.addressof(_boundaries(codec.bits, dim))


@lru_cache(maxsize=64)
def _boundaries(bits: int, dim: int) -> ctypes.Array[ctypes.c_float]:
    found = boundaries(bits, dim)
    return (ctypes.c_float * len(found))(*found)
