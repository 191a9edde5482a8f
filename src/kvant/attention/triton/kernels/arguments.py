"""Define the kernels' arguments as tuples; fields marked constexpr are compiled in."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

RAW, AFFINE, CODEBOOK = (tl.constexpr(kind) for kind in range(3))
FLOAT16_MAX = tl.constexpr(65504.0)
# A row of the page table: these numbers of a sequence, the slots of its sealed pages by page
# number, then those of its open pages. The first six numbers are those of kvant.page_table, but
# `FIRST_SINK` is in the column of the padding.
LENGTH, FIRST_SINK, FIRST_SEALED, STOP_SEALED, FIRST_OPEN, FIRST_VISIBLE, MAX_LENGTH = (
    tl.constexpr(n) for n in range(7)
)
NUM_SEQUENCE_NUMBERS = tl.constexpr(7)


class CodeLayout(NamedTuple):
    """Layout of the codes of a sealed row: a plane is num_units x unit_bytes bytes.

        plane    | unit 0          | unit 1          | ... | unit num_units - 1 |
        unit     | byte 0 | byte 1 | ...   | byte unit_bytes - 1 |
        byte     | code 0, lowest bits | ... | code values_per_byte - 1 |

    Units and bytes of a unit are powers of two, so a plane may extend beyond the `width` bytes of a
    row. Decoded values have the order of `compute_channels`, or of `compute_word_channels` if they
    are read by words.
    """

    kind: tl.constexpr
    bits: tl.constexpr
    width: tl.constexpr  # bytes of the first plane of a row; for raw rows, values
    stride: tl.constexpr  # bytes of all planes: from one row to the next
    num_units: tl.constexpr
    unit_bytes: tl.constexpr
    values_per_byte: tl.constexpr  # in the first plane
    interleave_block: tl.constexpr  # channels that are interleaved with each other
    num_groups: tl.constexpr  # scales of a row
    groups_per_unit: tl.constexpr
    dot_dtype: tl.constexpr  # operand type of matrix products
    by_words: tl.constexpr  # whether codes are read as words of 32 bits
    polynomial: tuple[Any, ...]  # of a codebook's levels: see fit_level_polynomial


class SealedFields(NamedTuple):
    """The fields of sealed pages, [slots, H, P, ...], and their first two strides."""

    codes: Any
    scale: Any
    bias: Any
    levels: Any  # of a codebook, by code
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
    """The keys or the values of a layer."""

    layout: CodeLayout
    dim: tl.constexpr
    padded_dim: tl.constexpr  # dim rounded up to a power of two
    dot_dtype: tl.constexpr  # operand type of matrix products with dense rows
    sealed: SealedFields
    open: DenseRows
    new_rows: DenseRows  # rows of this forward, if they are not read from pages


class CopyArgs(NamedTuple):
    """A copy of one side's rows into pages, from open pages or from new rows."""

    target: DenseRows
    open: DenseRows
    new_rows: DenseRows
    dim: tl.constexpr
    padded_dim: tl.constexpr
    aligned: tl.constexpr  # whether all rows begin at multiples of 16 bytes


class StoreEntry(NamedTuple):
    """Rows of one page to write: a row of six integers, as the host lists them.

    Source -1 means the new rows of `sequence`, from `column` on:

        | slot | first row | number of rows | source: open slot, or -1 | sequence | column |
    """

    slot: Any
    row: Any
    num_rows: Any
    source: Any
    sequence: Any
    column: Any


class SealArgs(NamedTuple):
    """Where and how to seal the pages of one side."""

    fields: SealedFields
    boundaries: Any  # between the codes of a codebook
    layout: CodeLayout
    third_layout: CodeLayout  # of the plane that holds the third of 3 bits
    page: tl.constexpr
    dim: tl.constexpr
    corrected: tl.constexpr
    rows: tl.constexpr  # sealed by one program


class VisibilityArgs(NamedTuple):
    """The rule of what a query sees: the mask, when pages fall due, and the sinks."""

    causal: tl.constexpr
    has_window: tl.constexpr
    window: int
    mask_sinks: int
    has_chunk: tl.constexpr
    chunk: int
    page: tl.constexpr
    tail: int  # negative: pages never fall due
    dense_until: int
    layer_sinks: int
    new_rows_dense: tl.constexpr  # whether all queries read the new rows dense


class QueryArgs(NamedTuple):
    """Queries [B, H * group, T, dim], and the scaling of their scores."""

    rows: DenseRows
    heads: tl.constexpr  # key heads
    group: tl.constexpr  # query heads per key head
    split_queries: tl.constexpr  # whether queries need two bfloat16 parts for dense rows
    query_scale: float  # factor of queries, a power of two
    score_scale: float  # factor of scores; times query_scale it is the scale
    has_softcap: tl.constexpr
    softcap: float


class AttentionArgs(NamedTuple):
    """What all programs of a launch share: the queries, the rows of a layer, and the rule."""

    queries: QueryArgs
    key_side: SideArgs
    value_side: SideArgs  # not `values`: an attribute of every tuple of Triton
    rule: VisibilityArgs
    block: tl.constexpr  # rows per iteration
    multi_query: tl.constexpr  # more than one query per head
    has_new_rows: tl.constexpr
    has_selection: tl.constexpr  # read selected pages only; all queries have one position


class PartialOutputs(NamedTuple):
    """Partial outputs of each range of rows; scores are to base 2."""

    out: Any  # [ranges, B, H * group, T, dim]: weighted sums of values
    max_scores: Any  # [ranges, B, H * group, T]
    weight_sums: Any


class KernelSequence(NamedTuple):
    """The sequence of a program; made inside a kernel, as is `QueryTile`."""

    length: Any
    new_from: Any  # first position that is read from the new rows
    new_rows_start: Any  # position of the first new column; negative: it is padding
    first_visible: Any  # first position that any query may see, sinks aside
    first_sink: Any  # first sink that any query may see
    first_query: Any  # position of the first query
    last_query: Any
    first_sealed: Any  # page
    stop_sealed: Any  # page
    dense_from: Any  # first position that any query reads dense
    sealed: Any  # pointer to the slots of sealed pages
    open: Any  # pointer to the slots of open pages


class QueryTile(NamedTuple):
    """The queries of one program, all of one key head."""

    batch_index: Any
    head: Any
    row_pointers: Any  # [M]
    valid: Any
    positions: Any  # negative: padding
    first_position: Any
    last_position: Any
    lowest_row: Any  # no query sees a row below it, except sinks
    dense_from: Any  # of each query
