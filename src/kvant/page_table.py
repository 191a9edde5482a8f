"""Lengths and page slots of sequences: integers, shared by all layers of a group.

A `PageTable` is an immutable value. A page is a run of `page` positions; a slot is a place for one
page in the tensors of a layer. Tables are indexed by page number, so an entry never moves. One
sequence of 300 tokens, with pages of 64 rows, `tail=128`, `slack=16` and `sinks=4`:

    page number        0       1       2       3       4      (unused)
    positions         0..    64..   128..   192..   256..299
                  +-------+-------+-------+-------+-------+-------+---
    sealed_table  |   7   |   2   |       |       |       |       |     slots of encoded pages
                  +-------+-------+-------+-------+-------+-------+---
    open_table    |   5   |       |   9   |   3   |   8   |       |     slots of dense pages
                  +-------+-------+-------+-------+-------+-------+---
                    sinks         ^                  44 rows
    FIRST_SEALED = 0              |
    STOP_SEALED = FIRST_OPEN = 2 -+                         stop_open = 5, LENGTH = 300

A page can be in both tables: page 0 holds sinks, and a page sealed within the last `slack` tokens
stays open for an exact rewind. Unused entries may be written in place by the next table, because
no earlier table reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from kvant.lazy import Derived, Memo

if TYPE_CHECKING:
    from kvant.retention import Pruning

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
NUM_WRITE_COLUMNS = 5
NO_PAIRS, NO_SEALS, NO_WRITES = (
    np.zeros((0, width), np.int64) for width in (2, 4, NUM_WRITE_COLUMNS)
)
NO_SLOTS = np.zeros(0, np.int64), np.zeros(0, np.int64)  # of open and of sealed pages

# Columns of `AppendPlan.copies` and `reopens`, of `writes`, and of `seals`.
PAIR_SOURCE, PAIR_TARGET = range(2)  # slots
WRITE_TABLE, WRITE_SLOT, WRITE_ROW, WRITE_COUNT, WRITE_COLUMN = range(5)
SEAL_TABLE, SEAL_SLOT, SEAL_SOURCE, SEAL_COLUMN = range(4)

# Columns of `PageTable.numbers`, in the order in which kernels read them.
LENGTH, PADDING, FIRST_SEALED, STOP_SEALED, FIRST_OPEN, FIRST_VISIBLE, PRUNED_AT = range(7)
NUM_SEQUENCE_NUMBERS = 7


@dataclass(frozen=True)
class Paging:
    """The rule that seals pages: a page is due once `tail` rows after it were stored."""

    page: int
    tail: int | None  # None: no page is sealed
    dense_until: int = 0  # shorter sequences have no sealed pages

    def count_due_pages(self, length: int) -> int:
        """Return how many pages the newest of `length` tokens reads sealed."""
        if self.tail is None or length < self.dense_until:
            return 0
        return max(0, length - self.tail) // self.page

    def count_due_pages_each(self, lengths: Ints) -> Ints:
        """Return `count_due_pages` of each length."""
        if self.tail is None:
            return np.zeros_like(lengths)
        due = np.maximum(lengths - self.tail, 0) // self.page
        return np.where(lengths < self.dense_until, 0, due) if self.dense_until else due


@dataclass(frozen=True)
class LayerGroup:
    """The parameters of layers that share one page table."""

    paging: Paging
    window: int | None = None
    sinks: int = 0
    slack: int = 0  # tokens by which a rewind is exact
    step: int = 0  # rows by which memory grows; 0: one page
    capacity: int | None = None  # rows per sequence that are allocated at once
    pruning: Pruning | None = None  # the rule that drops rows after a prompt
    # The only layer of this group, if each of its key heads has a table; it makes the group unique.
    per_head_layer: int | None = None

    @property
    def page(self) -> int:
        return self.paging.page

    @property
    def seals(self) -> bool:
        return self.paging.tail is not None

    @property
    def num_sink_pages(self) -> int:
        """Pages that stay open because they hold sinks, which are always read dense."""
        return -(-self.sinks // self.page)

    def find_first_retained(self, lengths: Ints) -> Ints:
        """Return the first position, sinks aside, that a rewind of `slack` needs."""
        if self.window is None:
            return np.zeros_like(lengths)
        return np.maximum(lengths - (self.slack + self.window), 0)

    def find_first_sealed(self, lengths: Ints) -> Ints:
        """Return the first sealed page of each sequence that must be retained."""
        return self.find_first_retained(lengths) // self.page

    def find_first_open(self, lengths: Ints) -> Ints:
        """Return the first page, sinks aside, that stays open for an exact rewind of `slack`."""
        retained = self.find_first_retained(lengths) // self.page
        return (
            np.maximum(self.paging.count_due_pages_each(lengths - self.slack), retained)
            if self.seals
            else retained
        )

    @cached_property
    def event_offsets(self) -> tuple[int, ...]:
        """Offsets of lengths at which a token changes more than lengths.

        The token that makes a sequence `n` long allocates, seals or releases a page only if
        `(n - offset) % page == 0` for one of these offsets.
        """
        offsets = {1}  # the first row of a page
        if self.window is not None:
            offsets.add(self.window + self.slack)
        if self.paging.tail is not None:
            offsets |= {self.paging.tail, self.paging.tail + self.slack}
        return tuple(offsets)


def _column(index: int) -> Ints:
    """Declare a property: a column of `numbers`."""
    return cast(Ints, property(lambda table: table.numbers[:, index]))


@dataclass(frozen=True, eq=False)
class SequenceNumbers:
    """The integers of each table: the length of its sequence, and the ranges of its pages."""

    layer_group: LayerGroup
    numbers: Ints  # [tables, 7]: columns LENGTH to PRUNED_AT

    lengths = _column(LENGTH)  # stored positions; below zero: padding columns still to be appended
    padding = _column(PADDING)  # columns of left padding, which are not stored
    first_sealed = _column(FIRST_SEALED)
    stop_sealed = _column(STOP_SEALED)
    first_open = _column(FIRST_OPEN)  # pages that hold sinks are open as well
    # The first position with a row, sinks aside, even if its page begins earlier.
    first_visible = _column(FIRST_VISIBLE)
    # The lengths at which rows were pruned, the lower limit of a rewind; 0: never.
    pruned_at = _column(PRUNED_AT)

    @property
    def num_tables(self) -> int:
        return len(self.numbers)

    @property
    def seq_lens(self) -> Ints:
        """Stored positions of each table, at least 0."""
        return np.maximum(self.lengths, 0)

    @property
    def pruned_before(self) -> Ints:
        """The position below which rows were pruned; 0: none were."""
        return np.where(self.pruned_at > 0, self.first_visible, 0)

    @property
    def stop_open(self) -> Ints:
        """The number of the last page with rows, plus one."""
        return -(-self.seq_lens // self.layer_group.page)

    @cached_property
    def num_columns(self) -> int:
        """Tokens of the longest sequence, padding included."""
        return int((self.numbers[:, LENGTH] + self.numbers[:, PADDING]).max(initial=0))

    @cached_property
    def has_padding(self) -> bool:
        """Whether a sequence has left padding."""
        return bool(self.numbers[:, PADDING].any())


@dataclass(frozen=True, eq=False)
class PageTable(SequenceNumbers):
    """The length of each of B sequences and the slots of its pages.

    A sequence has one table, or one table per key head. The tables of a sequence are adjacent rows;
    they agree on the length, but may retain different rows.
    """

    sealed_table: Ints  # [tables, n]: the slots of sealed pages, by page number
    open_table: Ints  # [tables, n]: the slots of open pages, by page number
    tables_per_sequence: int = 1
    steady_tokens: int = 0  # the next tokens that change only lengths
    leading_rows_masked: bool = False  # rows before `first_visible` exist, but are masked
    last_writes: Ints | None = None  # `writes` of the newest forward, if its plan was steady
    derived: Derived = field(default_factory=Derived)  # values that readers cache
    # Values that depend on the tables and not on lengths: steady tokens share them.
    derived_from_tables: Derived = field(default_factory=Derived)

    @classmethod
    def make_empty(
        cls, layer_group: LayerGroup, padding: Sequence[int], tables_per_sequence: int = 1
    ) -> PageTable:
        """Return a table of empty sequences with `padding` columns of left padding each.

        A negative length counts the padding columns that are still to be appended.
        """
        numbers = np.zeros((len(padding) * tables_per_sequence, NUM_SEQUENCE_NUMBERS), np.int64)
        numbers[:, PADDING] = np.repeat(padding, tables_per_sequence)
        numbers[:, LENGTH] = -numbers[:, PADDING]
        no_pages = np.zeros((len(numbers), 0), np.int64)
        return cls(layer_group, numbers, no_pages, no_pages, tables_per_sequence)

    @cached_property
    def batch(self) -> int:
        """The number of sequences."""
        return len(self.numbers) // self.tables_per_sequence

    def reduce_to_sequences(self, numbers: Ints) -> Ints:
        """Return the values of sequences from those of tables, which agree within a sequence."""
        return numbers[:: self.tables_per_sequence]

    def repeat_for_tables(self, numbers: Ints) -> Ints:
        """Return the values of tables from those of sequences."""
        return np.repeat(numbers, self.tables_per_sequence)

    def expand_to_tables(self, sequences: Ints) -> Ints:
        """Return the indices of the tables of `sequences`, in their order."""
        if self.tables_per_sequence == 1:
            return sequences
        return (
            sequences[:, None] * self.tables_per_sequence + np.arange(self.tables_per_sequence)
        ).ravel()

    @cached_property
    def flat_table(self) -> PageTable:
        """The same table with each row as a sequence of its own."""
        return self if self.tables_per_sequence == 1 else replace(self, tables_per_sequence=1)

    @property
    def first_row(self) -> Ints:
        """The first position, sinks aside, that has a row."""
        sealed = self.stop_sealed > self.first_sealed
        first = np.where(sealed, self.first_sealed, self.first_open)
        rows: Ints = first * self.layer_group.page
        return rows if self.leading_rows_masked else np.maximum(rows, self.first_visible)

    @cached_property
    def ragged(self) -> bool:
        """Whether sequences differ in length beyond their padding, as merged ones do."""
        if len(self.numbers) == 1:
            return False
        columns = self.lengths + self.padding
        return bool((columns != columns[:1]).any())

    def without_padding(self) -> PageTable:
        """Return the same rows as of sequences of different lengths."""
        numbers = self.numbers.copy()
        numbers[:, PADDING] = 0
        return replace(self, numbers=numbers, derived=Derived())

    def mask_leading_rows(self, first: Sequence[int]) -> PageTable:
        """Return the same table with the rows of each sequence before `first` masked."""
        masked_tables = self.derived.setdefault(MASKED_TABLES, {})
        masked = masked_tables.get(key := tuple(first))
        if masked is None:
            numbers = self.numbers.copy()
            numbers[:, FIRST_VISIBLE] = np.maximum(
                numbers[:, FIRST_VISIBLE], np.repeat(first, self.tables_per_sequence)
            )
            masked = PageTable(
                self.layer_group,
                numbers,
                self.sealed_table,
                self.open_table,
                self.tables_per_sequence,
                leading_rows_masked=True,
            )
            masked_tables[key] = masked
        return masked

    def list_open_pages(self) -> tuple[Ints, Ints]:
        """Return the table index and the number of each open page, in the order of tables."""
        other_pages = expand_ranges(self.first_open, self.stop_open)
        if not self.layer_group.sinks:
            return other_pages
        sinks = np.minimum(self.layer_group.num_sink_pages, self.first_open)
        sinks = np.minimum(sinks, self.stop_open)
        sink_pages = expand_ranges(np.zeros_like(sinks), sinks)
        tables = np.concatenate([sink_pages[0], other_pages[0]])
        order = np.argsort(tables, kind="stable")
        return tables[order], np.concatenate([sink_pages[1], other_pages[1]])[order]

    def list_sealed_pages(self) -> tuple[Ints, Ints]:
        """Return the table index and the number of each sealed page."""
        return expand_ranges(self.first_sealed, self.stop_sealed)

    def list_open_slots(self) -> Ints:
        """Return the slots of open pages, in the order of `list_open_pages`."""
        return self.open_table[self.list_open_pages()]

    def list_sealed_slots(self) -> Ints:
        """Return the slots of sealed pages, in the order of `list_sealed_pages`."""
        return self.sealed_table[self.list_sealed_pages()]


# The results of `mask_leading_rows`, by first rows.
MASKED_TABLES: Memo[dict[tuple[int, ...], PageTable]] = Memo("masked tables")


def expand_ranges(first: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Return the numbers of all ranges [first[i], stop[i]), preceded by the `i` of each."""
    count = np.maximum(stop - first, 0)
    range_indices = np.repeat(np.arange(len(count)), count)
    ends = np.cumsum(count)
    return range_indices, np.arange(len(range_indices)) - (ends - count)[range_indices] + first[
        range_indices
    ]


