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

from kvant.codecs.codebook import levels
from kvant.codecs.packing import BLOCK, PLANES
from kvant.contracts import Codec, Fields, Form
from kvant.extent import LENGTH, PADDING, Change, Extent, Ints, Kind
from kvant.modes import no_inference_mode

MAX_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of rows and queries
# The kinds of forms that kernels know: how many bits, and the fields of a sealed page.
BITS = {"raw": (0,), "affine": (8, 4), "codebook": (4, 3, 2)}
FIELDS = {"raw": ("rows",), "affine": ("codes", "scale", "bias"), "codebook": ("codes", "scale")}


@dataclass(frozen=True)
class Half:
    """The keys, or the values: what they mean, and where they lie."""

    form: Form
    open: Tensor  # [slots, H, P, D]
    sealed: Fields
    own: Tensor | None = None  # [B, H, T, D]: rows that are read where they came


def known(codec: Codec) -> Form:
    """The form of a codec that the kernels read."""
    assert codec.form is not None
    return codec.form


def unread(codec: Codec) -> str | None:
    """Why the kernels do not read this codec."""
    form, name = codec.form, type(codec).__name__
    if form is None or form.kind not in BITS:
        return name
    return None if form.bits in BITS[form.kind] else f"{name} of {form.bits} bits"


def laid(name: str, rows: Tensor) -> str | None:
    """Why the values of these rows cannot be loaded."""
    if rows.dtype not in DTYPES:
        return f"{name} of {rows.dtype}"
    if rows.stride(3) != 1:
        return f"{name} with a stride of {rows.stride(3)} from channel to channel: 1 is needed"
    return None


def aligned(rows: Tensor) -> bool:
    """Do all rows begin at multiples of 16 bytes?"""
    size = rows.element_size()
    steps = [n for n, many in zip(rows.stride()[:-1], rows.shape[:-1], strict=True) if many > 1]
    return rows.data_ptr() % 16 == 0 and all(step * size % 16 == 0 for step in steps)


def beside(rows: Tensor) -> Tensor:
    """The channels of a row side by side, and rows where kernels load 16 bytes at a time."""
    if rows.stride(-1) == 1 and (aligned(rows) or rows.shape[-1] * rows.element_size() % 16):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


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


def dot_type(dtype: torch.dtype, interpreted: bool) -> Any:
    """In which rows of a dtype are multiplied; the interpreter takes bfloat16 for integers."""
    from triton import language as tl

    known = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return known[torch.float32 if interpreted and dtype == torch.bfloat16 else dtype]


@lru_cache(maxsize=256)
def beginning(form: Form, dim: int, dtype: torch.dtype, interpreted: bool) -> tuple[Any, ...]:
    """What a `Side` begins with: the same at every launch."""
    made, dot = _form(form, dim, dtype, interpreted), dot_type(dtype, interpreted)
    return made, *map(constant, (dim, power(dim), dot))


