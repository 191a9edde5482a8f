"""What kernels are given, as tuples; what is marked constexpr is compiled in."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

RAW, AFFINE, CODEBOOK = (tl.constexpr(kind) for kind in range(3))
LARGEST = tl.constexpr(65504.0)  # of a float16
COLUMNS, MOST, FIRST_PAGE, FIRST_COLUMN = (tl.constexpr(n) for n in range(4))  # of a place


class Form(NamedTuple):
    """How the values of a sealed row lie: the codes of a plane are `units` x `each` bytes.

    Both are powers of two, so there may be more than the `width` bytes that are there. Values come
    out in the order of these bytes, and within a byte from the lowest bits up (see `channels`), or
    as words give them (see `order`).
    """

    kind: tl.constexpr
    bits: tl.constexpr
    width: tl.constexpr  # bytes of the first plane of a row; values, where rows are raw
    stride: tl.constexpr  # the same of all planes: from one row to the next
    units: tl.constexpr
    each: tl.constexpr
    parts: tl.constexpr  # values that a byte of the first plane holds
    block: tl.constexpr  # channels that are interleaved
    groups: tl.constexpr  # scales a row
    spread: tl.constexpr  # of these in a unit
    dot: tl.constexpr  # the type that matrix products take
    words: tl.constexpr  # is it read by words of 32 bits?
    curve: tuple[Any, ...]  # of a codebook: what makes x of twice a code, then a polynomial of x


class Pages(NamedTuple):
    """The fields of sealed pages, [slots, H, P, ...], and their first two strides."""

    codes: Any
    scale: Any
    bias: Any
    levels: Any  # of a codebook, one behind the other
    codes_slot: int
    codes_head: int
    scale_slot: int
    scale_head: int


class Rows(NamedTuple):
    """Dense rows [B, H, n, dim]."""

    data: Any
    batch: int
    head: int
    row: int


class Paged(NamedTuple):
    """Dense rows by pages, [B, n, H, P, dim]."""

    data: Any
    batch: int
    page: int
    head: int
    row: int


class Side(NamedTuple):
    """The keys, or the values."""

    form: Form
    dim: tl.constexpr
    wide: tl.constexpr  # the power of two that holds dim
    dot: tl.constexpr  # the type that matrix products with dense rows take
    pages: Pages
    room: Rows
    sinks: Rows


class Rule(NamedTuple):
    """What a query sees: the mask, when a page is seen sealed, how many sinks lie apart."""

    causal: tl.constexpr
    windowed: tl.constexpr
    window: int
    sinks: int
    chunked: tl.constexpr
    chunk: int
    page: tl.constexpr
    tail: int  # below zero: pages never fall due
    dense_until: int
    kept: int


class Asked(NamedTuple):
    """Queries [B, H * group, T, dim], and what becomes of their scores."""

    rows: Rows
    heads: tl.constexpr  # of keys
    group: tl.constexpr
    split: tl.constexpr  # are they wider than the dense rows?
    before: float  # what queries are multiplied by, a power of two,
    after: float  # and what their scores are, which makes the scale
    capped: tl.constexpr
    cap: float


class Partial(NamedTuple):
    """What each range of columns gives: weighted sums, maxima (of scores to base 2), totals."""

    out: Any  # [ranges, B, H * group, T, dim]
    top: Any  # [ranges, B, H * group, T]
    total: Any


class Extent(NamedTuple):
    """Which columns there are, and where they lie: made inside of a kernel, as is `Tile`."""

    columns: Any
    oldest: Any  # column of the first query
    first_page: Any
    num_pages: Any
    dense_from: Any
    slot: Any
    own_from: Any


class Tile(NamedTuple):
    """The queries of one program, all of one key head."""

    b: Any
    head: Any
    start: Any  # padding of the sequence
    rows: Any  # where the queries lie, [M]
    there: Any
    query: Any  # column
    first: Any  # of these columns
    last: Any
    low: Any  # nobody sees a row below, but for sinks
    border: Any  # the seam of each
