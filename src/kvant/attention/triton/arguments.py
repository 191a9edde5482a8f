"""Build the kernels' arguments: the storage of each side, new rows, and page tables.

A page table on the device has one row of integers per sequence (or per key head):

    | 7 sequence numbers | slots of sealed pages | slots of open pages |
    0                    7                       open_offset
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.codecs.codebook import compute_levels
from kvant.codecs.packing import BIT_PLANES, INTERLEAVE_BLOCK
from kvant.contracts import Codec, Fields, Form
from kvant.lazy import Memo
from kvant.page_table import LENGTH, AppendPlan, Ints, LayerGroup, PageTable
from kvant.platform.torch_runtime import no_inference_mode

MAX_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of rows and queries
SUPPORTED_BITS = {"raw": (0,), "affine": (8, 4), "codebook": (4, 3, 2)}  # by form kind
SEALED_FIELDS = {  # of a page, by form kind
    "raw": ("rows",),
    "affine": ("codes", "scale", "bias"),
    "codebook": ("codes", "scale"),
}


@dataclass(frozen=True)
class TritonSide:
    """The keys or the values of a layer: their format and their tensors."""

    form: Form
    open: Tensor  # [slots, H, P, D]
    sealed: Fields
    new_rows: Tensor | None = None  # [B, H, T, D]: rows of the forward, not read from pages


def get_form(codec: Codec) -> Form:
    """Return the form of a codec that the kernels support."""
    assert codec.form is not None
    return codec.form


def explain_unsupported_codec(codec: Codec) -> str | None:
    """Return why the kernels do not read this codec, or None."""
    form, name = codec.form, type(codec).__name__
    if form is None or form.kind not in SUPPORTED_BITS:
        return name
    return None if form.bits in SUPPORTED_BITS[form.kind] else f"{name} of {form.bits} bits"


def explain_unloadable_rows(name: str, rows: Tensor) -> str | None:
    """Return why the kernels cannot load these rows, or None."""
    if rows.dtype not in DTYPES:
        return f"{name} of {rows.dtype}"
    if rows.stride(3) != 1:
        return f"{name} with a stride of {rows.stride(3)} from channel to channel: 1 is needed"
    return None


def is_aligned(rows: Tensor) -> bool:
    """Tell whether every row begins at a multiple of 16 bytes."""
    size = rows.element_size()
    steps = [n for n, count in zip(rows.stride()[:-1], rows.shape[:-1], strict=True) if count > 1]
    return rows.data_ptr() % 16 == 0 and all(step * size % 16 == 0 for step in steps)


def align_rows(rows: Tensor) -> Tensor:
    """Return rows with contiguous channels, at multiples of 16 bytes; copy them if needed."""
    if rows.stride(-1) == 1 and (is_aligned(rows) or rows.shape[-1] * rows.element_size() % 16):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1)
def import_kernel_records() -> Any:
    """Import the records of the kernels' arguments, and Triton with them, on first use."""
    from kvant.attention.triton.kernels import arguments

    return arguments


@lru_cache(maxsize=1024, typed=True)
def make_constexpr(value: Hashable) -> Any:
    """Return a constexpr of `value`, cached since Triton compares them at every launch."""
    from triton import language as tl

    return tl.constexpr(value)


def get_dot_dtype(dtype: torch.dtype, interpreted: bool) -> Any:
    """Return the dtype for matrix products of rows; the interpreter lacks bfloat16 products."""
    from triton import language as tl

    types = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return types[torch.float32 if interpreted and dtype == torch.bfloat16 else dtype]


@lru_cache(maxsize=256)
def make_side_constants(
    form: Form, dim: int, dtype: torch.dtype, interpreted: bool
) -> tuple[Any, ...]:
    """Return the first fields of `SideArgs`, which are equal at every launch."""
    layout = _make_code_layout(form, dim, dtype, interpreted)
    dot = get_dot_dtype(dtype, interpreted)
    return layout, *map(make_constexpr, (dim, next_power_of_2(dim), dot))


