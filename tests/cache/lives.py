"""Random operations on integer caches against lists of positions: the invariants of PageTable.

A layer is two dictionaries here, from slots to their rows; a row is its token and whether it was
decoded. The expected rows of a query follow from the rule in architecture.md alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import numpy as np

from kvant.cache.holder import StateHolder
from kvant.cache.layout import CacheLayout
from kvant.cache.state import CacheState
from kvant.page_table import AppendPlan, LayerGroup, PageTable, Paging
from kvant.pages.advance import (
    concat_tables,
    is_exact_rewind,
    mask_reachable,
    rewind_table,
    select_sequences,
)
from kvant.pages.pool import CachePools, GroupSlots

Row = tuple[int, bool]  # token, and whether it was decoded


@dataclass
class Rows:
    """The rows of a layer, by slot."""

    page: int
    open: dict[int, list[Row | None]] = field(default_factory=dict)
    sealed: dict[int, list[Row | None]] = field(default_factory=dict)

    def apply(self, plan: AppendPlan, new_rows: list[list[Row]]) -> None:
        """Apply an append plan to a layer; `num_new` counts new rows, padding included."""
        for source, target in plan.copies.tolist():
            self.open[target] = list(self.open[source])
        for source, target in plan.reopens.tolist():
            self.open[target] = [row and (row[0], True) for row in self.sealed[source]]
        for sequence, slot, first, count, column in plan.writes.tolist():
            assert first + count <= self.page
            rows = self.open.setdefault(slot, [None] * self.page)
            rows[first : first + count] = new_rows[sequence][column : column + count]
        for sequence, slot, source, column in plan.seals.tolist():
            rows = (
                new_rows[sequence][column : column + self.page] if source < 0 else self.open[source]
            )
            assert len(rows) == self.page and None not in rows, "a page sealed before it is full"
            self.sealed[slot] = list(rows)


@dataclass
class Sequence:
    """The expected content of a sequence: its tokens, and its maximum length since the last
    decode.
    """

    tokens: list[int]
    pending_padding: int = 0  # padding columns not yet appended


class IntegerCache(StateHolder):
    """A cache of page tables alone, and its distance from the maximum length."""

    back = 0

    def __init__(self, pools: CachePools) -> None:
        groups = pools.layer_groups
        super().__init__(CacheState(CacheLayout(groups, tuple(range(len(groups)))), pools))

    @property
    def page_tables(self) -> tuple[PageTable, ...]:
        return self.state.page_tables

    def append(self, batch: int, count: int, *, new_rows_dense: bool) -> None:
        """Append to all layers."""
        forward = self.begin_append(0, count)
        groups = range(len(self.state.pools))
        for group in groups:
            forward.plan_append(group, batch, count, new_rows_dense=new_rows_dense)
        for group in groups:
            self.commit_layer(forward, group)

    def replace_tables(
        self, page_tables: SequenceOf[PageTable], allocated_slots: SequenceOf[GroupSlots] = ()
    ) -> None:
        with self.state.pools.guard_counts():
            self.adopt(replace(self.state, page_tables=tuple(page_tables)), allocated_slots)


class Life:
    """Several caches of one layer group that share pools."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.group = self.draw_group()
        self.pools = CachePools([self.group])
        self.rows = Rows(self.group.page)
        self.idle = self.make_cache()  # a second holder, so that pages are not moved
        self.caches: list[tuple[IntegerCache, list[Sequence]]] = [(self.make_cache(), [])]
        self.token = 0
        self.history = [str(self.group)]

    def draw_group(self) -> LayerGroup:
        pick = self.random.choice
        tail = pick([None, 0, 1, 3, 9])
        return LayerGroup(
            Paging(pick([1, 2, 4, 8]), tail, pick([0, 0, 0, 13]) if tail is not None else 0),
            window=pick([None, None, 1, 5, 12]),
            sinks=pick([0, 0, 1, 3, 9]),
            slack=pick([0, 2, 5]),
            step=pick([0, 8]),
        )

    def make_cache(self) -> IntegerCache:
        return IntegerCache(self.pools)

    def run(self, steps: int) -> None:
        verbs = [self.append] * 4 + [
            self.abandon_forward,
            self.rewind,
            self.select,
            self.fork,
            self.merge,
            self.drop_cache,
        ]
        for _ in range(steps):
            verb = self.random.choice(verbs)
            self.history.append(verb.__name__)
            try:
                verb()
                for cache, sequences in self.caches:
                    check_newest_token(self.group, self.rows, cache, sequences)
                self.pools.check()
            except Exception as error:
                raise AssertionError("; ".join(self.history)) from error

    def pick_cache(self) -> tuple[IntegerCache, list[Sequence]]:
        return self.random.choice(self.caches)

    def append(self) -> None:
        cache, sequences = self.pick_cache()
        plan, new_rows = self.start_forward(cache, sequences)
        check_forward(self.group, self.rows, plan, new_rows, sequences)
        assert cache.forward is not None
        cache.commit_layer(cache.forward, 0)
        cache.back = max(0, cache.back - plan.num_new)

    def abandon_forward(self) -> None:
        """Start a forward, with or without writes, and abandon it."""
        cache, sequences = self.pick_cache()
        before = [Sequence(list(s.tokens), s.pending_padding) for s in sequences]
        self.start_forward(cache, sequences)
        sequences[:] = before
        cache.rollback()

    def start_forward(
        self, cache: IntegerCache, sequences: list[Sequence]
    ) -> tuple[AppendPlan, list[list[Row]]]:
        count = self.random.choice([1, 1, 1, 2, 3, 7, 20])
        if not sequences:
            batch = self.random.randint(1, 3)
            sequences += [Sequence([], self.random.choice([0, 0, 2, 9])) for _ in range(batch)]
        dense = count > 1 and self.random.random() < 0.5
        start = [s.pending_padding for s in sequences] if cache.state.is_empty else None
        plan = cache.begin_append(0, count).plan_append(
            0, len(sequences), count, start, new_rows_dense=dense
        )
        self.history[-1] += f"({count}, {dense})"
        new_rows: list[list[Row]] = []
        for sequence in sequences:
            new = list(range(self.token, self.token + count))
            self.token += count
            new_rows.append([(token, False) for token in new])
            skipped = min(sequence.pending_padding, count)
            sequence.pending_padding -= skipped
            sequence.tokens = sequence.tokens + new[skipped:]
        self.rows.apply(plan, new_rows)
        return plan, new_rows

    def rewind(self) -> None:
        cache, sequences = self.pick_cache()
        if not cache.state.batch:
            return
        page_table = cache.state.page_tables[0]
        num_rewound = self.random.choice([0, 1, 2, 5, 11])
        new_length = np.maximum(page_table.lengths - num_rewound, -page_table.padding)
        if not mask_reachable(page_table, new_length).all():
            assert num_rewound > self.group.slack or cache.back, f"{num_rewound} tokens back"
            return
        self.history[-1] += f"({num_rewound})"
        plan = rewind_table(page_table, new_length, self.pools[0])
        assert is_exact_rewind(page_table, new_length) == (len(plan.reopens) == 0)
        if cache.back + num_rewound <= self.group.slack:
            assert is_exact_rewind(page_table, new_length), f"{num_rewound} tokens back"
        cache.back += num_rewound
        self.rows.apply(plan, [])
        cache.replace_tables([plan.new_table], [(0, plan.allocated_slots)])
        for sequence, length in zip(sequences, new_length.tolist(), strict=True):
            sequence.tokens = sequence.tokens[: max(length, 0)]
            sequence.pending_padding = max(-length, 0)

    def select(self) -> None:
        cache, sequences = self.pick_cache()
        if not sequences:
            return
        index = [self.random.randrange(len(sequences)) for _ in range(self.random.randint(1, 3))]
        cache.replace_tables([select_sequences(cache.state.page_tables[0], np.array(index))])
        sequences[:] = [
            Sequence(list(sequences[i].tokens), sequences[i].pending_padding) for i in index
        ]

    def fork(self) -> None:
        """Fork a cache, and drop one if there are too many."""
        cache, sequences = self.pick_cache()
        clone = self.make_cache()
        clone.back = cache.back
        if cache.state.batch:
            page_table = cache.state.page_tables[0]
            clone.replace_tables([select_sequences(page_table, np.arange(page_table.batch))])
        self.caches.append(
            (clone, [Sequence(list(s.tokens), s.pending_padding) for s in sequences])
        )
        if len(self.caches) > 3:
            del self.caches[self.random.randrange(3)]

    def merge(self) -> None:
        """Merge all sequences that are past their padding."""
        filled = [
            (cache, s) for cache, s in self.caches if s and all(not x.pending_padding for x in s)
        ]
        if not filled or sum(len(s) for _, s in filled) > 4:
            return
        merged = self.make_cache()
        merged.back = max(cache.back for cache, _ in filled)
        merged.replace_tables([concat_tables([cache.state.page_tables[0] for cache, _ in filled])])
        copies = [Sequence(list(x.tokens)) for _, s in filled for x in s]
        self.caches.append((merged, copies))
        if len(self.caches) > 3:
            del self.caches[self.random.randrange(3)]

    def drop_cache(self) -> None:
        cache, sequences = self.pick_cache()
        cache.replace_tables([])
        cache.back = 0
        sequences.clear()


