"""What the kernels read: the bytes of a side, rows beside its pages, and where sequences are."""

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
from kvant.page_table import LENGTH, PADDING, AppendPlan, Ints, LayerGroup, PageTable
from kvant.torch_modes import no_inference_mode

MAX_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of rows and queries
# The kinds of forms that kernels know: how many bits, and the fields of a sealed page.
SUPPORTED_BITS = {"raw": (0,), "affine": (8, 4), "codebook": (4, 3, 2)}
SEALED_FIELDS = {
    "raw": ("rows",),
    "affine": ("codes", "scale", "bias"),
    "codebook": ("codes", "scale"),
}


@dataclass(frozen=True)
class TritonSide:
    """The keys, or the values: what they mean, and where they lie."""

    form: Form
    open: Tensor  # [slots, H, P, D]
    sealed: Fields
    new_rows: Tensor | None = None  # [B, H, T, D]: rows that are read where they came


def get_form(codec: Codec) -> Form:
    """The form of a codec that the kernels read."""
    assert codec.form is not None
    return codec.form


def explain_unsupported_codec(codec: Codec) -> str | None:
    """Why the kernels do not read this codec."""
    form, name = codec.form, type(codec).__name__
    if form is None or form.kind not in SUPPORTED_BITS:
        return name
    return None if form.bits in SUPPORTED_BITS[form.kind] else f"{name} of {form.bits} bits"


def explain_unloadable_rows(name: str, rows: Tensor) -> str | None:
    """Why the values of these rows cannot be loaded."""
    if rows.dtype not in DTYPES:
        return f"{name} of {rows.dtype}"
    if rows.stride(3) != 1:
        return f"{name} with a stride of {rows.stride(3)} from channel to channel: 1 is needed"
    return None


def is_aligned(rows: Tensor) -> bool:
    """Do all rows begin at multiples of 16 bytes?"""
    size = rows.element_size()
    steps = [n for n, many in zip(rows.stride()[:-1], rows.shape[:-1], strict=True) if many > 1]
    return rows.data_ptr() % 16 == 0 and all(step * size % 16 == 0 for step in steps)


def align_rows(rows: Tensor) -> Tensor:
    """The channels of a row side by side, and rows where kernels load 16 bytes at a time."""
    if rows.stride(-1) == 1 and (is_aligned(rows) or rows.shape[-1] * rows.element_size() % 16):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1)
def import_kernel_records() -> Any:
    """Import the types of the kernels' arguments, which every launch uses."""
    from kvant.attention.triton.kernels import arguments

    return arguments


@lru_cache(maxsize=1024, typed=True)
def make_constexpr(value: Hashable) -> Any:
    """A value that is compiled in: made once, since Triton compares them at every launch."""
    from triton import language as tl

    return tl.constexpr(value)


def get_dot_dtype(dtype: torch.dtype, interpreted: bool) -> Any:
    """In which rows of a dtype are multiplied; the interpreter takes bfloat16 for integers."""
    from triton import language as tl

    known = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return known[torch.float32 if interpreted and dtype == torch.bfloat16 else dtype]


@lru_cache(maxsize=256)
def make_side_constants(
    form: Form, dim: int, dtype: torch.dtype, interpreted: bool
) -> tuple[Any, ...]:
    """What a `Side` begins with: the same at every launch."""
    made, dot = _make_code_layout(form, dim, dtype, interpreted), get_dot_dtype(dtype, interpreted)
    return made, *map(make_constexpr, (dim, next_power_of_2(dim), dot))


