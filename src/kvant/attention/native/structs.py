"""Pack the structs of src/native/kvant.h as records of 8-byte integers, in C order.

Records that many calls share are packed once and stored in `derived` of the object that they
describe: `PagedTensors`, `PageTable` or `AppendPlan`.

A tile of keys holds 4 bytes of codes from each of 16 rows, so one load of 64 bytes has the same
channels of 16 rows. The codes of rows a, b, ..., p, with bytes 0, 1, ..., in both orders:

    canonical   a0 a1 a2 a3 a4 ... | b0 b1 b2 b3 b4 ... | ...
    tiles       a0 a1 a2 a3 b0 b1 b2 b3 ... p3 | a4 a5 a6 a7 b4 ...
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvant.codecs.codebook import Floats, compute_boundaries, compute_levels
from kvant.contracts import Codec, Fields, Form, PagedTensors, Tiles
from kvant.lazy import Memo
from kvant.native import DTYPE_CODES, count_remaining_bytes
from kvant.native.header import NULL_POINTER, PAGE_TABLE_STRUCT, PAGES_STRUCT, PLAN_STRUCT
from kvant.page_table import AppendPlan, Ints, PageTable

TILE_SHAPES = {  # by field: rows of a tile, and adjacent values that it has of each row
    "keys.codes": (16, 4),
    "values.codes": (4, 1),
    "keys.scale": (16, 1),
    "keys.bias": (16, 1),
    "values.scale": (16, 1),
    "values.bias": (16, 1),
}
UNIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # integers by bytes
MAX_ROW_COPIES = 4  # tiles of at most this many rows are copied row by row


@dataclass(frozen=True)
class NativeTiles:
    """Arrange fields in tiles. A field whose shape the tile does not divide stays canonical."""

    def pack(self, name: str, field: Tensor, into: Tensor | None = None) -> Tensor:
        return rearrange_tiles(field, *TILE_SHAPES.get(name, (1, 1)), packed=False, into=into)

    def unpack(self, name: str, field: Tensor, into: Tensor | None = None) -> Tensor:
        return rearrange_tiles(field, *TILE_SHAPES.get(name, (1, 1)), packed=True, into=into)


def rearrange_tiles(
    field: Tensor, tile_rows: int, tile_width: int, *, packed: bool, into: Tensor | None = None
) -> Tensor:
    """Rearrange rows into tiles; if `packed`, rearrange tiles into rows.

    A field that the tiles do not divide keeps its order, and is returned itself without `into`.
    The adjacent values that a tile has of a row are copied as one integer of up to 4 bytes.
    """
    *lead, height, width = field.shape
    if tile_rows == 1 or height % tile_rows or width % tile_width:
        return field if into is None else into.copy_(field)
    if into is None:
        into = torch.empty(field.shape, dtype=field.dtype, device=field.device)
    unit, columns = UNIT_DTYPES[tile_width * field.itemsize], width // tile_width
    old_shape, new_shape = (tile_rows, columns), (columns, tile_rows)
    if packed:
        old_shape, new_shape = new_shape, old_shape
    if field.stride(-1) != 1 or any(
        n % tile_width for n in (field.storage_offset(), *field.stride()[:-1])
    ):
        field = field.clone(memory_format=torch.contiguous_format)
    old = field.view(unit).reshape(*lead, height // tile_rows, *old_shape).transpose(-1, -2)
    new = into.view(unit).view(*lead, height // tile_rows, *new_shape)
    if tile_rows > MAX_ROW_COPIES:
        new.copy_(old)
    else:  # few copies of long rows instead of many copies of short columns
        dim = -2 if packed else -1
        for row in range(tile_rows):
            new.select(dim, row).copy_(old.select(dim, row))
    return into


NUMBERS_INDEX = PAGE_TABLE_STRUCT.index("numbers")
NUMBERS_POINTER = slice(NUMBERS_INDEX, NUMBERS_INDEX + 2)  # address and bytes
COPY_AND_SEAL_COUNTS = [PLAN_STRUCT.index("num_copies"), PLAN_STRUCT.index("num_seals")]

NATIVE_TILES = NativeTiles()
FORMAT_CODES = {"raw": 0, "affine": 1, "codebook": 2, "float": 3}
ROWS_ARRANGEMENT, ARRANGEMENT_CODES = 0, {"keys": 1, "values": 2}
MAX_DIM, READ_PAGE_MULTIPLE, STORE_PAGE_MULTIPLE = 256, 64, 16  # limits of the kernels
ODD_BIT_WIDTHS = (3, 5)  # bit planes of these widths need rows of a multiple of 32 channels

RecordInts = tuple[int, ...]


class NativeSide(NamedTuple):
    """The record of a side of storage, and the reasons why kernels cannot use it."""

    record_pointer: RecordInts  # address and bytes of `record`
    read_refusal: str | None  # why the kernels cannot read its pages
    store_refusal: str | None  # why the kernels cannot store rows in it
    heads: int
    page: int
    dim: int
    dtype: torch.dtype
    record: Ints | None


class PointedRecord(NamedTuple):
    """The record of a page table or of an append plan."""

    pointer: RecordInts  # address and bytes of `record`
    record: Ints
    keepalive: Sequence[Ints] = ()  # other memory that the record points to


SIDES: dict[str, Memo[NativeSide]] = {name: Memo(f"native {name}") for name in ("keys", "values")}
KEYS_SIDE, VALUES_SIDE = SIDES.values()
TABLE_RECORD: Memo[PointedRecord] = Memo("native page table")
TABLE_TEMPLATE: Memo[Ints] = Memo("native page table, except its numbers")
PLAN_RECORD: Memo[PointedRecord] = Memo("native append plan")


def get_side(tensors: PagedTensors, name: str) -> NativeSide:
    """Return the cached record of a side, packed on first use."""
    side = tensors.derived.get(SIDES[name])
    if side is None:
        side = tensors.derived[SIDES[name]] = _make_side(tensors, name)
    return side


def _make_side(tensors: PagedTensors, name: str) -> NativeSide:
    open_pages = tensors.open
    heads, page, dim = open_pages.shape[1:]
    form, dtype = tensors.codec.form, open_pages.dtype
    arrangement = encode_arrangement(tensors.tiles, name)
    refusal = explain_unsupported_rows(tensors.codec, open_pages, name)
    if refusal is not None:
        return NativeSide(NULL_POINTER, refusal, refusal, heads, page, dim, dtype, None)
    assert form is not None
    read_refusal = store_refusal = None
    has_sealed = bool(tensors.sealed)
    coded = form.kind != "raw" and has_sealed
    if page % READ_PAGE_MULTIPLE:
        read_refusal = f"pages of {page} rows: a multiple of {READ_PAGE_MULTIPLE} is needed"
    elif (coded and arrangement != ARRANGEMENT_CODES[name]) or (has_sealed and arrangement is None):
        read_refusal = "sealed pages in another arrangement"
    if has_sealed and arrangement is None:
        store_refusal = "sealed pages in another arrangement"
    elif coded and page % STORE_PAGE_MULTIPLE:
        store_refusal = f"pages of {page} rows: a multiple of {STORE_PAGE_MULTIPLE} is needed"
    size, strides = open_pages.element_size(), open_pages.stride()
    open_record = (
        open_pages.data_ptr(),
        count_remaining_bytes(open_pages, size),
        *(n * size for n in strides[:3]),
    )
    numbers = make_side_record(
        tensors.codec, dim, dtype, open_record, tensors.sealed, arrangement or ROWS_ARRANGEMENT
    )
    record = np.array(numbers, np.int64)
    return NativeSide(
        get_pointer(record), read_refusal, store_refusal, heads, page, dim, dtype, record
    )


def explain_unsupported_rows(codec: Codec, rows: Tensor, name: str) -> str | None:
    """Return why the kernels support no rows of this codec and layout, or None."""
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
    """Return the library's code for the arrangement of a side; None: the library has no code."""
    if tiles is None:
        return ROWS_ARRANGEMENT
    return ARRANGEMENT_CODES[name] if tiles == NATIVE_TILES else None


