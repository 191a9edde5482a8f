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

from kvant.codecs.codebook import compute_boundaries, compute_levels
from kvant.contracts import Codec, Fields, Form, PagedTensors, Tiles
from kvant.native import DTYPE_CODES, count_remaining_bytes
from kvant.page_table import AppendPlan, Ints, PageTable

TILE_SHAPES = {  # of a field: rows and values that lie together
    "keys.codes": (16, 4),
    "values.codes": (4, 1),
    "keys.scale": (16, 1),
    "keys.bias": (16, 1),
    "values.scale": (16, 1),
    "values.bias": (16, 1),
}
UNIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by their bytes
MAX_ROW_COPIES = 4  # rows of a tile that are copied one by one


@dataclass(frozen=True)
class NativeTiles:
    """Fields that their tile does not divide stay as they are, and are not read natively."""

    def pack(self, name: str, field: Tensor, into: Tensor | None = None) -> Tensor:
        return rearrange_tiles(field, *TILE_SHAPES.get(name, (1, 1)), packed=False, into=into)

    def unpack(self, name: str, field: Tensor, into: Tensor | None = None) -> Tensor:
        return rearrange_tiles(field, *TILE_SHAPES.get(name, (1, 1)), packed=True, into=into)


def rearrange_tiles(
    field: Tensor, tile_rows: int, tile_width: int, *, packed: bool, into: Tensor | None = None
) -> Tensor:
    """Rows as tiles of so many rows and values, or back; as it is where they do not divide it.

    What lies together in both is moved as one integer: four bytes are as fast as one.
    """
    *lead, height, wide = field.shape
    if tile_rows == 1 or height % tile_rows or wide % tile_width:
        return field if into is None else into.copy_(field)
    if into is None:
        into = torch.empty(field.shape, dtype=field.dtype, device=field.device)
    unit, columns = UNIT_DTYPES[tile_width * field.itemsize], wide // tile_width
    there, here = (tile_rows, columns), (columns, tile_rows)
    if packed:
        there, here = here, there
    if field.stride(-1) != 1 or any(
        n % tile_width for n in (field.storage_offset(), *field.stride()[:-1])
    ):
        field = field.clone(memory_format=torch.contiguous_format)
    old = field.view(unit).reshape(*lead, height // tile_rows, *there).transpose(-1, -2)
    new = into.view(unit).view(*lead, height // tile_rows, *here)
    if tile_rows > MAX_ROW_COPIES:
        new.copy_(old)
    else:  # so many long rows, and not many short columns
        dim = -2 if packed else -1
        for row in range(tile_rows):
            new.select(dim, row).copy_(old.select(dim, row))
    return into


SIDE_STRUCT = struct.Struct("@28q")
PAGE_TABLE_STRUCT = struct.Struct("@15q")
ATTEND_STRUCT = struct.Struct("@25q 2d 17q")
PLAN_STRUCT = struct.Struct("@9q")
NUMBERS_POINTER = slice(5, 7)  # of an extent's record: where its numbers are
NUM_COPIES_INDEX, NUM_SEALS_INDEX = 2, 8  # of a record of steps: how many there are
STORE_STRUCT = struct.Struct("@22q")
CHOOSE_STRUCT = struct.Struct("@23q")

NATIVE_TILES = NativeTiles()
FORMAT_CODES = {"raw": 0, "affine": 1, "codebook": 2, "float": 3}
ROWS_ARRANGEMENT, ARRANGEMENT_CODES = 0, {"keys": 1, "values": 2}
MAX_DIM, READ_PAGE_MULTIPLE, STORE_PAGE_MULTIPLE = 256, 64, 16  # of the kernels
ODD_BIT_WIDTHS = (3, 5)  # bits whose planes need rows of whole 32 channels
NULL_ROWS = (0, 0, 0, 0, 0)
NULL_POINTER = (0, 0)
MEMO_KEY = "native"  # of a memo

RecordInts = tuple[int, ...]


class NativeRecord(NamedTuple):
    """A record that is pointed to, and the memory that it lies in."""

    address: int
    nbytes: int
    buffer: Ints


class NativeSide(NamedTuple):
    """What is known of a `Stored`, once and for all."""

    record_pointer: RecordInts  # of its record
    read_refusal: str | None  # why it is not read natively
    store_refusal: str | None  # why rows are not stored natively
    heads: int
    page: int
    dim: int
    dtype: torch.dtype
    record: Ints | None


def get_side(tensors: PagedTensors, name: str) -> NativeSide:
    """The record of a side, with what stands against it."""
    found: NativeSide | None = tensors.derived.get((MEMO_KEY, name))
    if found is None:
        found = tensors.derived[MEMO_KEY, name] = _make_side(tensors, name)
    return found


def _make_side(tensors: PagedTensors, name: str) -> NativeSide:
    opened = tensors.open
    heads, page, dim = opened.shape[1:]
    form = tensors.codec.form
    arranged = encode_arrangement(tensors.tiles, name)
    rows = explain_unsupported_rows(tensors.codec, opened, name)
    unread = unstored = rows
    if rows is None:
        assert form is not None
        there = bool(tensors.sealed)
        coded = form.kind != "raw" and there
        if page % READ_PAGE_MULTIPLE:
            unread = f"pages of {page} rows: a multiple of {READ_PAGE_MULTIPLE} is needed"
        elif (coded and arranged != ARRANGEMENT_CODES[name]) or (there and arranged is None):
            unread = "sealed pages that lie otherwise"
        if there and arranged is None:
            unstored = "sealed pages that lie otherwise"
        elif coded and page % STORE_PAGE_MULTIPLE:
            unstored = f"pages of {page} rows: a multiple of {STORE_PAGE_MULTIPLE} is needed"
    if rows is not None:
        return NativeSide(NULL_POINTER, unread, unstored, heads, page, dim, opened.dtype, None)
    size, strides = opened.element_size(), opened.stride()
    place = (
        opened.data_ptr(),
        count_remaining_bytes(opened, size),
        *(n * size for n in strides[:3]),
    )
    kept = _allocate_record(
        make_side_record(tensors.codec, dim, opened.dtype, place, tensors.sealed, arranged or 0)
    )
    where = (kept.address, kept.nbytes)
    return NativeSide(where, unread, unstored, heads, page, dim, opened.dtype, kept.buffer)


def explain_unsupported_rows(codec: Codec, rows: Tensor, name: str) -> str | None:
    """Why the kernels know no rows of this kind, or nothing."""
    form, dim = codec.form, rows.shape[-1]
    if rows.device.type != "cpu":
        return f"rows on {rows.device}"
    if type(rows) is not Tensor:
        return f"{name} in a {type(rows).__name__}"
    if form is None or form.kind not in FORMAT_CODES:
        return f"{name} of {type(codec).__name__}"
    if dim % 16 or dim > MAX_DIM:
        return f"{name} {dim} wide: a multiple of 16 up to {MAX_DIM} is needed"
    if rows.dtype not in DTYPE_CODES or rows.stride(-1) != 1:
        return f"{name} of {rows.dtype}, or not contiguous"
    if dim % 32 and form.bits in ODD_BIT_WIDTHS:
        return f"{name} of {form.bits} bits, {dim} wide: a multiple of 32 is needed"
    return None


def encode_arrangement(tiles: Tiles | None, name: str) -> int | None:
    """How the codes of a side lie to the library; None where it does not know it."""
    return (
        ROWS_ARRANGEMENT
        if tiles is None
        else ARRANGEMENT_CODES[name]
        if tiles == NATIVE_TILES
        else None
    )


def make_side_record(
    codec: Codec,
    dim: int,
    dtype: torch.dtype,
    open_record: RecordInts,
    sealed: Fields,
    arrangement_code: int,
) -> RecordInts:
    form = codec.form
    assert form is not None
    pages: list[int] = []
    for field in sealed.values():
        size, strides = field.element_size(), field.stride()
        pages += (
            field.data_ptr(),
            count_remaining_bytes(field, size),
            strides[0] * size,
            strides[1] * size,
        )
    pages += (0,) * (12 - len(pages))
    width, corrected = form.group or dim, int(form.corrected)
    shape = (
        FORMAT_CODES[form.kind],
        form.bits,
        width,
        DTYPE_CODES[dtype],
        dim,
        corrected,
        arrangement_code,
    )
    return (*shape, *open_record, *pages, *_get_codebook_pointers(form, dim))


def _get_codebook_pointers(form: Form, dim: int) -> RecordInts:
    """Where the levels of a codebook are, and the boundaries between them."""
    if form.kind != "codebook":
        return NULL_POINTER * 2
    found = (_make_float_array(form.bits, dim, of) for of in (compute_levels, compute_boundaries))
    return tuple(n for table in found for n in (ctypes.addressof(table), ctypes.sizeof(table)))


@lru_cache(maxsize=128)
def _make_float_array(bits: int, dim: int, compute: object) -> ctypes.Array[ctypes.c_float]:
    found = compute(bits, dim)  # type: ignore[operator]
    return (ctypes.c_float * len(found))(*found)


def get_page_table_pointer(page_table: PageTable) -> RecordInts:
    """Where the record of an extent is."""
    found: tuple[RecordInts, object] | None = page_table.derived.get(MEMO_KEY)
    if found is None:
        found = page_table.derived[MEMO_KEY] = _make_page_table_record(page_table)
    return found[0]


def get_page_table_record(page_table: PageTable) -> Ints:
    """The record of an extent."""
    get_page_table_pointer(page_table)
    record: Ints = page_table.derived[MEMO_KEY][1][0]
    return record


def _make_page_table_record(page_table: PageTable) -> tuple[RecordInts, tuple[Ints, Ints]]:
    numbers, record = page_table.numbers, page_table.derived_from_tables.get(MEMO_KEY)
    if record is None:
        kind, paging = page_table.layer_group, page_table.layer_group.paging
        tail = -1 if paging.tail is None else paging.tail
        record = page_table.derived_from_tables[MEMO_KEY] = np.array(
            (
                *(len(numbers), paging.page, tail, paging.dense_until, kind.sinks, 0, 0),
                *_make_table_record(page_table.sealed_table),
                *_make_table_record(page_table.open_table),
            ),
            np.int64,
        )
    record = record.copy()
    numbers = np.ascontiguousarray(numbers)
    record[NUMBERS_POINTER] = numbers.__array_interface__["data"][0], numbers.nbytes
    return (record.__array_interface__["data"][0], record.nbytes), (record, numbers)


def _make_table_record(table: Ints) -> RecordInts:
    """Of rows without gaps: what lies between them is not ours."""
    batch, width = table.shape
    stride = table.strides[0] // 8 if batch > 1 else width
    address = table.__array_interface__["data"][0] if table.size else 0
    return address, 8 * ((batch - 1) * stride + width) if table.size else 0, stride, width


def get_plan_pointer(plan: AppendPlan) -> RecordInts:
    """Where the record of the copies, the writes and the seals of a change is."""
    found: tuple[RecordInts, object] | None = plan.derived.get(MEMO_KEY)
    if found is None:
        parts = [np.ascontiguousarray(p) for p in (plan.copies, plan.writes, plan.seals)]
        record = np.array(make_plan_record(*parts), np.int64)
        found = plan.derived[MEMO_KEY] = (get_pointer(record), (record, parts))
    return found[0]


def make_plan_record(*parts: Ints) -> RecordInts:
    """Where copies, writes and seals are, and how many."""
    return tuple(n for part in parts for n in (*get_pointer(part), len(part)))


def get_pointer(array: Ints) -> RecordInts:
    """Of an array without gaps."""
    return (array.__array_interface__["data"][0], array.nbytes) if array.size else NULL_POINTER


def _allocate_record(values: RecordInts) -> NativeRecord:
    held = np.array(values, np.int64)
    return NativeRecord(held.__array_interface__["data"][0], held.nbytes, held)