def check_newest_token(
    group: LayerGroup, rows: Rows, cache: IntegerCache, sequences: list[Sequence]
) -> None:
    """Compare the rows that the newest token of each sequence sees, sealed or dense."""
    if not cache.state.page_tables:
        assert not sequences
        return
    page_table = cache.state.page_tables[0]
    assert page_table.lengths.tolist() == [len(s.tokens) - s.pending_padding for s in sequences]
    for index, sequence in enumerate(sequences):
        if sequence.tokens:
            query = len(sequence.tokens) - 1
            reads_visible_rows(group, rows, page_table, index, sequence.tokens, query, None, False)


def check_forward(
    group: LayerGroup,
    rows: Rows,
    plan: AppendPlan,
    new_rows: list[list[Row]],
    sequences: list[Sequence],
) -> None:
    """Compare the rows that every query of a forward sees."""
    for index, sequence in enumerate(sequences):
        length = len(sequence.tokens)
        for query in range(max(0, length - plan.num_new), length):
            sequence_new_rows = new_rows[index] if plan.reads_new_rows else None
            dense = plan.reads_new_rows and plan.new_rows_dense
            reads_visible_rows(
                group,
                rows,
                plan.read_table,
                index,
                sequence.tokens,
                query,
                sequence_new_rows,
                dense,
            )


