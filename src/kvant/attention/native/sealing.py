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
from kvant.native import DTYPES, behind, done

RECORD = struct.Struct("@27q")
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
    kind, bits, group, *levels = form(codec, dim)
    if kind == 0 or not regular or page % TILE or (bits in (3, 5) and dim % 32):
        return None
    out = {
        name: torch.empty(
            (batch, pages, heads, page, field.width), dtype=field.dtype, device=rows.device
        )
        for name, field in codec.fields(dim).items()
    }
    memory = {name: (field.data_ptr(), field.nbytes) for name, field in out.items()}
    given = RECORD.pack(
        *(rows.data_ptr(), behind(rows, size)),
        *(strides[0] * size, strides[2] * size, strides[3] * size),
        *(DTYPES[rows.dtype], batch, pages, heads, page, dim, kind, bits, group),
        isinstance(codec, Affine | Codebook) and codec.corrected,
        *(*levels, *_boundaries_of(codec, dim), arrangement),
        *(*memory["codes"], *memory["scale"], *memory.get("bias", (0, 0))),
        torch.get_num_threads(),
    )
    done(functions.kvant_seal(given))
    return out


def _boundaries_of(codec: Codec, dim: int) -> tuple[int, int]:
    if not isinstance(codec, Codebook):
        return 0, 0
    table = _boundaries(codec.bits, dim)
    return ctypes.addressof(table), ctypes.sizeof(table)


@lru_cache(maxsize=64)
def _boundaries(bits: int, dim: int) -> ctypes.Array[ctypes.c_float]:
    found = boundaries(bits, dim)
    return (ctypes.c_float * len(found))(*found)