def _make_code_layout(form: Form, dim: int, dtype: torch.dtype, interpreted: bool) -> Any:
    from triton import language as tl

    from kvant.attention.triton.kernels.arguments import AFFINE, CODEBOOK, RAW

    dot, kind, groups, groups_per_unit = get_dot_dtype(dtype, interpreted), RAW, 1, 1
    bits, width, stride, units, unit_bytes = 8, dim, dim, 1, next_power_of_2(dim)
    parts = block = 1
    if form.kind != "raw":
        # Of the 16-bit types, float16 rounds decoded values least, even for bfloat16 rows.
        dot = tl.float32 if dtype == torch.float32 else tl.float16
        bits, block = form.bits, gcd(dim, INTERLEAVE_BLOCK)
        parts = 8 // BIT_PLANES[bits][0][0]
        width, stride = dim // parts, dim * bits // 8
        kind, unit_bytes = CODEBOOK, next_power_of_2(width)
    if form.kind == "affine":
        # In a unit, the first codes of all bytes belong to one group, and so do the second codes.
        kind, unit = AFFINE, max(form.group, block if parts > 1 else 1)
        groups, groups_per_unit = -(-dim // form.group), unit // form.group
        units, unit_bytes = next_power_of_2(-(-dim // unit)), unit // parts
    numbers = (bits, width, stride, units, unit_bytes, parts, block, groups, groups_per_unit)
    # Words of 32 bits need groups, and the second plane of 3 bits, that end at word boundaries.
    by_words = kind is not RAW and dot == tl.float16 and groups_per_unit == 1
    by_words = by_words and units * unit_bytes == width
    by_words = by_words and unit_bytes % (8 if bits == 3 else 4) == 0
    polynomial = fit_level_polynomial(bits, dim) if kind is CODEBOOK else ()
    return import_kernel_records().CodeLayout._make(
        (
            *map(make_constexpr, (kind.value, *numbers, dot, by_words)),
            tuple(map(make_constexpr, polynomial)),
        )
    )


def make_sealed_fields(side: TritonSide) -> Any:
    """Return the `SealedFields` of a side; placeholders if it has no sealed pages."""
    if not side.sealed:
        return import_kernel_records().SealedFields(*(side.open,) * 4, 0, 0, 0, 0)
    codes, *others = (side.sealed[name] for name in SEALED_FIELDS[side.form.kind])
    scale = others[0] if others else codes
    levels = bias = others[-1] if others else codes
    if side.form.kind == "codebook":
        # Triton's pipelining moves wider loads to shared memory and leaves 16-bit ones alone.
        dtype = torch.float32 if side.open.dtype == torch.float32 else torch.float16
        levels = make_level_table(side.form.bits, side.open.shape[3], dtype, codes.device)
    return import_kernel_records().SealedFields(
        codes, scale, bias, levels, *codes.stride()[:2], *scale.stride()[:2]
    )


@lru_cache(maxsize=64)
def make_level_table(bits: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the levels of a codebook, rounded to float32 before `dtype`."""
    with no_inference_mode():
        return torch.tensor(compute_levels(bits, dim).astype(np.float32), device=device).to(dtype)


def fit_level_polynomial(bits: int, dim: int) -> tuple[float, ...]:
    """Return (a, b, c_n, ..., c_1) with level(code) = c_n x^n + ... + c_1 x, x = a (2 code) - b.

    The polynomial is odd in x = (2 code + 1) / 2^bits - 1. Its error is less than half of the last
    bit of a float16; a and b are exact.
    """
    levels, step = compute_levels(bits, dim), 0.5**bits
    x = (2 * np.arange(len(levels)) + 1) * step - 1
    powers = np.stack([x**power for power in range(1, min(10, len(levels)), 2)], 1)
    coefficients, *_ = np.linalg.lstsq(powers / levels[:, None], np.ones(len(levels)), rcond=None)
    return step, 1 - step, *coefficients[::-1].tolist()


@lru_cache(maxsize=16)
def make_third_bit_layout(dim: int) -> Any:
    """Return the `CodeLayout` of the plane that holds the third of 3 bits."""
    from triton import language as tl

    from kvant.attention.triton.kernels.arguments import CODEBOOK

    width, block = dim // 8, gcd(dim, INTERLEAVE_BLOCK)
    numbers = (1, width, dim * 3 // 8, 1, next_power_of_2(width), 8, block, 1, 1)
    return import_kernel_records().CodeLayout._make(
        (*map(make_constexpr, (CODEBOOK.value, *numbers, tl.float32, False)), ())
    )


def make_dense_rows(tensor: Tensor) -> Any:
    """Return the `DenseRows` of sequences or of pages."""
    return import_kernel_records().DenseRows(tensor, *tensor.stride()[:3])


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


FIRST_SINK, MAX_LENGTH, NUM_SEQUENCE_NUMBERS = 1, 6, 7  # as in kernels/arguments.py


@dataclass(eq=False)
class TritonPageTable:
    """A page table as one tensor of integers on a device, with upper bounds for launches."""

    integers: Tensor  # [B, NUM_SEQUENCE_NUMBERS + sealed pages + open pages]
    open_offset: int  # column at which the slots of open pages begin
    max_sealed_rows: int  # largest number of sealed rows of a sequence
    max_open_rows: int  # and of rows in open pages

    @classmethod
    def from_page_table(cls, page_table: PageTable, device: torch.device) -> TritonPageTable:
        """Copy a page table to the device, once for all layers that share it."""
        tables = page_table.derived.setdefault(DEVICE_TABLES, {})
        table = tables.get(device)
        if table is None:
            page = page_table.layer_group.page
            num_sealed = int((page_table.stop_sealed - page_table.first_sealed).max(initial=0))
            open_rows = int((page_table.seq_lens - page_table.first_open * page).max(initial=0))
            widths = _get_table_widths(page_table)
            integers = torch.from_numpy(_flatten_page_table(page_table, widths)).to(device)
            table = tables[device] = cls(
                integers, NUM_SEQUENCE_NUMBERS + widths[0], num_sealed * page, open_rows
            )
        return table


DEVICE_TABLES: Memo[dict[torch.device, TritonPageTable]] = Memo("tables on devices")


class StaticTritonPageTable(TritonPageTable):
    """A page table at a fixed address that is updated in place from token to token."""

    num_new = 1  # tokens of each sequence in a forward

    def __init__(self, plan: AppendPlan, device: torch.device) -> None:
        """Allocate room for the layers' capacity, or for twice the present tokens."""
        page_table = plan.read_table
        layer_group = page_table.layer_group
        capacity = (
            layer_group.capacity or 2 * int(page_table.seq_lens.max(initial=0)) + layer_group.page
        )
        pages = -(-capacity // layer_group.page)
        self.layer_group, self.capacity = layer_group, capacity
        self.table_widths = (pages if layer_group.seals else 0, pages)
        with no_inference_mode():
            integers = torch.zeros(
                page_table.num_tables,
                NUM_SEQUENCE_NUMBERS + sum(self.table_widths),
                dtype=torch.int64,
                device=device,
            )
        super().__init__(
            integers,
            NUM_SEQUENCE_NUMBERS + self.table_widths[0],
            *_estimate_max_rows(layer_group, capacity),
        )
        updated = self.update(plan)
        assert updated

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, [B]."""
        return self.integers[:, LENGTH]

    @property
    def columns(self) -> Tensor:
        """Tokens of the longest sequence."""
        return self.lengths.amax()

    def advance(self) -> None:
        """Advance every sequence by one token that needs no new page and seals none."""
        self.lengths.add_(1)

    def update(self, plan: AppendPlan) -> bool:
        """Copy the plan's page table; return False for other sequences, or if it does not fit."""
        source = plan.read_table
        widths = _get_table_widths(source)
        same = source.num_tables == len(self.integers) and source.layer_group == self.layer_group
        if not same or widths[0] > self.table_widths[0] or widths[1] > self.table_widths[1]:
            return False
        self.integers.copy_(torch.from_numpy(_flatten_page_table(source, self.table_widths)))
        return True


def _get_table_widths(page_table: PageTable) -> tuple[int, int]:
    """Return how many sealed and open page numbers the tables cover; at least one open page."""
    sealed = int(page_table.stop_sealed.max(initial=0)) if page_table.layer_group.seals else 0
    return sealed, int(page_table.stop_open.max(initial=1))


def _flatten_page_table(page_table: PageTable, widths: tuple[int, int]) -> Ints:
    flat = np.zeros((page_table.num_tables, NUM_SEQUENCE_NUMBERS + sum(widths)), np.int64)
    # The last number of a sequence is the length up to which kernels may count, not PRUNED_AT.
    flat[:, :MAX_LENGTH] = page_table.numbers[:, :MAX_LENGTH]
    flat[:, MAX_LENGTH] = page_table.lengths + page_table.steady_tokens
    # Kernels need no padding, but the first visible sink.
    flat[:, FIRST_SINK] = page_table.first_visible * page_table.leading_rows_masked
    column = NUM_SEQUENCE_NUMBERS
    for table, width in zip((page_table.sealed_table, page_table.open_table), widths, strict=True):
        count = min(width, table.shape[1])
        flat[:, column : column + count] = table[:, :count]
        column += width
    return flat


def _estimate_max_rows(layer_group: LayerGroup, num_tokens: int) -> tuple[int, int]:
    """Estimate the sealed rows and the open rows of a sequence of `num_tokens` tokens."""
    retained = num_tokens
    if layer_group.window is not None:
        retained = min(retained, layer_group.window + layer_group.slack + layer_group.page)
    if layer_group.paging.tail is None:
        return 0, retained
    dense = max(layer_group.paging.tail + layer_group.page, layer_group.paging.dense_until)
    return retained, min(retained, dense + layer_group.slack)
