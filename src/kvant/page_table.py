"""How far sequences are and where their pages lie: integers, the same for all layers of a kind.

An `Extent` is an immutable value. Tables are indexed by page number, so a page keeps its place in
them whatever came or went before it. Entries behind the pages that an extent has are nobody's: the
next extent may write them in place, and no older one looks at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
NO_PAIRS, NO_SEALS, NO_WRITES = (np.zeros((0, width), np.int64) for width in (2, 4, 5))
NO_SLOTS = np.zeros(0, np.int64), np.zeros(0, np.int64)

# The numbers of a sequence, in the order in which kernels read them.
LENGTH, PADDING, FIRST_SEALED, STOP_SEALED, FIRST_OPEN, FIRST_VISIBLE, PRUNED_AT = range(7)
NUM_SEQUENCE_NUMBERS = 7


@dataclass(frozen=True)
class Paging:
    """When a page is seen sealed: a page falls due once `tail` rows behind it were seen."""

    page: int
    tail: int | None  # None: never, all rows stay dense
    dense_until: int = 0  # nor before so many tokens were seen

    def count_due_pages(self, length: int) -> int:
        """How many pages the newest of `length` tokens sees sealed."""
        if self.tail is None or length < self.dense_until:
            return 0
        return max(0, length - self.tail) // self.page

    def count_due_pages_each(self, lengths: Ints) -> Ints:
        """The same of many lengths."""
        if self.tail is None:
            return np.zeros_like(lengths)
        due = np.maximum(lengths - self.tail, 0) // self.page
        return np.where(lengths < self.dense_until, 0, due) if self.dense_until else due


@dataclass(frozen=True)
class LayerGroup:
    """What layers have in common whose integers are the same."""

    paging: Paging
    window: int | None = None
    sinks: int = 0
    slack: int = 0  # how far back a rewind is exact
    step: int = 0  # rows by which memory grows; 0: by pages
    capacity: int | None = None  # rows of a sequence whose memory is taken at once
    pruning: Any = None  # the rule by which rows go behind a prompt: a value that tells kinds apart
    per_head_layer: int | None = (
        None  # the one layer of this kind, of which each key head has a table
    )

    @property
    def page(self) -> int:
        return self.paging.page

    @property
    def seals(self) -> bool:
        return self.paging.tail is not None

    @property
    def num_sink_pages(self) -> int:
        """Pages that stay open as they hold rows that are seen dense for ever."""
        return -(-self.sinks // self.page)

    def find_first_retained(self, lengths: Ints) -> Ints:
        """The first positions (sinks aside) that must stay, a rewind of `slack` included."""
        if self.window is None:
            return np.zeros_like(lengths)
        return np.maximum(lengths - (self.slack + self.window), 0)

    def find_first_sealed(self, lengths: Ints) -> Ints:
        """The first pages that must stay sealed."""
        return self.find_first_retained(lengths) // self.page

    def find_first_open(self, lengths: Ints) -> Ints:
        """The first pages, sinks aside, that must stay open, so that a rewind of slack is exact."""
        kept = self.find_first_retained(lengths) // self.page
        return (
            np.maximum(self.paging.count_due_pages_each(lengths - self.slack), kept)
            if self.seals
            else kept
        )

    @cached_property
    def event_offsets(self) -> tuple[int, ...]:
        """A length n changes more than a row where (n - event) % page is 0 for one of these."""
        found = {1}  # the first row of a page
        if self.window is not None:
            found.add(self.window + self.slack)
        if self.paging.tail is not None:
            found |= {self.paging.tail, self.paging.tail + self.slack}
        return tuple(found)


@dataclass(frozen=True, eq=False)
class PageTable:
    """How far each of B sequences is, and where its pages lie.

    A sequence has one table of pages, or one for each of its key heads, which are neighbours then:
    they are equally far, but need not keep the same rows.
    """

    layer_group: LayerGroup
    numbers: Ints  # [tables, 7]: see LENGTH and the others
    sealed_table: Ints  # [tables, n]: the slots of sealed pages, by page number
    open_table: Ints  # [tables, n]: of open pages
    tables_per_sequence: int = 1  # tables of a sequence
    steady_tokens: int = 0  # so many tokens change nothing but the lengths
    leading_rows_masked: bool = False  # are rows before `begins` there, and only hidden?
    last_writes: Ints | None = (
        None  # the writes of the token that came last; the next goes behind it
    )
    derived: dict[Any, Any] = field(default_factory=dict)  # what readers worked out of it
    derived_from_tables: dict[Any, Any] = field(
        default_factory=dict
    )  # the same of the tables alone

    @classmethod
    def make_empty(
        cls, layer_group: LayerGroup, padding: Sequence[int], tables_per_sequence: int = 1
    ) -> PageTable:
        """Sequences without rows; a negative length counts the columns of padding to come."""
        numbers = np.zeros((len(padding) * tables_per_sequence, NUM_SEQUENCE_NUMBERS), np.int64)
        numbers[:, PADDING] = np.repeat(padding, tables_per_sequence)
        numbers[:, LENGTH] = -numbers[:, PADDING]
        none = np.zeros((len(numbers), 0), np.int64)
        return cls(layer_group, numbers, none, none, tables_per_sequence)

    @property
    def num_tables(self) -> int:
        return len(self.numbers)

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.numbers) // self.tables_per_sequence

    def reduce_to_sequences(self, numbers: Ints) -> Ints:
        """One of the numbers of each sequence, in which its tables agree."""
        return numbers[:: self.tables_per_sequence]

    def expand_to_tables(self, sequences: Ints) -> Ints:
        """The tables of these sequences, in their order."""
        if self.tables_per_sequence == 1:
            return sequences
        return (
            sequences[:, None] * self.tables_per_sequence + np.arange(self.tables_per_sequence)
        ).ravel()

    @cached_property
    def flat_table(self) -> PageTable:
        """The same, where each table is a sequence."""
        return self if self.tables_per_sequence == 1 else replace(self, tables_per_sequence=1)

    @property
    def lengths(self) -> Ints:
        """Positions seen; below zero, columns of padding that are still to come."""
        return self.numbers[:, LENGTH]

    @property
    def seq_lens(self) -> Ints:
        """Positions seen, [B]."""
        return np.maximum(self.lengths, 0)

    @property
    def padding(self) -> Ints:
        """Columns of left padding, which are not stored."""
        return self.numbers[:, PADDING]

    @property
    def first_sealed(self) -> Ints:
        return self.numbers[:, FIRST_SEALED]

    @property
    def stop_sealed(self) -> Ints:
        return self.numbers[:, STOP_SEALED]

    @property
    def first_open(self) -> Ints:
        """The first open page; those that hold sinks are open as well."""
        return self.numbers[:, FIRST_OPEN]

    @property
    def first_visible(self) -> Ints:
        """Positions before it have no rows, even where their page is there."""
        return self.numbers[:, FIRST_VISIBLE]

    @property
    def pruned_at(self) -> Ints:
        """The lengths at which rows were pruned, and below which nobody can go back; 0: none."""
        return self.numbers[:, PRUNED_AT]

    @property
    def pruned_before(self) -> Ints:
        """Positions before it have no row since rows were pruned, and nobody asks for them."""
        return np.where(self.pruned_at > 0, self.first_visible, 0)

    @property
    def first_row(self) -> Ints:
        """The first position, sinks aside, that there is a row of."""
        sealed = self.stop_sealed > self.first_sealed
        first = np.where(sealed, self.first_sealed, self.first_open)
        rows: Ints = first * self.layer_group.page
        return rows if self.leading_rows_masked else np.maximum(rows, self.first_visible)

    @property
    def stop_open(self) -> Ints:
        """The page behind the last one that has rows."""
        return -(-self.seq_lens // self.layer_group.page)

    @cached_property
    def num_columns(self) -> int:
        """Tokens of the longest sequence, its padding included."""
        return int((self.lengths + self.padding).max(initial=0))

    @cached_property
    def has_padding(self) -> bool:
        """Was padding told of any sequence?"""
        return bool(self.padding.any())

    @cached_property
    def ragged(self) -> bool:
        """Do sequences of different lengths stand side by side without padding?"""
        if len(self.numbers) == 1:
            return False
        columns = self.lengths + self.padding
        return bool((columns != columns[:1]).any())

    def mask_leading_rows(self, first: Sequence[int]) -> PageTable:
        """The same, but of each sequence nobody sees a position before `first`."""
        key = ("hiding", *first)
        found: PageTable | None = self.derived.get(key)
        if found is None:
            numbers = self.numbers.copy()
            numbers[:, FIRST_VISIBLE] = np.maximum(
                numbers[:, FIRST_VISIBLE], np.repeat(first, self.tables_per_sequence)
            )
            found = PageTable(
                self.layer_group,
                numbers,
                self.sealed_table,
                self.open_table,
                self.tables_per_sequence,
                leading_rows_masked=True,
            )
            self.derived[key] = found
        return found

    def list_open_pages(self) -> tuple[Ints, Ints]:
        """The sequence and the number of each open page, one sequence after the other."""
        body = expand_ranges(self.first_open, self.stop_open)
        if not self.layer_group.sinks:
            return body
        sinks = np.minimum(self.layer_group.num_sink_pages, self.first_open)
        sinks = np.minimum(sinks, self.stop_open)
        front = expand_ranges(np.zeros_like(sinks), sinks)
        which = np.concatenate([front[0], body[0]])
        order = np.argsort(which, kind="stable")
        return which[order], np.concatenate([front[1], body[1]])[order]

    def list_sealed_pages(self) -> tuple[Ints, Ints]:
        """The sequence and the number of each sealed page."""
        return expand_ranges(self.first_sealed, self.stop_sealed)

    def list_open_slots(self) -> Ints:
        return self.open_table[self.list_open_pages()]

    def list_sealed_slots(self) -> Ints:
        return self.sealed_table[self.list_sealed_pages()]


def expand_ranges(first: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Every number of each [first[i], stop[i]), behind the i that it belongs to."""
    count = np.maximum(stop - first, 0)
    which = np.repeat(np.arange(len(count)), count)
    ends = np.cumsum(count)
    return which, np.arange(len(which)) - (ends - count)[which] + first[which]


