"""Random lives of caches in integers, against lists of positions: the law of Extent.

A layer is two dictionaries here, from slots to the rows in them; a row is the token that it is of,
and whether it was decoded. What a query should read is said by the rule of architecture.md alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from kvant.cache.advance import (
    Pools,
    concat_tables,
    is_exact_rewind,
    mask_reachable,
    rewind_table,
    select_sequences,
)
from kvant.cache.tracker import StateTracker
from kvant.page_table import AppendPlan, LayerGroup, PageTable, Paging

Row = tuple[int, bool]  # the token, and was it decoded?


@dataclass
class Rows:
    """What a layer holds, by slot."""

    page: int
    open: dict[int, list[Row | None]] = field(default_factory=dict)
    sealed: dict[int, list[Row | None]] = field(default_factory=dict)

    def do(self, change: AppendPlan, came: list[list[Row]]) -> None:
        """What a layer does in a forward whose rows, padding included, are `came`."""
        for source, to in change.copies.tolist():
            self.open[to] = list(self.open[source])
        for source, to in change.reopens.tolist():
            self.open[to] = [row and (row[0], True) for row in self.sealed[source]]
        for which, slot, first, count, column in change.writes.tolist():
            assert first + count <= self.page
            rows = self.open.setdefault(slot, [None] * self.page)
            rows[first : first + count] = came[which][column : column + count]
        for which, slot, source, column in change.seals.tolist():
            rows = came[which][column : column + self.page] if source < 0 else self.open[source]
            assert len(rows) == self.page and None not in rows, "a page sealed before it is full"
            self.sealed[slot] = list(rows)


@dataclass
class Sequence:
    """What a sequence is said to hold: its tokens, and how far it ever was since it was decoded."""

    tokens: list[int]
    to_come: int = 0  # columns of padding that are still to come


class Told(StateTracker):
    """A ledger, and how far it is from the furthest that it ever was."""

    back = 0


class Life:
    """Some caches of one kind, which share pools."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kind = self.any_kind()
        self.pools = Pools.make(self.kind)
        self.rows = Rows(self.kind.page)
        self.idle = self.ledger()  # who shares pools moves no pages
        self.caches: list[tuple[Told, list[Sequence]]] = [(self.ledger(), [])]
        self.token = 0
        self.story = [str(self.kind)]

    def any_kind(self) -> LayerGroup:
        pick = self.random.choice
        tail = pick([None, 0, 1, 3, 9])
        return LayerGroup(
            Paging(pick([1, 2, 4, 8]), tail, pick([0, 0, 0, 13]) if tail is not None else 0),
            window=pick([None, None, 1, 5, 12]),
            sinks=pick([0, 0, 1, 3, 9]),
            slack=pick([0, 2, 5]),
            step=pick([0, 8]),
        )

    def ledger(self) -> Told:
        return Told([self.kind], [self.pools], [0])

    def live(self, steps: int) -> None:
        verbs = [self.append] * 4 + [
            self.die,
            self.rewind,
            self.select,
            self.fork,
            self.merge,
            self.forget,
        ]
        for _ in range(steps):
            verb = self.random.choice(verbs)
            self.story.append(verb.__name__)
            try:
                verb()
                for ledger, sequences in self.caches:
                    check(self.kind, self.rows, ledger, sequences)
                self.caches[0][0].check()
            except Exception as error:
                raise AssertionError("; ".join(self.story)) from error

    def any(self) -> tuple[Told, list[Sequence]]:
        return self.random.choice(self.caches)

    def append(self) -> None:
        ledger, sequences = self.any()
        change, came = self.begin(ledger, sequences)
        look(self.kind, self.rows, change, came, sequences)
        ledger.commit_layer(0)
        ledger.back = max(0, ledger.back - change.num_new)

    def die(self) -> None:
        """A forward that writes, or not, and never comes to its end."""
        ledger, sequences = self.any()
        before = [Sequence(list(s.tokens), s.to_come) for s in sequences]
        self.begin(ledger, sequences)
        sequences[:] = before
        ledger.rollback()

    def begin(self, ledger: Told, sequences: list[Sequence]) -> tuple[AppendPlan, list[list[Row]]]:
        count = self.random.choice([1, 1, 1, 2, 3, 7, 20])
        if not sequences:
            batch = self.random.randint(1, 3)
            sequences += [Sequence([], self.random.choice([0, 0, 2, 9])) for _ in range(batch)]
        dense = count > 1 and self.random.random() < 0.5
        start = [s.to_come for s in sequences] if ledger.is_empty else None
        change = ledger.plan_append(0, len(sequences), count, start, new_rows_dense=dense)
        self.story[-1] += f"({count}, {dense})"
        came: list[list[Row]] = []
        for sequence in sequences:
            new = list(range(self.token, self.token + count))
            self.token += count
            came.append([(token, False) for token in new])
            skipped = min(sequence.to_come, count)
            sequence.to_come -= skipped
            sequence.tokens = sequence.tokens + new[skipped:]
        self.rows.do(change, came)
        return change, came

    def rewind(self) -> None:
        ledger, sequences = self.any()
        if not ledger.batch:
            return
        extent = ledger.state.page_tables[0]
        back = self.random.choice([0, 1, 2, 5, 11])
        to = np.maximum(extent.lengths - back, -extent.padding)
        if not mask_reachable(extent, to).all():
            assert back > self.kind.slack or ledger.back, f"{back} tokens back"
            return
        self.story[-1] += f"({back})"
        change = rewind_table(extent, to, self.pools)
        assert is_exact_rewind(extent, to) == (len(change.reopens) == 0)
        if ledger.back + back <= self.kind.slack:
            assert is_exact_rewind(extent, to), f"{back} tokens back"
        ledger.back += back
        self.rows.do(change, [])
        with ledger.guard_counts():
            ledger.replace_tables([change.new_table], (), [(0, change.allocated_slots)])
        for sequence, length in zip(sequences, to.tolist(), strict=True):
            sequence.tokens = sequence.tokens[: max(length, 0)]
            sequence.to_come = max(-length, 0)

    def select(self) -> None:
        ledger, sequences = self.any()
        if not sequences:
            return
        index = [self.random.randrange(len(sequences)) for _ in range(self.random.randint(1, 3))]
        with ledger.guard_counts():
            ledger.replace_tables(
                [select_sequences(ledger.state.page_tables[0], np.array(index))], ()
            )
        sequences[:] = [Sequence(list(sequences[i].tokens), sequences[i].to_come) for i in index]

    def fork(self) -> None:
        """And one cache goes, where there are too many."""
        ledger, sequences = self.any()
        twin = self.ledger()
        twin.back = ledger.back
        if ledger.batch:
            extent = ledger.state.page_tables[0]
            with twin.guard_counts():
                twin.replace_tables([select_sequences(extent, np.arange(extent.batch))], ())
        self.caches.append((twin, [Sequence(list(s.tokens), s.to_come) for s in sequences]))
        if len(self.caches) > 3:
            del self.caches[self.random.randrange(3)]

    def merge(self) -> None:
        """All sequences that are past their padding, side by side."""
        filled = [(one, s) for one, s in self.caches if s and all(not x.to_come for x in s)]
        if not filled or sum(len(s) for _, s in filled) > 4:
            return
        merged = self.ledger()
        merged.back = max(one.back for one, _ in filled)
        with merged.guard_counts():
            merged.replace_tables(
                [concat_tables([one.state.page_tables[0] for one, _ in filled])], ()
            )
        copies = [Sequence(list(x.tokens)) for _, s in filled for x in s]
        self.caches.append((merged, copies))
        if len(self.caches) > 3:
            del self.caches[self.random.randrange(3)]

    def forget(self) -> None:
        ledger, sequences = self.any()
        with ledger.guard_counts():
            ledger.replace_tables([], ())
        ledger.back = 0
        sequences.clear()