@dataclass(frozen=True, eq=False)
class AppendPlan:
    """The effect of a forward on a page table and on the tensors of each layer of its group.

    A layer applies `copies`, then `writes`, then `seals`. Queries of the forward read through
    `read_table`, in which the pages that the forward releases are still present.
    """

    old_table: PageTable
    read_table: PageTable
    new_table: PageTable
    num_new: int  # columns of the forward
    new_rows_dense: bool = False  # queries of the forward read all its rows dense
    copies: Ints = field(default_factory=lambda: NO_PAIRS)  # open slot to open slot
    writes: Ints = field(default_factory=lambda: NO_WRITES)  # [n, 5]: columns WRITE_TABLE and on
    # [n, 4]: columns SEAL_TABLE and on. SEAL_SOURCE is the slot of the open page, or -1: then the
    # page is sealed from the new rows, from column SEAL_COLUMN on.
    seals: Ints = field(default_factory=lambda: NO_SEALS)
    reopens: Ints = field(default_factory=lambda: NO_PAIRS)  # sealed slot to open slot, decoded
    allocated_slots: tuple[Ints, Ints] = NO_SLOTS  # of open and of sealed pages
    freed_slots: tuple[Ints, Ints] = NO_SLOTS
    reads_new_rows: bool = False  # attention reads new rows as appended, not from their pages
    pool_sizes: tuple[int, int] | None = None  # slots after the append; None: unchanged
    derived: Derived = field(default_factory=Derived)  # values that writers cache

    @property
    def is_steady(self) -> bool:
        """Whether lengths alone made the plan: no page is allocated, copied, sealed or freed."""
        return self.new_table.last_writes is not None
