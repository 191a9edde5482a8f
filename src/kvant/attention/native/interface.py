"""The request of src/native/kvant.h, written from a view as one record of 8-byte numbers.

The order is that of the C structs. It is written anew for every call, so this is kept to what is
cheap: what a codec amounts to is worked out once.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import cast

from torch import Tensor

from kvant.codecs import Affine, Codebook, Fp8, Raw
from kvant.codecs.levels import levels
from kvant.contracts import Codec, Mask, Request, Side, View
from kvant.native import DTYPES, behind

RECORD = struct.Struct("@58q 23q 2d 14q")  # two sides; sizes and places; the rule; the rest
NO_ROWS = (0, 0, 0, 0, 0)
NO_PAGES = (0, 0, 0, 0)
NO_MEMORY = (0, 0)
# (format, bits, group, address of levels, their bytes)
Form = tuple[int, int, int, int, int]


def record(request: Request, view: View, out: Tensor, lse: Tensor | None, threads: int) -> bytes:
    """What the library reads; good as long as the tensors are."""
    q, mask, table, logits = request.q, request.mask, view.page_table, request.sink_logits
    assert isinstance(mask, Mask)
    batch, heads, _, _ = view.keys.room.shape
    paging = view.paging
    tail = -1 if paging.tail is None else paging.tail
    return RECORD.pack(
        *_side(view.keys),
        *_side(view.values),
        *(batch, heads, q.shape[1] // heads, q.shape[2]),
        *(paging.page, view.first_page, table.shape[1], view.dense_from, view.keys.count),
        *(view.keys.sinks.shape[2], view.columns),
        *(table.data_ptr(), behind(table, 8), table.stride(0)),
        *(view.start.data_ptr(), behind(view.start, 8)),
        *(tail, paging.dense_until, view.own_from),
        *(int(mask.causal), mask.window or 0, mask.sinks, mask.chunk or 0),
        *(request.scale, request.softcap or 0.0),
        *(NO_MEMORY if logits is None else _memory(logits)),
        *(*_rows(q, 0), DTYPES[q.dtype], *_memory(out), DTYPES[out.dtype]),
        *(NO_MEMORY if lse is None else _memory(lse)),
        threads,
    )


def _side(side: Side) -> tuple[int, ...]:
    room, sealed = side.room, side.sealed
    dim, dtype = room.shape[3], DTYPES[room.dtype]
    kind, bits, group, *levels = form(side.codec, dim)
    pages: tuple[int, ...] = NO_PAGES * 3
    if sealed:
        first, *params = sealed.values()
        pages = (*_pages(first), *(n for field in params for n in _pages(field)))
        pages += NO_PAGES * (2 - len(params))
    dense = _rows(room, side.slot) if side.count else NO_ROWS
    sinks = _rows(side.sinks, 0) if side.sinks.shape[2] else NO_ROWS
    return (kind, bits, group, dtype, dim, *dense, *sinks, *pages, *levels)


def _memory(x: Tensor) -> tuple[int, int]:
    """Of a tensor without gaps."""
    return x.data_ptr(), x.nbytes


def _rows(room: Tensor, slot: int) -> tuple[int, ...]:
    size, (batch, head, row, _) = room.element_size(), room.stride()
    skipped = slot * row * size
    strides = (batch * size, head * size, row * size)
    return (room.data_ptr() + skipped, behind(room, size) - skipped, *strides)


def _pages(field: Tensor) -> tuple[int, ...]:
    size, strides = field.element_size(), field.stride()
    return (field.data_ptr(), field.nbytes, strides[0] * size, strides[1] * size)


def form(codec: Codec, dim: int) -> Form:
    """What a codec is to the library; a foreign one is a KeyError."""
    return _form(cast(Hashable, codec), dim)


@lru_cache(maxsize=256)
def _form(codec: Hashable, dim: int) -> Form:
    return FORMS[type(codec)](codec, dim)


def _codebook(codec: Codebook, dim: int) -> Form:
    table = _levels(codec.bits, dim)
    return 2, codec.bits, dim, ctypes.addressof(table), ctypes.sizeof(table)


@lru_cache(maxsize=64)
def _levels(bits: int, dim: int) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * (1 << bits))(*levels(bits, dim))


FORMS: dict[type, Callable[..., Form]] = {
    Raw: lambda codec, dim: (0, 0, dim, 0, 0),
    Affine: lambda codec, dim: (1, codec.bits, codec.group, 0, 0),
    Codebook: _codebook,
    Fp8: lambda codec, dim: (3, 8, dim, 0, 0),
}