def make_side_record(
    codec: Codec,
    dim: int,
    dtype: torch.dtype,
    open_record: RecordInts,
    sealed: Fields,
    arrangement_code: int,
) -> RecordInts:
    """Return the record of a side: its format, open pages, sealed fields and codebook."""
    form = codec.form
    assert form is not None
    field_records: list[int] = []
    for field in sealed.values():
        size, strides = field.element_size(), field.stride()
        field_records += (
            field.data_ptr(),
            count_remaining_bytes(field, size),
            strides[0] * size,
            strides[1] * size,
        )
    for _ in range(3 - len(sealed)):  # a side has up to three fields: codes, scale, bias
        field_records += PAGES_STRUCT.null
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
    return (*shape, *open_record, *field_records, *_get_codebook_pointers(form, dim))


def _get_codebook_pointers(form: Form, dim: int) -> RecordInts:
    """Return address and bytes of a codebook's levels, and of the boundaries between them."""
    if form.kind != "codebook":
        return NULL_POINTER * 2
    tables = (_make_float_array(form.bits, dim, f) for f in (compute_levels, compute_boundaries))
    return tuple(n for table in tables for n in (ctypes.addressof(table), ctypes.sizeof(table)))


@lru_cache(maxsize=128)
def _make_float_array(
    bits: int, dim: int, compute: Callable[[int, int], Floats]
) -> ctypes.Array[ctypes.c_float]:
    table = compute(bits, dim)
    return (ctypes.c_float * len(table))(*table)


