"""What kernels are given, as tuples; what is marked constexpr is compiled in."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

RAW, AFFINE, CODEBOOK = (tl.constexpr(kind) for kind in range(3))
LARGEST = tl.constexpr(65504.0)  # of a float16
# Where sequences are: a row for each of these numbers, then the slots of its sealed pages and those
# of its open ones, by page number. The first six are those of an extent.
LENGTH, PADDING, FIRST_SEALED, STOP_SEALED, FIRST_OPEN, BEGINS, MOST = (
    tl.constexpr(n) for n in range(7)
)
NUMBERS = tl.constexpr(7)


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
    """Dense rows: those of sequences, [B, H, n, dim], or those of pages, [slots, H, P, dim]."""

    data: Any
    first: int
    head: int
    row: int


class Side(NamedTuple):
    """The keys, or the values."""

    form: Form
    dim: tl.constexpr
    wide: tl.constexpr  # the power of two that holds dim
    dot: tl.constexpr  # the type that matrix products with dense rows take
    pages: Pages
    open: Rows
    own: Rows  # where rows came with the forward itself


class Way(NamedTuple):
    """Where rows of one side go: from open pages, or from where they came, into pages."""

    to: Rows
    open: Rows
    own: Rows
    dim: tl.constexpr
    wide: tl.constexpr
    aligned: tl.constexpr  # do all rows begin at multiples of 16 bytes?


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
    dense: tl.constexpr  # are own rows dense to all queries?


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
    """What each range of rows gives: weighted sums, maxima (of scores to base 2), totals."""

    out: Any  # [ranges, B, H * group, T, dim]
    top: Any  # [ranges, B, H * group, T]
    total: Any


class Extent(NamedTuple):
    """Where the sequence of a program is: made inside of a kernel, as is `Tile`."""

    length: Any
    came: Any  # from this position on rows are read where they came,
    column: Any  # the first column of which is this one, or padding below zero
    begins: Any  # nobody sees a position before this one
    oldest: Any  # the positions of the first query
    newest: Any  # and of the last one
    first_sealed: Any  # pages
    stop_sealed: Any
    dense_from: Any  # the position from which on dense rows are read
    sealed: Any  # tables
    open: Any


class Tile(NamedTuple):
    """The queries of one program, all of one key head."""

    b: Any
    head: Any
    rows: Any  # where the queries lie, [M]
    there: Any
    query: Any  # position, below zero where it is padding
    first: Any  # of these positions
    last: Any
    low: Any  # nobody sees a row below, but for sinks
    border: Any  # the seam of each
