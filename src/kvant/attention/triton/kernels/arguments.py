"""What kernels are given, as tuples; what is marked constexpr is compiled in."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

RAW, AFFINE, CODEBOOK = (tl.constexpr(kind) for kind in range(3))
FLOAT16_MAX = tl.constexpr(65504.0)  # of a float16
# Where sequences are: a row for each of these numbers, then the slots of its sealed pages and those
# of its open ones, by page number. The first six are those of an extent.
LENGTH, PADDING, FIRST_SEALED, STOP_SEALED, FIRST_OPEN, FIRST_VISIBLE, MAX_LENGTH = (
    tl.constexpr(n) for n in range(7)
)
NUM_SEQUENCE_NUMBERS = tl.constexpr(7)


class CodeLayout(NamedTuple):
    """How the values of a sealed row lie: the codes of a plane are `units` x `each` bytes.

    Both are powers of two, so there may be more than the `width` bytes that are there. Values come
    out in the order of these bytes, and within a byte from the lowest bits up (see `channels`), or
    as words give them (see `order`).
    """

    kind: tl.constexpr
    bits: tl.constexpr
    width: tl.constexpr  # bytes of the first plane of a row; values, where rows are raw
    stride: tl.constexpr  # the same of all planes: from one row to the next
    num_units: tl.constexpr
    unit_bytes: tl.constexpr
    values_per_byte: tl.constexpr  # values that a byte of the first plane holds
    interleave_block: tl.constexpr  # channels that are interleaved
    num_groups: tl.constexpr  # scales a row
    groups_per_unit: tl.constexpr  # of these in a unit
    dot_dtype: tl.constexpr  # the type that matrix products take
    by_words: tl.constexpr  # is it read by words of 32 bits?
    polynomial: tuple[
        Any, ...
    ]  # of a codebook: what makes x of twice a code, then a polynomial of x


class SealedFields(NamedTuple):
    """The fields of sealed pages, [slots, H, P, ...], and their first two strides."""

    codes: Any
    scale: Any
    bias: Any
    levels: Any  # of a codebook, one behind the other
    codes_slot_stride: int
    codes_head_stride: int
    scale_slot_stride: int
    scale_head_stride: int


class DenseRows(NamedTuple):
    """Dense rows: those of sequences, [B, H, n, dim], or those of pages, [slots, H, P, dim]."""

    data: Any
    outer_stride: int
    head_stride: int
    row_stride: int


class SideArgs(NamedTuple):
    """The keys, or the values."""

    layout: CodeLayout
    dim: tl.constexpr
    padded_dim: tl.constexpr  # the power of two that holds dim
    dot_dtype: tl.constexpr  # the type that matrix products with dense rows take
    sealed: SealedFields
    open: DenseRows
    new_rows: DenseRows  # where rows came with the forward itself


class CopyArgs(NamedTuple):
    """Where rows of one side go: from open pages, or from where they came, into pages."""

    target: DenseRows
    open: DenseRows
    new_rows: DenseRows
    dim: tl.constexpr
    padded_dim: tl.constexpr
    aligned: tl.constexpr  # do all rows begin at multiples of 16 bytes?


class VisibilityArgs(NamedTuple):
    """What a query sees: the mask, when a page is seen sealed, how many sinks lie apart."""

    causal: tl.constexpr
    has_window: tl.constexpr
    window: int
    mask_sinks: int
    has_chunk: tl.constexpr
    chunk: int
    page: tl.constexpr
    tail: int  # below zero: pages never fall due
    dense_until: int
    layer_sinks: int
    new_rows_dense: tl.constexpr  # are own rows dense to all queries?


class QueryArgs(NamedTuple):
    """Queries [B, H * group, T, dim], and what becomes of their scores."""

    rows: DenseRows
    heads: tl.constexpr  # of keys
    group: tl.constexpr
    split_queries: tl.constexpr  # are they wider than the dense rows?
    query_scale: float  # what queries are multiplied by, a power of two,
    score_scale: float  # and what their scores are, which makes the scale
    has_softcap: tl.constexpr
    softcap: float


class PartialOutputs(NamedTuple):
    """What each range of rows gives: weighted sums, maxima (of scores to base 2), totals."""

    out: Any  # [ranges, B, H * group, T, dim]
    max_scores: Any  # [ranges, B, H * group, T]
    weight_sums: Any


class KernelSequence(NamedTuple):
    """Where the sequence of a program is: made inside of a kernel, as is `Tile`."""

    length: Any
    new_from: Any  # from this position on rows are read where they came,
    new_rows_start: Any  # the first column of which is this one, or padding below zero
    first_visible: Any  # nobody sees a position before this one
    first_query: Any  # the positions of the first query
    last_query: Any  # and of the last one
    first_sealed: Any  # pages
    stop_sealed: Any
    dense_from: Any  # the position from which on dense rows are read
    sealed: Any  # tables
    open: Any


class QueryTile(NamedTuple):
    """The queries of one program, all of one key head."""

    batch_index: Any
    head: Any
    row_pointers: Any  # where the queries lie, [M]
    valid: Any
    positions: Any  # position, below zero where it is padding
    first_position: Any  # of these positions
    last_position: Any
    lowest_row: Any  # nobody sees a row below, but for sinks
    dense_from: Any  # the seam of each
