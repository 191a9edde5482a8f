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
LENGTH, PADDING, FIRST_SEALED, STOP_SEALED, FIRST_OPEN, BEGINS, PRUNED = range(7)
NUMBERS = 7


@dataclass(frozen=True)
class Paging:
    """When a page is seen sealed: a page falls due once `tail` rows behind it were seen."""

    page: int
    tail: int | None  # None: never, all rows stay dense
    dense_until: int = 0  # nor before so many tokens were seen

    def due(self, length: int) -> int:
        """How many pages the newest of `length` tokens sees sealed."""
        if self.tail is None or length < self.dense_until:
            return 0
        return max(0, length - self.tail) // self.page

    def all_due(self, lengths: Ints) -> Ints:
        """The same of many lengths."""
        if self.tail is None:
            return np.zeros_like(lengths)
        due = np.maximum(lengths - self.tail, 0) // self.page
        return np.where(lengths < self.dense_until, 0, due) if self.dense_until else due


@dataclass(frozen=True)
class Kind:
    """What layers have in common whose integers are the same."""

    paging: Paging
    window: int | None = None
    sinks: int = 0
    slack: int = 0  # how far back a rewind is exact
    step: int = 0  # rows by which memory grows; 0: by pages
    capacity: int | None = None  # rows of a sequence whose memory is taken at once
    prune: Any = None  # the rule by which rows go behind a prompt: a value that tells kinds apart
    own: int | None = None  # the one layer of this kind, of which each key head has a table

    @property
    def page(self) -> int:
        return self.paging.page

    @property
    def seals(self) -> bool:
        return self.paging.tail is not None

    @property
    def sink_pages(self) -> int:
        """Pages that stay open as they hold rows that are seen dense for ever."""
        return -(-self.sinks // self.page)

    def keep(self, lengths: Ints) -> Ints:
        """The first positions (sinks aside) that must stay, a rewind of `slack` included."""
        if self.window is None:
            return np.zeros_like(lengths)
        return np.maximum(lengths - (self.slack + self.window), 0)

    def first_sealed(self, lengths: Ints) -> Ints:
        """The first pages that must stay sealed."""
        return self.keep(lengths) // self.page

    def first_open(self, lengths: Ints) -> Ints:
        """The first pages, sinks aside, that must stay open, so that a rewind of slack is exact."""
        kept = self.keep(lengths) // self.page
        return np.maximum(self.paging.all_due(lengths - self.slack), kept) if self.seals else kept

    @cached_property
    def events(self) -> tuple[int, ...]:
        """A length n changes more than a row where (n - event) % page is 0 for one of these."""
        found = {1}  # the first row of a page
        if self.window is not None:
            found.add(self.window + self.slack)
        if self.paging.tail is not None:
            found |= {self.paging.tail, self.paging.tail + self.slack}
        return tuple(found)


@dataclass(frozen=True, eq=False)
class Extent:
    """How far each of B sequences is, and where its pages lie.

    A sequence has one table of pages, or one for each of its key heads, which are neighbours then:
    they are equally far, but need not keep the same rows.
    """

    kind: Kind
    numbers: Ints  # [tables, 7]: see LENGTH and the others
    sealed: Ints  # [tables, n]: the slots of sealed pages, by page number
    open: Ints  # [tables, n]: of open pages
    heads: int = 1  # tables of a sequence
    calm: int = 0  # so many tokens change nothing but the lengths
    hidden: bool = False  # are rows before `begins` there, and only hidden?
    newest: Ints | None = None  # the writes of the token that came last; the next goes behind it
    memo: dict[Any, Any] = field(default_factory=dict)  # what readers worked out of it
    shared: dict[Any, Any] = field(default_factory=dict)  # the same of the tables alone

    @classmethod
    def empty(cls, kind: Kind, padding: Sequence[int], heads: int = 1) -> Extent:
        """Sequences without rows; a negative length counts the columns of padding to come."""
        numbers = np.zeros((len(padding) * heads, NUMBERS), np.int64)
        numbers[:, PADDING] = np.repeat(padding, heads)
        numbers[:, LENGTH] = -numbers[:, PADDING]
        none = np.zeros((len(numbers), 0), np.int64)
        return cls(kind, numbers, none, none, heads)

    @property
    def tables(self) -> int:
        return len(self.numbers)

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.numbers) // self.heads

    def of_sequences(self, numbers: Ints) -> Ints:
        """One of the numbers of each sequence, in which its tables agree."""
        return numbers[:: self.heads]

    def tables_of(self, sequences: Ints) -> Ints:
        """The tables of these sequences, in their order."""
        if self.heads == 1:
            return sequences
        return (sequences[:, None] * self.heads + np.arange(self.heads)).ravel()

    @cached_property
    def apart(self) -> Extent:
        """The same, where each table is a sequence."""
        return self if self.heads == 1 else replace(self, heads=1)

    @property
    def lengths(self) -> Ints:
        """Positions seen; below zero, columns of padding that are still to come."""
        return self.numbers[:, LENGTH]

    @property
    def rows(self) -> Ints:
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
    def begins(self) -> Ints:
        """Positions before it have no rows, even where their page is there."""
        return self.numbers[:, BEGINS]

    @property
    def pruned(self) -> Ints:
        """The lengths at which rows were pruned, and below which nobody can go back; 0: none."""
        return self.numbers[:, PRUNED]

    @property
    def missing(self) -> Ints:
        """Positions before it have no row since rows were pruned, and nobody asks for them."""
        return np.where(self.pruned > 0, self.begins, 0)

    @property
    def first_row(self) -> Ints:
        """The first position, sinks aside, that there is a row of."""
        sealed = self.stop_sealed > self.first_sealed
        first = np.where(sealed, self.first_sealed, self.first_open)
        rows: Ints = first * self.kind.page
        return rows if self.hidden else np.maximum(rows, self.begins)

    @property
    def stop_open(self) -> Ints:
        """The page behind the last one that has rows."""
        return -(-self.rows // self.kind.page)

    @cached_property
    def columns(self) -> int:
        """Tokens of the longest sequence, its padding included."""
        return int((self.lengths + self.padding).max(initial=0))

    @cached_property
    def padded(self) -> bool:
        """Was padding told of any sequence?"""
        return bool(self.padding.any())

    @cached_property
    def ragged(self) -> bool:
        """Do sequences of different lengths stand side by side without padding?"""
        if len(self.numbers) == 1:
            return False
        columns = self.lengths + self.padding
        return bool((columns != columns[:1]).any())

    def hiding(self, first: Sequence[int]) -> Extent:
        """The same, but of each sequence nobody sees a position before `first`."""
        key = ("hiding", *first)
        found: Extent | None = self.memo.get(key)
        if found is None:
            numbers = self.numbers.copy()
            numbers[:, BEGINS] = np.maximum(numbers[:, BEGINS], np.repeat(first, self.heads))
            found = Extent(self.kind, numbers, self.sealed, self.open, self.heads, hidden=True)
            self.memo[key] = found
        return found

    def open_pages(self) -> tuple[Ints, Ints]:
        """The sequence and the number of each open page, one sequence after the other."""
        body = ranges(self.first_open, self.stop_open)
        if not self.kind.sinks:
            return body
        sinks = np.minimum(self.kind.sink_pages, self.first_open)
        sinks = np.minimum(sinks, self.stop_open)
        front = ranges(np.zeros_like(sinks), sinks)
        which = np.concatenate([front[0], body[0]])
        order = np.argsort(which, kind="stable")
        return which[order], np.concatenate([front[1], body[1]])[order]

    def sealed_pages(self) -> tuple[Ints, Ints]:
        """The sequence and the number of each sealed page."""
        return ranges(self.first_sealed, self.stop_sealed)

    def open_slots(self) -> Ints:
        return self.open[self.open_pages()]

    def sealed_slots(self) -> Ints:
        return self.sealed[self.sealed_pages()]


def ranges(first: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Every number of each [first[i], stop[i]), behind the i that it belongs to."""
    count = np.maximum(stop - first, 0)
    which = np.repeat(np.arange(len(count)), count)
    ends = np.cumsum(count)
    return which, np.arange(len(which)) - (ends - count)[which] + first[which]


@dataclass(frozen=True, eq=False)
class Change:
    """What becomes of an extent, and what every layer of the kind does to its rows for it.

    `during` is what the queries of a forward see: pages that it lets go are still there. A layer
    first makes `copies`, then writes and seals.
    """

    before: Extent
    during: Extent
    after: Extent
    count: int  # columns that came
    dense: bool = False  # are they dense to each other's queries, whatever falls due?
    copies: Ints = field(default_factory=lambda: NO_PAIRS)  # open slots, from and to
    writes: Ints = field(default_factory=lambda: NO_WRITES)  # sequence, slot, row, rows, column
    seals: Ints = field(default_factory=lambda: NO_SEALS)  # sequence, slot, open slot (or -1: the
    # rows came just now), column of the first row where they did
    opens: Ints = field(default_factory=lambda: NO_PAIRS)  # sealed slot to open slot: decoded rows
    taken: tuple[Ints, Ints] = NO_SLOTS  # open, sealed
    dropped: tuple[Ints, Ints] = NO_SLOTS
    own: bool = False  # are rows that came read where they came, and not from their pages?
    room: tuple[int, int] | None = None  # slots that there are now; None: as many as before
    memo: dict[Any, Any] = field(default_factory=dict)  # what writers worked out of it

    @property
    def calm(self) -> bool:
        """Does it write one more row a sequence, and change nothing else but the lengths?"""
        return self.count == 1 and self.before.calm > 0