@dataclass(frozen=True, eq=False)
class AppendPlan:
    """What becomes of an extent, and what every layer of the kind does to its rows for it.

    `during` is what the queries of a forward see: pages that it lets go are still there. A layer
    first makes `copies`, then writes and seals.
    """

    old_table: PageTable
    read_table: PageTable
    new_table: PageTable
    num_new: int  # columns that came
    new_rows_dense: bool = False  # are they dense to each other's queries, whatever falls due?
    copies: Ints = field(default_factory=lambda: NO_PAIRS)  # open slots, from and to
    writes: Ints = field(default_factory=lambda: NO_WRITES)  # sequence, slot, row, rows, column
    seals: Ints = field(default_factory=lambda: NO_SEALS)  # sequence, slot, open slot (or -1: the
    # rows came just now), column of the first row where they did
    reopens: Ints = field(
        default_factory=lambda: NO_PAIRS
    )  # sealed slot to open slot: decoded rows
    allocated_slots: tuple[Ints, Ints] = NO_SLOTS  # open, sealed
    freed_slots: tuple[Ints, Ints] = NO_SLOTS
    reads_new_rows: bool = (
        False  # are rows that came read where they came, and not from their pages?
    )
    pool_sizes: tuple[int, int] | None = None  # slots that there are now; None: as many as before
    derived: dict[Any, Any] = field(default_factory=dict)  # what writers worked out of it

    @property
    def is_steady(self) -> bool:
        """Does it write one more row a sequence, and change nothing else but the lengths?"""
        return self.num_new == 1 and self.old_table.steady_tokens > 0