def get_page_table_pointer(page_table: PageTable) -> RecordInts:
    """Return address and bytes of a page table's record, packed on first use."""
    entry = page_table.derived.get(TABLE_RECORD)
    if entry is None:
        template = page_table.derived_from_tables.get(TABLE_TEMPLATE)
        if template is None:
            template = page_table.derived_from_tables[TABLE_TEMPLATE] = _make_template(page_table)
        record, numbers = template.copy(), np.ascontiguousarray(page_table.numbers)
        record[NUMBERS_POINTER] = numbers.__array_interface__["data"][0], numbers.nbytes
        entry = PointedRecord(get_pointer(record), record, (numbers,))
        page_table.derived[TABLE_RECORD] = entry
    return entry.pointer


def get_page_table_record(page_table: PageTable) -> Ints:
    """Return a page table's record."""
    get_page_table_pointer(page_table)
    return page_table.derived[TABLE_RECORD].record


def _make_template(page_table: PageTable) -> Ints:
    """Return the record of a page table without its numbers, which change with each token."""
    group, paging = page_table.layer_group, page_table.layer_group.paging
    tail, count = -1 if paging.tail is None else paging.tail, len(page_table.numbers)
    return np.array(
        (
            *(count, paging.page, tail, paging.dense_until, group.sinks, *NULL_POINTER),
            *_make_table_record(page_table.sealed_table),
            *_make_table_record(page_table.open_table),
        ),
        np.int64,
    )


def _make_table_record(table: Ints) -> RecordInts:
    """Return address, bytes, row stride and width of a table whose rows are contiguous."""
    batch, width = table.shape
    stride = table.strides[0] // 8 if batch > 1 else width
    address = table.__array_interface__["data"][0] if table.size else 0
    return address, 8 * ((batch - 1) * stride + width) if table.size else 0, stride, width


def get_plan_pointer(plan: AppendPlan) -> RecordInts:
    """Return address and bytes of a plan's record of copies, writes and seals."""
    entry = plan.derived.get(PLAN_RECORD)
    if entry is None:
        parts = [np.ascontiguousarray(p) for p in (plan.copies, plan.writes, plan.seals)]
        record = np.array(make_plan_record(*parts), np.int64)
        entry = PointedRecord(get_pointer(record), record, parts)
        plan.derived[PLAN_RECORD] = entry
    return entry.pointer


def make_plan_record(*parts: Ints) -> RecordInts:
    """Return address, bytes and count of the copies, the writes and the seals."""
    return tuple(n for part in parts for n in (*get_pointer(part), len(part)))


def get_pointer(array: Ints) -> RecordInts:
    """Return address and bytes of a contiguous array."""
    return (array.__array_interface__["data"][0], array.nbytes) if array.size else NULL_POINTER