def reads_visible_rows(
    group: LayerGroup,
    rows: Rows,
    page_table: PageTable,
    index: int,
    tokens: list[int],
    query: int,
    new_rows: list[Row] | None,
    dense: bool,
) -> None:
    """Whether the query at this position finds every visible row in the expected state."""
    page, length = group.page, len(tokens)
    first_new = length if new_rows is None else length - len(new_rows)
    due = group.paging.count_due_pages(query + 1) * page
    for key in range(query + 1):
        visible = group.window is None or query - key < group.window or key < group.sinks
        if not visible:
            continue
        position, row = divmod(key, page)
        as_it_came = dense and key >= first_new
        if key >= group.sinks and key < due and not as_it_came:
            assert page_table.first_sealed[index] <= position < page_table.stop_sealed[index], (
                f"page {position}"
            )
            row_in_page = rows.sealed[int(page_table.sealed_table[index, position])][row]
        elif new_rows is not None and key >= max(first_new, 0):
            row_in_page = new_rows[key - first_new]
        else:
            opened = page_table.first_open[index] <= position < page_table.stop_open[index]
            assert opened or position < group.num_sink_pages, f"page {position} is not open"
            row_in_page = rows.open[int(page_table.open_table[index, position])][row]
        assert row_in_page is not None and row_in_page[0] == tokens[key], (
            f"sequence {index}, query {query}, position {key}: {row_in_page}, not {tokens[key]}"
        )