def _make_code_layout(form: Form, dim: int, dtype: torch.dtype, interpreted: bool) -> Any:
    from triton import language as tl

    from kvant.attention.triton.kernels.arguments import AFFINE, CODEBOOK, RAW

    dot, kind, groups, spread = get_dot_dtype(dtype, interpreted), RAW, 1, 1
    bits, width, stride, units, each = 8, dim, dim, 1, next_power_of_2(dim)
    parts = block = 1
    if form.kind != "raw":
        # Sixteen bits hold what is decoded best as a float16, whatever the rows are.
        dot = tl.float32 if dtype == torch.float32 else tl.float16
        bits, block = form.bits, gcd(dim, INTERLEAVE_BLOCK)
        parts = 8 // BIT_PLANES[bits][0][0]
        width, stride = dim // parts, dim * bits // 8
        kind, each = CODEBOOK, next_power_of_2(width)
    if form.kind == "affine":
        # All bytes of a unit have their first parts in one group, and their second ones.
        kind, unit = AFFINE, max(form.group, block if parts > 1 else 1)
        groups, spread = -(-dim // form.group), unit // form.group
        units, each = next_power_of_2(-(-dim // unit)), unit // parts
    numbers = (bits, width, stride, units, each, parts, block, groups, spread)
    # A group may end inside of a word, and so may the second plane of 3 bits.
    words = kind is not RAW and dot == tl.float16 and spread == 1 and units * each == width
    words = words and each % (8 if bits == 3 else 4) == 0
    found = tuple(map(make_constexpr, fit_level_polynomial(bits, dim) if kind is CODEBOOK else ()))
    return import_kernel_records().CodeLayout._make(
        (*map(make_constexpr, (kind.value, *numbers, dot, words)), found)
    )


def make_sealed_fields(side: TritonSide) -> Any:
    """The `View` of a side; it may have none."""
    if not side.sealed:
        return import_kernel_records().SealedFields(*(side.open,) * 4, 0, 0, 0, 0)
    codes, *others = (side.sealed[name] for name in SEALED_FIELDS[side.form.kind])
    scale = others[0] if others else codes
    found = bias = others[-1] if others else codes
    if side.form.kind == "codebook":
        # Loads of 16 bits are left alone by Triton's pipelining, which sends wider ones elsewhere.
        dtype = torch.float32 if side.open.dtype == torch.float32 else torch.float16
        found = make_level_table(side.form.bits, side.open.shape[3], dtype, codes.device)
    return import_kernel_records().SealedFields(
        codes, scale, bias, found, *codes.stride()[:2], *scale.stride()[:2]
    )


@lru_cache(maxsize=64)
def make_level_table(bits: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The levels of a codebook, as float32 has them."""
    with no_inference_mode():
        return torch.tensor(compute_levels(bits, dim).astype(np.float32), device=device).to(dtype)


def fit_level_polynomial(bits: int, dim: int) -> tuple[float, ...]:
    """Levels as an odd polynomial of x = (2 code + 1) / 2^bits - 1, from its highest power down.

    It misses less than half of the last bit of a float16. Before it what twice a code is multiplied
    by, and what is taken from that, to be x: both are exact.
    """
    there, step = compute_levels(bits, dim), 0.5**bits
    x = (2 * np.arange(len(there)) + 1) * step - 1
    powers = np.stack([x**power for power in range(1, min(10, len(there)), 2)], 1)
    found, *_ = np.linalg.lstsq(powers / there[:, None], np.ones(len(there)), rcond=None)
    return step, 1 - step, *found[::-1].tolist()


@lru_cache(maxsize=16)
def make_third_bit_layout(dim: int) -> Any:
    """The `Form` of the plane that holds the third of 3 bits."""
    from triton import language as tl

    from kvant.attention.triton.kernels.arguments import CODEBOOK

    width, block = dim // 8, gcd(dim, INTERLEAVE_BLOCK)
    numbers = (1, width, dim * 3 // 8, 1, next_power_of_2(width), 8, block, 1, 1)
    return import_kernel_records().CodeLayout._make(
        (*map(make_constexpr, (CODEBOOK.value, *numbers, tl.float32, False)), ())
    )


def make_dense_rows(tensor: Tensor) -> Any:
    """The `Rows` of sequences or of pages."""
    return import_kernel_records().DenseRows(tensor, *tensor.stride()[:3])


def next_power_of_2(n: int) -> int:
    """The power of two that holds n."""
    return 1 << (n - 1).bit_length()


NUM_SEQUENCE_NUMBERS = 7


@dataclass(eq=False)
class TritonPageTable:
    """The integers of an extent on a device."""

    integers: Tensor  # [B, NUMBERS + sealed pages + open pages]
    open_offset: int  # where the table of open pages begins
    max_sealed_rows: int  # sealed rows of the sequence that has most
    max_open_rows: int  # and rows in open pages

    @classmethod
    def from_page_table(cls, page_table: PageTable, device: torch.device) -> TritonPageTable:
        """Made once an extent, for all its layers."""
        key = ("place", device)
        found: TritonPageTable | None = page_table.derived.get(key)
        if found is None:
            page = page_table.layer_group.page
            stored = int((page_table.stop_sealed - page_table.first_sealed).max(initial=0)) * page
            opened = int((page_table.seq_lens - page_table.first_open * page).max(initial=0))
            widths = _get_table_widths(page_table)
            rows = torch.from_numpy(_flatten_page_table(page_table, widths)).to(device)
            found = page_table.derived[key] = cls(
                rows, NUM_SEQUENCE_NUMBERS + widths[0], stored, opened
            )
        return found


class StaticTritonPageTable(TritonPageTable):
    """A place that goes on from token to token, and stays where it lies in memory."""

    def __init__(self, plan: AppendPlan, device: torch.device) -> None:
        """With room for the capacity, or twice the tokens that there are."""
        extent = plan.read_table
        layer_group = extent.layer_group
        capacity = (
            layer_group.capacity or 2 * int(extent.seq_lens.max(initial=0)) + layer_group.page
        )
        pages = -(-capacity // layer_group.page)
        self.layer_group, self.capacity = layer_group, capacity
        self.table_widths = (pages if layer_group.seals else 0, pages)
        with no_inference_mode():
            rows = torch.zeros(
                extent.num_tables,
                NUM_SEQUENCE_NUMBERS + sum(self.table_widths),
                dtype=torch.int64,
                device=device,
            )
        super().__init__(
            rows,
            NUM_SEQUENCE_NUMBERS + self.table_widths[0],
            *_estimate_max_rows(layer_group, capacity),
        )
        followed = self.update(plan)
        assert followed

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, [B]."""
        return self.integers[:, LENGTH]

    @property
    def columns(self) -> Tensor:
        """Tokens of the longest sequence, its padding included."""
        return (self.integers[:, LENGTH] + self.integers[:, PADDING]).amax()

    def advance(self) -> None:
        """One more token of each, which changes nothing else."""
        self.lengths.add_(1)

    def update(self, plan: AppendPlan) -> bool:
        """Be where these sequences are; False where they are others, or there is no room."""
        extent = plan.read_table
        widths = _get_table_widths(extent)
        same = extent.num_tables == len(self.integers) and extent.layer_group == self.layer_group
        if not same or widths[0] > self.table_widths[0] or widths[1] > self.table_widths[1]:
            return False
        self.integers.copy_(torch.from_numpy(_flatten_page_table(extent, self.table_widths)))
        return True


def _get_table_widths(page_table: PageTable) -> tuple[int, int]:
    """How many pages the tables say something of: one open page at least, whatever it is."""
    sealed = int(page_table.stop_sealed.max(initial=0)) if page_table.layer_group.seals else 0
    return sealed, int(page_table.stop_open.max(initial=1))


def _flatten_page_table(page_table: PageTable, widths: tuple[int, int]) -> Ints:
    flat = np.zeros((page_table.num_tables, NUM_SEQUENCE_NUMBERS + sum(widths)), np.int64)
    flat[:, : NUM_SEQUENCE_NUMBERS - 1] = page_table.numbers[
        :, : NUM_SEQUENCE_NUMBERS - 1
    ]  # those that kernels read
    flat[:, NUM_SEQUENCE_NUMBERS - 1] = page_table.lengths + page_table.steady_tokens
    place = NUM_SEQUENCE_NUMBERS
    for table, width in zip((page_table.sealed_table, page_table.open_table), widths, strict=True):
        there = min(width, table.shape[1])
        flat[:, place : place + there] = table[:, :there]
        place += width
    return flat


def _estimate_max_rows(layer_group: LayerGroup, num_tokens: int) -> tuple[int, int]:
    """About how many sealed rows and open ones a sequence has, once it has so many tokens."""
    kept = (
        num_tokens
        if layer_group.window is None
        else min(num_tokens, layer_group.window + layer_group.slack + layer_group.page)
    )
    if layer_group.paging.tail is None:
        return 0, kept
    late = max(layer_group.paging.tail + layer_group.page, layer_group.paging.dense_until)
    return kept, min(kept, late + layer_group.slack)