def _form(form: Form, dim: int, dtype: torch.dtype, interpreted: bool) -> Any:
    from triton import language as tl

    from kvant.attention.triton.kernels.records import AFFINE, CODEBOOK, RAW

    dot, kind, groups, spread = dot_type(dtype, interpreted), RAW, 1, 1
    bits, width, stride, units, each = 8, dim, dim, 1, power(dim)
    parts = block = 1
    if form.kind != "raw":
        # Sixteen bits hold what is decoded best as a float16, whatever the rows are.
        dot = tl.float32 if dtype == torch.float32 else tl.float16
        bits, block = form.bits, gcd(dim, BLOCK)
        parts = 8 // PLANES[bits][0][0]
        width, stride = dim // parts, dim * bits // 8
        kind, each = CODEBOOK, power(width)
    if form.kind == "affine":
        # All bytes of a unit have their first parts in one group, and their second ones.
        kind, unit = AFFINE, max(form.group, block if parts > 1 else 1)
        groups, spread = -(-dim // form.group), unit // form.group
        units, each = power(-(-dim // unit)), unit // parts
    numbers = (bits, width, stride, units, each, parts, block, groups, spread)
    # A group may end inside of a word, and so may the second plane of 3 bits.
    words = kind is not RAW and dot == tl.float16 and spread == 1 and units * each == width
    words = words and each % (8 if bits == 3 else 4) == 0
    found = tuple(map(constant, curve(bits, dim) if kind is CODEBOOK else ()))
    return records().Form._make((*map(constant, (kind.value, *numbers, dot, words)), found))


def pages(half: Half) -> Any:
    """The `View` of a side; it may have none."""
    if not half.sealed:
        return records().Pages(*(half.open,) * 4, 0, 0, 0, 0)
    codes, *others = (half.sealed[name] for name in FIELDS[half.form.kind])
    scale = others[0] if others else codes
    found = bias = others[-1] if others else codes
    if half.form.kind == "codebook":
        # Loads of 16 bits are left alone by Triton's pipelining, which sends wider ones elsewhere.
        dtype = torch.float32 if half.open.dtype == torch.float32 else torch.float16
        found = table(half.form.bits, half.open.shape[3], dtype, codes.device)
    return records().Pages(codes, scale, bias, found, *codes.stride()[:2], *scale.stride()[:2])


@lru_cache(maxsize=64)
def table(bits: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The levels of a codebook, as float32 has them."""
    with no_inference_mode():
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

    from kvant.attention.triton.kernels.records import CODEBOOK

    width, block = dim // 8, gcd(dim, BLOCK)
    numbers = (1, width, dim * 3 // 8, 1, power(width), 8, block, 1, 1)
    return records().Form._make((*map(constant, (CODEBOOK.value, *numbers, tl.float32, False)), ()))


def rows(tensor: Tensor) -> Any:
    """The `Rows` of sequences or of pages."""
    return records().Rows(tensor, *tensor.stride()[:3])


def power(n: int) -> int:
    """The power of two that holds n."""
    return 1 << (n - 1).bit_length()


NUMBERS = 7


@dataclass(eq=False)
class Place:
    """The integers of an extent on a device."""

    rows: Tensor  # [B, NUMBERS + sealed pages + open pages]
    open_at: int  # where the table of open pages begins
    stored: int  # sealed rows of the sequence that has most
    opened: int  # and rows in open pages

    @classmethod
    def of(cls, extent: Extent, device: torch.device) -> Place:
        """Made once an extent, for all its layers."""
        key = ("place", device)
        found: Place | None = extent.memo.get(key)
        if found is None:
            page = extent.kind.page
            stored = int((extent.stop_sealed - extent.first_sealed).max(initial=0)) * page
            opened = int((extent.rows - extent.first_open * page).max(initial=0))
            widths = _widths(extent)
            rows = torch.from_numpy(_laid(extent, widths)).to(device)
            found = extent.memo[key] = cls(rows, NUMBERS + widths[0], stored, opened)
        return found


class MovingPlace(Place):
    """A place that goes on from token to token, and stays where it lies in memory."""

    def __init__(self, change: Change, device: torch.device) -> None:
        """With room for the capacity, or twice the tokens that there are."""
        extent = change.during
        kind = extent.kind
        tokens = kind.capacity or 2 * int(extent.rows.max(initial=0)) + kind.page
        pages = -(-tokens // kind.page)
        self.kind, self.tokens = kind, tokens
        self.room = (pages if kind.seals else 0, pages)
        with no_inference_mode():
            rows = torch.zeros(
                extent.tables, NUMBERS + sum(self.room), dtype=torch.int64, device=device
            )
        super().__init__(rows, NUMBERS + self.room[0], *_most(kind, tokens))
        followed = self.follow(change)
        assert followed

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, [B]."""
        return self.rows[:, LENGTH]

    @property
    def columns(self) -> Tensor:
        """Tokens of the longest sequence, its padding included."""
        return (self.rows[:, LENGTH] + self.rows[:, PADDING]).amax()

    def advance(self) -> None:
        """One more token of each, which changes nothing else."""
        self.lengths.add_(1)

    def follow(self, change: Change) -> bool:
        """Be where these sequences are; False where they are others, or there is no room."""
        extent = change.during
        widths = _widths(extent)
        same = extent.tables == len(self.rows) and extent.kind == self.kind
        if not same or widths[0] > self.room[0] or widths[1] > self.room[1]:
            return False
        self.rows.copy_(torch.from_numpy(_laid(extent, self.room)))
        return True


def _widths(extent: Extent) -> tuple[int, int]:
    """How many pages the tables say something of: one open page at least, whatever it is."""
    sealed = int(extent.stop_sealed.max(initial=0)) if extent.kind.seals else 0
    return sealed, int(extent.stop_open.max(initial=1))


def _laid(extent: Extent, widths: tuple[int, int]) -> Ints:
    flat = np.zeros((extent.tables, NUMBERS + sum(widths)), np.int64)
    flat[:, : NUMBERS - 1] = extent.numbers[:, : NUMBERS - 1]  # those that kernels read
    flat[:, NUMBERS - 1] = extent.lengths + extent.calm
    place = NUMBERS
    for table, width in zip((extent.sealed, extent.open), widths, strict=True):
        there = min(width, table.shape[1])
        flat[:, place : place + there] = table[:, :there]
        place += width
    return flat


def _most(kind: Kind, tokens: int) -> tuple[int, int]:
    """About how many sealed rows and open ones a sequence has, once it has so many tokens."""
    kept = tokens if kind.window is None else min(tokens, kind.window + kind.slack + kind.page)
    if kind.paging.tail is None:
        return 0, kept
    late = max(kind.paging.tail + kind.page, kind.paging.dense_until)
    return kept, min(kept, late + kind.slack)