def check(kind: LayerGroup, rows: Rows, ledger: Told, sequences: list[Sequence]) -> None:
    """What the newest token of each sequence sees, in whatever state it sees it."""
    if not ledger.state.page_tables:
        assert not sequences
        return
    extent = ledger.state.page_tables[0]
    assert extent.lengths.tolist() == [len(s.tokens) - s.to_come for s in sequences]
    for which, sequence in enumerate(sequences):
        if sequence.tokens:
            query = len(sequence.tokens) - 1
            reads(kind, rows, extent, which, sequence.tokens, query, None, False)


def look(
    kind: LayerGroup,
    rows: Rows,
    change: AppendPlan,
    came: list[list[Row]],
    sequences: list[Sequence],
) -> None:
    """What every query of a forward sees."""
    for which, sequence in enumerate(sequences):
        length = len(sequence.tokens)
        for query in range(max(0, length - change.num_new), length):
            own = came[which] if change.reads_new_rows else None
            dense = change.reads_new_rows and change.new_rows_dense
            reads(kind, rows, change.read_table, which, sequence.tokens, query, own, dense)


def reads(
    kind: LayerGroup,
    rows: Rows,
    extent: PageTable,
    which: int,
    tokens: list[int],
    query: int,
    own: list[Row] | None,
    dense: bool,
) -> None:
    """Does the query at this position find every row that it sees, in the state it sees it in?"""
    page, length = kind.page, len(tokens)
    came = length if own is None else length - len(own)
    due = kind.paging.count_due_pages(query + 1) * page
    for key in range(query + 1):
        seen = kind.window is None or query - key < kind.window or key < kind.sinks
        if not seen:
            continue
        at, row = divmod(key, page)
        as_it_came = dense and key >= came
        if key >= kind.sinks and key < due and not as_it_came:
            assert extent.first_sealed[which] <= at < extent.stop_sealed[which], f"page {at}"
            found = rows.sealed[int(extent.sealed_table[which, at])][row]
        elif own is not None and key >= max(came, 0):
            found = own[key - came]
        else:
            opened = extent.first_open[which] <= at < extent.stop_open[which]
            assert opened or at < kind.num_sink_pages, f"page {at} is not open"
            found = rows.open[int(extent.open_table[which, at])][row]
        assert found is not None and found[0] == tokens[key], (
            f"sequence {which}, query {query}, position {key}: {found}, not {tokens[key]}"
        )
