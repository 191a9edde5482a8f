"""The structs of src/native/kvant.h as records of 8-byte numbers, in the order of the C structs.

What many calls share is packed once and kept beside what it says: a side of storage in the memo
of its `Stored`, an extent in that of the `Extent`, the steps of a change in that of the `Change`.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvant.codecs.codebook import boundaries, levels
from kvant.contracts import Codec, Fields, Form, Stored, Tiles
from kvant.extent import Change, Extent, Ints
from kvant.native import DTYPES, behind

TILES = {  # of a field: rows and values that lie together
    "keys.codes": (16, 4),
    "values.codes": (4, 1),
    "keys.scale": (16, 1),
    "keys.bias": (16, 1),
    "values.scale": (16, 1),
    "values.bias": (16, 1),
}
UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by their bytes
FEW = 4  # rows of a tile that are copied one by one


@dataclass(frozen=True)
class Lanes:
    """Fields that their tile does not divide stay as they are, and are not read natively."""

    def pack(self, name: str, field: Tensor, into: Tensor | None = None) -> Tensor:
        return swapped(field, *TILES.get(name, (1, 1)), packed=False, into=into)

    def unpack(self, name: str, field: Tensor, into: Tensor | None = None) -> Tensor:
        return swapped(field, *TILES.get(name, (1, 1)), packed=True, into=into)


def swapped(
    field: Tensor, rows: int, width: int, *, packed: bool, into: Tensor | None = None
) -> Tensor:
    """Rows as tiles of so many rows and values, or back; as it is where they do not divide it.

    What lies together in both is moved as one integer: four bytes are as fast as one.
    """
    *lead, height, wide = field.shape
    if rows == 1 or height % rows or wide % width:
        return field if into is None else into.copy_(field)
    if into is None:
        into = torch.empty(field.shape, dtype=field.dtype, device=field.device)
    unit, columns = UNITS[width * field.itemsize], wide // width
    there, here = (rows, columns), (columns, rows)
    if packed:
        there, here = here, there
    if field.stride(-1) != 1 or any(
        n % width for n in (field.storage_offset(), *field.stride()[:-1])
    ):
        field = field.clone(memory_format=torch.contiguous_format)
    old = field.view(unit).reshape(*lead, height // rows, *there).transpose(-1, -2)
    new = into.view(unit).view(*lead, height // rows, *here)
    if rows > FEW:
        new.copy_(old)
    else:  # so many long rows, and not many short columns
        dim = -2 if packed else -1
        for row in range(rows):
            new.select(dim, row).copy_(old.select(dim, row))
    return into


SIDE = struct.Struct("@28q")
EXTENT = struct.Struct("@15q")
REQUEST = struct.Struct("@25q 2d 17q")
STEPS = struct.Struct("@9q")
NUMBERS = slice(5, 7)  # of an extent's record: where its numbers are
COPIES, SEALS = 2, 8  # of a record of steps: how many there are
STORE = struct.Struct("@22q")
CHOOSE = struct.Struct("@23q")

LANES = Lanes()
FORMATS = {"raw": 0, "affine": 1, "codebook": 2, "float": 3}
ROWS, ARRANGEMENTS = 0, {"keys": 1, "values": 2}
MAX_DIM, BLOCK, TILE = 256, 64, 16  # of the kernels
UNEVEN = (3, 5)  # bits whose planes need rows of whole 32 channels
NO_ROWS = (0, 0, 0, 0, 0)
NO_MEMORY = (0, 0)
KEY = "native"  # of a memo

Numbers = tuple[int, ...]


class Kept(NamedTuple):
    """A record that is pointed to, and the memory that it lies in."""

    address: int
    nbytes: int
    memory: Ints


class Side(NamedTuple):
    """What is known of a `Stored`, once and for all."""

    place: Numbers  # of its record
    unread: str | None  # why it is not read natively
    unstored: str | None  # why rows are not stored natively
    heads: int
    page: int
    dim: int
    dtype: torch.dtype
    memory: Ints | None


def side(stored: Stored, name: str) -> Side:
    """The record of a side, with what stands against it."""
    found: Side | None = stored.memo.get((KEY, name))
    if found is None:
        found = stored.memo[KEY, name] = _side(stored, name)
    return found


def _side(stored: Stored, name: str) -> Side:
    opened = stored.open
    heads, page, dim = opened.shape[1:]
    form = stored.codec.form
    arranged = arrangement(stored.tiles, name)
    rows = unknown(stored.codec, opened, name)
    unread = unstored = rows
    if rows is None:
        assert form is not None
        there = bool(stored.sealed)
        coded = form.kind != "raw" and there
        if page % BLOCK:
            unread = f"pages of {page} rows: a multiple of {BLOCK} is needed"
        elif (coded and arranged != ARRANGEMENTS[name]) or (there and arranged is None):
            unread = "sealed pages that lie otherwise"
        if there and arranged is None:
            unstored = "sealed pages that lie otherwise"
        elif coded and page % TILE:
            unstored = f"pages of {page} rows: a multiple of {TILE} is needed"
    if rows is not None:
        return Side(NO_MEMORY, unread, unstored, heads, page, dim, opened.dtype, None)
    size, strides = opened.element_size(), opened.stride()
    place = (opened.data_ptr(), behind(opened, size), *(n * size for n in strides[:3]))
    kept = _kept(side_record(stored.codec, dim, opened.dtype, place, stored.sealed, arranged or 0))
    where = (kept.address, kept.nbytes)
    return Side(where, unread, unstored, heads, page, dim, opened.dtype, kept.memory)


def unknown(codec: Codec, rows: Tensor, name: str) -> str | None:
    """Why the kernels know no rows of this kind, or nothing."""
    form, dim = codec.form, rows.shape[-1]
    if rows.device.type != "cpu":
        return f"rows on {rows.device}"
    if type(rows) is not Tensor:
        return f"{name} in a {type(rows).__name__}"
    if form is None or form.kind not in FORMATS:
        return f"{name} of {type(codec).__name__}"
    if dim % 16 or dim > MAX_DIM:
        return f"{name} {dim} wide: a multiple of 16 up to {MAX_DIM} is needed"
    if rows.dtype not in DTYPES or rows.stride(-1) != 1:
        return f"{name} of {rows.dtype}, or not contiguous"
    if dim % 32 and form.bits in UNEVEN:
        return f"{name} of {form.bits} bits, {dim} wide: a multiple of 32 is needed"
    return None


def arrangement(tiles: Tiles | None, name: str) -> int | None:
    """How the codes of a side lie to the library; None where it does not know it."""
    return ROWS if tiles is None else ARRANGEMENTS[name] if tiles == LANES else None


def side_record(
    codec: Codec, dim: int, dtype: torch.dtype, opened: Numbers, sealed: Fields, arranged: int
) -> Numbers:
    form = codec.form
    assert form is not None
    pages: list[int] = []
    for field in sealed.values():
        size, strides = field.element_size(), field.stride()
        pages += (field.data_ptr(), behind(field, size), strides[0] * size, strides[1] * size)
    pages += (0,) * (12 - len(pages))
    width, corrected = form.group or dim, int(form.corrected)
    shape = (FORMATS[form.kind], form.bits, width, DTYPES[dtype], dim, corrected, arranged)
    return (*shape, *opened, *pages, *_tables(form, dim))


def _tables(form: Form, dim: int) -> Numbers:
    """Where the levels of a codebook are, and the boundaries between them."""
    if form.kind != "codebook":
        return NO_MEMORY * 2
    found = (_floats(form.bits, dim, of) for of in (levels, boundaries))
    return tuple(n for table in found for n in (ctypes.addressof(table), ctypes.sizeof(table)))


@lru_cache(maxsize=128)
def _floats(bits: int, dim: int, of: object) -> ctypes.Array[ctypes.c_float]:
    found = of(bits, dim)  # type: ignore[operator]
    return (ctypes.c_float * len(found))(*found)


def extent(given: Extent) -> Numbers:
    """Where the record of an extent is."""
    found: tuple[Numbers, object] | None = given.memo.get(KEY)
    if found is None:
        found = given.memo[KEY] = _extent(given)
    return found[0]


def extent_memory(given: Extent) -> Ints:
    """The record of an extent."""
    extent(given)
    record: Ints = given.memo[KEY][1][0]
    return record


def _extent(given: Extent) -> tuple[Numbers, tuple[Ints, Ints]]:
    numbers, record = given.numbers, given.shared.get(KEY)
    if record is None:
        kind, paging = given.kind, given.kind.paging
        tail = -1 if paging.tail is None else paging.tail
        record = given.shared[KEY] = np.array(
            (
                *(len(numbers), paging.page, tail, paging.dense_until, kind.sinks, 0, 0),
                *_table(given.sealed),
                *_table(given.open),
            ),
            np.int64,
        )
    record = record.copy()
    numbers = np.ascontiguousarray(numbers)
    record[NUMBERS] = numbers.__array_interface__["data"][0], numbers.nbytes
    return (record.__array_interface__["data"][0], record.nbytes), (record, numbers)


def _table(table: Ints) -> Numbers:
    """Of rows without gaps: what lies between them is not ours."""
    batch, width = table.shape
    stride = table.strides[0] // 8 if batch > 1 else width
    address = table.__array_interface__["data"][0] if table.size else 0
    return address, 8 * ((batch - 1) * stride + width) if table.size else 0, stride, width


def steps(change: Change) -> Numbers:
    """Where the record of the copies, the writes and the seals of a change is."""
    found: tuple[Numbers, object] | None = change.memo.get(KEY)
    if found is None:
        parts = [np.ascontiguousarray(p) for p in (change.copies, change.writes, change.seals)]
        record = np.array(steps_record(*parts), np.int64)
        found = change.memo[KEY] = (memory(record), (record, parts))
    return found[0]


def steps_record(*parts: Ints) -> Numbers:
    """Where copies, writes and seals are, and how many."""
    return tuple(n for part in parts for n in (*memory(part), len(part)))


def memory(array: Ints) -> Numbers:
    """Of an array without gaps."""
    return (array.__array_interface__["data"][0], array.nbytes) if array.size else NO_MEMORY


def _kept(record: Numbers) -> Kept:
    held = np.array(record, np.int64)
    return Kept(held.__array_interface__["data"][0], held.nbytes, held)
