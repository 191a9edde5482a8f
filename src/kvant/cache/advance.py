"""From one extent to the next: pure integers. Slots are taken from pools, rows are not known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvant.cache.pool import Pool
from kvant.page_table import (
    FIRST_OPEN,
    FIRST_SEALED,
    LENGTH,
    NO_SLOTS,
    PADDING,
    STOP_SEALED,
    AppendPlan,
    Bools,
    Ints,
    LayerGroup,
    PageTable,
    expand_ranges,
)

MAX_DRAFT_COLUMNS = (
    16  # columns of a draft, whose rows are read from where those of single tokens are
)
NEXT_ROW_STEP = np.array([0, 0, 1, 0, 0])  # to be added to writes


class Pools(NamedTuple):
    """The slots of the open and of the sealed pages of a kind."""

    open: Pool
    sealed: Pool

    @classmethod
    def make(cls, layer_group: LayerGroup) -> Pools:
        step = max(1, layer_group.step // layer_group.page)
        return cls(Pool(step), Pool(step))

    @property
    def is_shared(self) -> bool:
        """Is there more than one who holds slots?"""
        return len(self.open.holders) > 1

    def copy(self) -> Pools:
        """The same counts, to try something out."""
        return Pools(self.open.copy(), self.sealed.copy())

    def add_references(self, page_table: PageTable) -> None:
        """Count all slots of an extent once more."""
        self.open.add_references(page_table.list_open_slots())
        self.sealed.add_references(page_table.list_sealed_slots())

    def drop_references(self, open_slots: Ints, sealed_slots: Ints) -> None:
        self.open.drop_references(open_slots)
        self.sealed.drop_references(sealed_slots)


def advance(
    page_table: PageTable, count: int, pools: Pools, *, new_rows_dense: bool = False
) -> AppendPlan:
    """`count` more columns of every sequence. `dense`: they all see each other as they came."""
    kind, old = page_table.layer_group, page_table.numbers
    page, before = kind.page, page_table.lengths
    numbers = old.copy()
    numbers[:, LENGTH] = after = before + count
    seen, rows = page_table.seq_lens, np.maximum(after, 0)
    first_open = numbers[:, FIRST_OPEN] = np.maximum(
        page_table.first_open, kind.find_first_open(after)
    )
    # Where none is sealed, none before the open ones will ever be.
    none = page_table.stop_sealed <= page_table.first_sealed
    begins = np.where(
        none, np.maximum(page_table.first_sealed, page_table.first_open), page_table.first_sealed
    )
    first_sealed = np.maximum(begins, kind.find_first_sealed(after))
    numbers[:, FIRST_SEALED] = first_sealed
    due = kind.paging.count_due_pages_each(rows)
    numbers[:, STOP_SEALED] = np.maximum(np.maximum(page_table.stop_sealed, due), first_sealed)
    new_page = -(-seen // page)
    open_table, fresh, copies, writes = _plan_open_pages(page_table, after, first_open, pools.open)

    # Sealed pages: those that fall due. A chunk that is dense to itself seals none that it lets go.
    begin = np.maximum(page_table.stop_sealed, page_table.first_open)
    edge = (
        np.maximum(begin, np.minimum(due, new_page)) if new_rows_dense else np.maximum(begin, due)
    )
    rest = np.maximum(edge, first_sealed)
    which, number = _concat_pairs(expand_ranges(begin, edge), expand_ranges(rest, due))
    sealed_table = _widen_table(page_table.sealed_table, int(due.max(initial=0)))
    sealed_table[expand_ranges(edge, np.minimum(rest, due))] = 0  # nobody reads these
    sealed_table[which, number] = slots = pools.sealed.allocate(len(which))
    seals = _plan_seals(which, number, slots, page_table, open_table)

    # What goes once all layers have written.
    there, at = _concat_pairs(page_table.list_sealed_pages(), (which, number))
    gone = at < first_sealed[there]
    closed = expand_ranges(page_table.first_open, np.minimum(first_open, page_table.stop_open))
    kept = closed[1] < kind.num_sink_pages
    closed = closed[0][~kept], closed[1][~kept]
    dropped = np.concatenate([open_table[closed], copies[:, 0]]), sealed_table[there, at][gone]

    calm = _count_steady_tokens(kind, after)
    state = PageTable(kind, numbers, sealed_table, open_table, page_table.tables_per_sequence, calm)
    seen_from = numbers.copy()
    seen_from[:, FIRST_OPEN] = page_table.first_open
    below = np.maximum(page_table.stop_sealed, edge) > begins
    seen_from[:, FIRST_SEALED] = np.where(below, begins, first_sealed)
    same = not (len(kept) or len(dropped[1]))  # queries see pages that close, sinks or not
    during = state if same else replace(state, numbers=seen_from, derived={})
    return AppendPlan(
        old_table=page_table,
        read_table=during,
        new_table=state,
        num_new=count,
        new_rows_dense=new_rows_dense,
        copies=copies,
        writes=writes,
        seals=seals,
        allocated_slots=(np.concatenate([fresh, copies[:, 1]]), slots),
        freed_slots=dropped,
        reads_new_rows=_must_read_new_rows(
            count, (seen // page < first_open) | (new_rows_dense & (due * page > seen))
        ),
        pool_sizes=(pools.open.size, pools.sealed.size),
    )


def _plan_open_pages(
    page_table: PageTable, new_lengths: Ints, first_open: Ints, pool: Pool
) -> tuple[Ints, Ints, Ints, Ints]:
    """The table of open pages, new slots in it, the pages to copy first, and where rows go.

    New pages get slots, and the page that a sequence has begun is copied where others keep it.
    """
    page, before, seen, rows = (
        page_table.layer_group.page,
        page_table.lengths,
        page_table.seq_lens,
        np.maximum(new_lengths, 0),
    )
    new_page, stop = -(-seen // page), -(-rows // page)
    table = _widen_table(page_table.open_table, int(stop.max(initial=0)))
    sinks = np.minimum(np.minimum(page_table.layer_group.num_sink_pages, first_open), stop)
    which, number = _concat_pairs(
        expand_ranges(new_page, sinks), expand_ranges(np.maximum(first_open, new_page), stop)
    )
    fresh = pool.allocate(len(which))
    begun = np.flatnonzero((seen % page != 0) & (new_lengths > before))
    begun_page = seen[begun] // page
    old_slots = table[begun, begun_page]
    copied = _find_copies(old_slots, seen[begun], pool)
    copies = np.zeros((len(copied), 2), np.int64)
    if len(copied):
        table = table.copy()
        copies[:, 0] = old_slots[copied]
        copies[:, 1] = pool.allocate(len(copies))
        table[begun[copied], begun_page[copied]] = copies[:, 1]
    table[which, number] = fresh

    # Rows go to new pages that stay, and to the page that is begun.
    which, number = np.concatenate([begun, which]), np.concatenate([begun_page, number])
    row = np.maximum(seen[which] - number * page, 0)
    end = np.minimum(rows[which] - number * page, page)
    column = number * page + row - before[which]
    return table, fresh, copies, np.stack([which, table[which, number], row, end - row, column], 1)


def _find_copies(slots: Ints, lengths: Ints, pool: Pool) -> Ints:
    """Find the pages to copy before rows are added to them: those with another holder.

    Where these sequences are all the holders of a page, the longest of them adds to it in place.
    Its rows lie behind those of the others, who still have theirs if the forward dies.
    """
    copied = pool.mask_shared(slots)
    if copied.any():
        order = np.lexsort((-lengths, slots))  # by page, the longest first
        _, first, count = np.unique(slots[order], return_index=True, return_counts=True)
        longest = order[first]
        copied[longest[pool.ref_counts[slots[longest]] == count]] = False
    return np.flatnonzero(copied)


def _must_read_new_rows(count: int, needed_by_table: Bools) -> bool:
    """Are rows read where they came? A few that lie in open pages are read as single tokens are."""
    return count > 1 and (count > MAX_DRAFT_COLUMNS or bool(needed_by_table.any()))


def _plan_seals(
    table_indices: Ints, page_numbers: Ints, slots: Ints, page_table: PageTable, open_table: Ints
) -> Ints:
    """From where pages are sealed: from open ones, or from rows that came just now, whole."""
    first = page_numbers * page_table.layer_group.page
    source = np.full(len(table_indices), -1)
    held = first < page_table.seq_lens[table_indices]
    source[held] = open_table[table_indices[held], page_numbers[held]]
    return np.stack([table_indices, slots, source, first - page_table.lengths[table_indices]], 1)


def advance_steadily(page_table: PageTable) -> AppendPlan:
    """One more column of a calm extent: it changes nothing but the lengths."""
    numbers = page_table.numbers.copy()
    numbers[:, LENGTH] += 1
    writes = (
        _plan_next_writes(page_table)
        if page_table.last_writes is None
        else page_table.last_writes + NEXT_ROW_STEP
    )
    after = PageTable(
        page_table.layer_group,
        numbers,
        page_table.sealed_table,
        page_table.open_table,
        page_table.tables_per_sequence,
        page_table.steady_tokens - 1,
        last_writes=writes,
        derived_from_tables=page_table.derived_from_tables,
    )
    return AppendPlan(page_table, after, after, 1, writes=writes)


def _plan_next_writes(page_table: PageTable) -> Ints:
    """Where the next token goes, of sequences whose padding is over."""
    lengths, page = page_table.lengths, page_table.layer_group.page
    which = np.flatnonzero(lengths >= 0)
    writes = np.zeros((len(which), 5), np.int64)
    writes[:, 0] = which
    writes[:, 1] = page_table.open_table[which, lengths[which] // page]
    writes[:, 2] = lengths[which] % page
    writes[:, 3] = 1
    return writes


def _count_steady_tokens(layer_group: LayerGroup, lengths: Ints) -> int:
    """How many tokens, one at a time, change nothing but the lengths."""
    calm = min(
        int(((event - lengths - 1) % layer_group.page).min(initial=layer_group.page))
        for event in layer_group.event_offsets
    )
    for at in (layer_group.paging.dense_until, layer_group.paging.dense_until + layer_group.slack):
        soon = lengths[lengths < at]
        if len(soon):
            calm = min(calm, int((at - soon - 1).min()))
    return calm


def rewind_table(page_table: PageTable, lengths: Ints, pools: Pools) -> AppendPlan:
    """Sequences go back to these lengths: from their dense rows, or from decoded ones."""
    kind = page_table.layer_group
    numbers = page_table.numbers.copy()
    numbers[:, LENGTH] = lengths
    rows = np.maximum(lengths, 0)
    due, stop = kind.paging.count_due_pages_each(rows), -(-rows // kind.page)
    numbers[:, STOP_SEALED] = np.minimum(page_table.stop_sealed, due)
    numbers[:, FIRST_OPEN] = _find_first_reopened(page_table, due)
    reopened = np.maximum(numbers[:, FIRST_OPEN], kind.num_sink_pages)
    which, number = expand_ranges(reopened, np.minimum(page_table.first_open, stop))
    slots = pools.open.allocate(len(which))
    open_table = page_table.open_table
    if len(which):
        open_table = open_table.copy()
        open_table[which, number] = slots
    opens = np.stack([page_table.sealed_table[which, number], slots], 1)
    numbers[rows == 0, FIRST_SEALED:] = 0
    after = PageTable(
        kind, numbers, page_table.sealed_table, open_table, page_table.tables_per_sequence
    )
    return AppendPlan(
        page_table, after, after, 0, reopens=opens, allocated_slots=(slots, slots[:0])
    )


def mask_reachable(page_table: PageTable, lengths: Ints) -> Bools:
    """Are all rows there that the newest token sees once sequences are of these lengths?"""
    window = page_table.layer_group.window
    low = page_table.pruned_before if window is None else np.maximum(lengths - window, 0)
    held = np.maximum(
        page_table.first_row, page_table.layer_group.find_first_retained(page_table.lengths)
    )
    back = (low >= held) & (lengths >= page_table.pruned_at)
    there: Bools = (lengths <= 0) | (lengths == page_table.lengths) | back
    return there


def is_exact_rewind(page_table: PageTable, lengths: Ints) -> bool:
    """Would a rewind find all rows as they came?"""
    kind, rows = page_table.layer_group, np.maximum(lengths, 0)
    low = np.maximum(
        _find_first_reopened(page_table, kind.paging.count_due_pages_each(rows)),
        kind.num_sink_pages,
    )
    return bool((low >= np.minimum(page_table.first_open, -(-rows // kind.page))).all())


def _find_first_reopened(page_table: PageTable, due: Ints) -> Ints:
    """The first page that is open where so many are due: those between were sealed."""
    back = np.minimum(page_table.first_open, np.maximum(due, page_table.first_sealed))
    return np.where(page_table.stop_sealed >= page_table.first_open, back, page_table.first_open)


def select_sequences(page_table: PageTable, indices: Ints) -> PageTable:
    """These sequences, in this order, with repeats if there are any."""
    at = page_table.expand_to_tables(indices)
    return PageTable(
        page_table.layer_group,
        page_table.numbers[at],
        page_table.sealed_table[at],
        page_table.open_table[at],
        page_table.tables_per_sequence,
    )


def concat_tables(page_tables: Sequence[PageTable]) -> PageTable:
    """The sequences of all of these side by side; they must hold slots of the same pools."""
    numbers = np.concatenate([extent.numbers for extent in page_tables])
    numbers[:, PADDING] = 0
    sealed = _concat_padded([extent.sealed_table for extent in page_tables])
    opened = _concat_padded([extent.open_table for extent in page_tables])
    return PageTable(
        page_tables[0].layer_group, numbers, sealed, opened, page_tables[0].tables_per_sequence
    )


def _concat_padded(tables: Sequence[Ints]) -> Ints:
    """Tables of several extents as one, all of one width."""
    width = max(table.shape[1] for table in tables)
    return np.concatenate([np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in tables])


def _widen_table(table: Ints, width: int) -> Ints:
    """A table with so many entries a sequence, or more."""
    have = table.shape[1]
    if width <= have:
        return table
    wide = np.zeros((len(table), max(width, 2 * have, 8)), np.int64)
    wide[:, :have] = table
    return wide


def _concat_pairs(first: tuple[Ints, Ints], second: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])


def allocate_table(
    layer_group: LayerGroup,
    numbers: Ints,
    pools: Pools,
    prefix: PageTable | None = None,
    tables_per_sequence: int = 1,
) -> PageTable:
    """The extent whose pages lie in slots one after the other, in the order of their sequences.

    A sequence that begins with the same tokens as the one of `begun` shares whole pages with it.
    """
    blank = np.zeros((len(numbers), 0), np.int64)
    extent = PageTable(layer_group, numbers, blank, blank, tables_per_sequence)
    if prefix is None:
        return relocate_table(extent, pools.open, pools.sealed)
    both = _find_common_pages(extent, prefix)
    tables = [
        _allocate_slots(pages, pool, 1, *((table[0], *both) if whole else ()))
        for pages, pool, table, whole in (
            (extent.list_open_pages(), pools.open, prefix.open_table, not layer_group.seals),
            (extent.list_sealed_pages(), pools.sealed, prefix.sealed_table, layer_group.seals),
        )
    ]
    return replace(extent, open_table=tables[0], sealed_table=tables[1])


def share_prefix_pages(page_table: PageTable, prefix: PageTable) -> PageTable:
    """The same sequence, whose whole pages are those of one with the same first tokens."""
    seals = page_table.layer_group.seals
    pages = page_table.list_sealed_pages() if seals else page_table.list_open_pages()
    number = np.intersect1d(np.arange(*_find_common_pages(page_table, prefix)), pages[1])
    table = (page_table.sealed_table if seals else page_table.open_table).copy()
    table[0, number] = (prefix.sealed_table if seals else prefix.open_table)[0, number]
    return (
        replace(page_table, sealed_table=table) if seals else replace(page_table, open_table=table)
    )


def _find_common_pages(page_table: PageTable, prefix: PageTable) -> tuple[int, int]:
    """The whole pages, from one to another, that two sequences with the same first tokens have."""
    if page_table.layer_group.seals:
        return int(prefix.first_sealed[0]), int(prefix.stop_sealed[0])
    rows = min(int(prefix.seq_lens[0]), int(page_table.seq_lens[0]))
    return int(prefix.first_open[0]), rows // page_table.layer_group.page


def list_allocated_slots(page_table: PageTable, prefix: PageTable | None) -> tuple[Ints, Ints]:
    """The slots, open and sealed, of an extent that was `placed`, but those that it shares."""
    opened, sealed = page_table.list_open_slots(), page_table.list_sealed_slots()
    if prefix is None:
        return opened, sealed
    return np.setdiff1d(opened, prefix.list_open_slots()), np.setdiff1d(
        sealed, prefix.list_sealed_slots()
    )


def relocate_table(
    page_table: PageTable, open_pool: Pool | None, sealed_pool: Pool | None
) -> PageTable:
    """The same pages in slots of other pools, one after the other; None: they stay."""
    open_table, sealed_table = page_table.open_table, page_table.sealed_table
    if open_pool is not None:
        open_table = _allocate_slots(page_table.list_open_pages(), open_pool, page_table.num_tables)
    if sealed_pool is not None:
        sealed_table = _allocate_slots(
            page_table.list_sealed_pages(), sealed_pool, page_table.num_tables
        )
    return PageTable(
        page_table.layer_group,
        page_table.numbers,
        sealed_table,
        open_table,
        page_table.tables_per_sequence,
    )


def _allocate_slots(
    pages: tuple[Ints, Ints],
    pool: Pool,
    num_tables: int,
    prefix_slots: Ints = NO_SLOTS[0],
    first_shared: int = 0,
    stop_shared: int = 0,
) -> Ints:
    """Slots for these pages: of a sequence that has `begun`, its own from `first` to `stop`."""
    which, number = pages
    table = np.zeros((num_tables, int(number.max(initial=-1)) + 1), np.int64)
    own = (number >= first_shared) & (number < stop_shared)
    table[which[own], number[own]] = prefix_slots[number[own]]
    table[which[~own], number[~own]] = pool.allocate(int((~own).sum()))
    return table


def bound_pages(layer_group: LayerGroup, length: int) -> tuple[int, int]:
    """The most pages, open and sealed, of a sequence on its way to a length, token by token.

    What is let go at a token is there until the next one. Numbers of pages repeat with the page
    once a window is full, and fall only where the first pages are sealed late.
    """
    late = min(length, layer_group.paging.dense_until + layer_group.slack)
    lengths = np.unique(
        np.concatenate(
            [
                _list_last_lengths(length, layer_group.page),
                _list_last_lengths(late, layer_group.page),
            ]
        )
    )
    first = layer_group.find_first_open(lengths - 1)
    stop = -(-lengths // layer_group.page)
    opened = stop - first + np.minimum(layer_group.num_sink_pages, first)
    sealed = layer_group.paging.count_due_pages_each(lengths) - layer_group.find_first_sealed(
        lengths - 1
    )
    return int(opened.max(initial=0)), max(0, int(sealed.max(initial=0)))


def bound_slots(layer_group: LayerGroup, lengths: Iterable[int]) -> tuple[int, int]:
    """The slots, open and sealed, of pools in which sequences came to these lengths like that."""
    pages = [bound_pages(layer_group, layer_group.capacity or length) for length in lengths]
    step = Pools.make(layer_group).open.step
    opened, sealed = (-(-sum(some) // step) * step for some in zip(*pages, strict=True))
    return opened, sealed


def bound_slots_when_shared(page_table: PageTable, coming: int) -> tuple[int, int]:
    """The most slots, open and sealed, that a cache holds on its way some tokens further.

    At once or one by one, and whoever else holds its pages: those of now may stay until the way is
    over, and the page that a sequence has begun is copied. The bound of a cache by itself is lower,
    see `most_slots`: it gives back what a chunk took.
    """
    kind, after = page_table.layer_group, np.maximum(page_table.lengths + coming, 0)
    came = -(-after // kind.page) - page_table.stop_open
    most = np.array([bound_pages(kind, length)[0] for length in after.tolist()])
    opened = np.minimum(came, most) + (after > page_table.seq_lens)
    due = np.maximum(kind.paging.count_due_pages_each(after) - page_table.stop_sealed, 0)
    here = (
        len(np.unique(page_table.list_open_slots())),
        len(np.unique(page_table.list_sealed_slots())),
    )
    spare = Pools.make(kind).open.step - 1
    return here[0] + int(opened.sum()) + spare, here[1] + int(due.sum()) + spare


def _list_last_lengths(length: int, page: int) -> Ints:
    return np.arange(max(1, length - 2 * page), length + 1)
