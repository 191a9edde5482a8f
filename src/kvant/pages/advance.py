"""Transitions of page tables: append, rewind, select, merge and relocate, on integers alone.

These functions allocate slots from pools. They never see rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvant.lazy import Derived
from kvant.page_table import (
    FIRST_OPEN,
    FIRST_SEALED,
    LENGTH,
    NO_SLOTS,
    NUM_WRITE_COLUMNS,
    PADDING,
    PAIR_SOURCE,
    PAIR_TARGET,
    STOP_SEALED,
    WRITE_COUNT,
    WRITE_ROW,
    WRITE_SLOT,
    WRITE_TABLE,
    AppendPlan,
    Bools,
    Ints,
    LayerGroup,
    PageTable,
    expand_ranges,
)
from kvant.pages.pool import Pool, Pools

MAX_DRAFT_COLUMNS = 16  # up to this length, a chunk is read from its pages, as single tokens are


def advance(
    page_table: PageTable, count: int, pools: Pools, *, new_rows_dense: bool = False
) -> AppendPlan:
    """Append `count` columns to every sequence and return the plan.

    With `new_rows_dense`, queries of the chunk read all rows of the chunk dense.
    """
    group, page = page_table.layer_group, page_table.layer_group.page
    old_lengths, old_rows = page_table.lengths, page_table.seq_lens
    old_first, old_stop, old_open = (
        page_table.numbers[:, column] for column in (FIRST_SEALED, STOP_SEALED, FIRST_OPEN)
    )
    numbers = page_table.numbers.copy()
    numbers[:, LENGTH] = new_lengths = old_lengths + count
    new_rows = np.maximum(new_lengths, 0)
    numbers[:, FIRST_OPEN] = first_open = np.maximum(old_open, group.find_first_open(new_lengths))
    # Sealed pages start at `sealed_from`. If none is sealed yet, the first will be an open page.
    sealed_from = np.where(old_stop <= old_first, np.maximum(old_first, old_open), old_first)
    first_sealed = np.maximum(sealed_from, group.find_first_sealed(new_lengths))
    numbers[:, FIRST_SEALED] = first_sealed
    due = group.paging.count_due_pages_each(new_rows)
    numbers[:, STOP_SEALED] = np.maximum(np.maximum(old_stop, due), first_sealed)
    new_page = -(-old_rows // page)  # the first page without old rows
    open_table, new_slots, copies, writes = _plan_open_pages(
        page_table, new_lengths, first_open, pools.open
    )

    # Seal begin..edge and retained_from..due; the window drops the pages between them unread.
    begin = np.maximum(old_stop, old_open)
    edge = np.maximum(begin, np.minimum(due, new_page) if new_rows_dense else due)
    retained_from = np.maximum(edge, first_sealed)
    seal_tables, seal_pages = _concat_pairs(
        expand_ranges(begin, edge), expand_ranges(retained_from, due)
    )
    sealed_table = _widen_table(page_table.sealed_table, int(due.max(initial=0)))
    sealed_table[expand_ranges(edge, np.minimum(retained_from, due))] = 0  # never read
    sealed_table[seal_tables, seal_pages] = slots = pools.sealed.allocate(len(seal_tables))
    seals = _plan_seals(seal_tables, seal_pages, slots, page_table, open_table)

    # Slots to free after all layers have written: pages before the window, closed pages, sources.
    sealed_tables, sealed_pages = _concat_pairs(
        page_table.list_sealed_pages(), (seal_tables, seal_pages)
    )
    is_freed = sealed_pages < first_sealed[sealed_tables]
    closed_pages = expand_ranges(old_open, np.minimum(first_open, page_table.stop_open))
    holds_sinks = closed_pages[1] < group.num_sink_pages
    closed_pages = closed_pages[0][~holds_sinks], closed_pages[1][~holds_sinks]
    freed = (
        np.concatenate([open_table[closed_pages], copies[:, PAIR_SOURCE]]),
        sealed_table[sealed_tables, sealed_pages][is_freed],
    )

    steady_tokens = _count_steady_tokens(group, new_lengths)
    new_table = PageTable(
        group, numbers, sealed_table, open_table, page_table.tables_per_sequence, steady_tokens
    )
    read_numbers = numbers.copy()  # of the queries, which still read pages that are freed
    read_numbers[:, FIRST_OPEN] = old_open
    has_sealed = np.maximum(old_stop, edge) > sealed_from
    read_numbers[:, FIRST_SEALED] = np.where(has_sealed, sealed_from, first_sealed)
    frees_nothing = not (len(holds_sinks) or len(freed[1]))  # holds_sinks: by closed page
    read_table = (
        new_table if frees_nothing else replace(new_table, numbers=read_numbers, derived=Derived())
    )
    return AppendPlan(
        old_table=page_table,
        read_table=read_table,
        new_table=new_table,
        num_new=count,
        new_rows_dense=new_rows_dense,
        copies=copies,
        writes=writes,
        seals=seals,
        allocated_slots=(np.concatenate([new_slots, copies[:, PAIR_TARGET]]), slots),
        freed_slots=freed,
        reads_new_rows=_must_read_new_rows(
            count, (old_rows // page < first_open) | (new_rows_dense & (due * page > old_rows))
        ),
        pool_sizes=(pools.open.size, pools.sealed.size),
    )


def _plan_open_pages(
    page_table: PageTable, new_lengths: Ints, first_open: Ints, pool: Pool
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the new open table, the slots allocated for it, and the copies and writes.

    New pages get slots. The last, partly filled page of a sequence is copied first if it is shared.
    """
    page = page_table.layer_group.page
    old_lengths = page_table.lengths
    old_rows = page_table.seq_lens
    new_rows = np.maximum(new_lengths, 0)
    new_page, stop = -(-old_rows // page), -(-new_rows // page)
    table = _widen_table(page_table.open_table, int(stop.max(initial=0)))
    sinks = np.minimum(np.minimum(page_table.layer_group.num_sink_pages, first_open), stop)
    tables, page_numbers = _concat_pairs(
        expand_ranges(new_page, sinks), expand_ranges(np.maximum(first_open, new_page), stop)
    )
    new_slots = pool.allocate(len(tables))
    partial = np.flatnonzero((old_rows % page != 0) & (new_lengths > old_lengths))
    partial_pages = old_rows[partial] // page
    old_slots = table[partial, partial_pages]
    to_copy = _find_copies(old_slots, old_rows[partial], pool)
    copies = np.zeros((len(to_copy), 2), np.int64)
    if len(to_copy):
        table = table.copy()
        copies[:, PAIR_SOURCE] = old_slots[to_copy]
        copies[:, PAIR_TARGET] = pool.allocate(len(copies))
        table[partial[to_copy], partial_pages[to_copy]] = copies[:, PAIR_TARGET]
    table[tables, page_numbers] = new_slots

    # Write to the partly filled pages, and to the new pages that are retained.
    tables = np.concatenate([partial, tables])
    page_numbers = np.concatenate([partial_pages, page_numbers])
    row = np.maximum(old_rows[tables] - page_numbers * page, 0)
    end = np.minimum(new_rows[tables] - page_numbers * page, page)
    column = page_numbers * page + row - old_lengths[tables]
    return (
        table,
        new_slots,
        copies,
        np.stack([tables, table[tables, page_numbers], row, end - row, column], 1),
    )


def _find_copies(slots: Ints, lengths: Ints, pool: Pool) -> Ints:
    """Return the indices of the pages to copy before rows are added: the shared ones.

    If only sequences of this cache share a page, all but the longest get a copy. The longest writes
    in place: after the rows of the others, so a failed forward leaves every row intact.
    """
    must_copy = pool.mask_shared(slots)
    if must_copy.any():
        order = np.lexsort((-lengths, slots))  # by page, the longest first
        _, first, count = np.unique(slots[order], return_index=True, return_counts=True)
        longest = order[first]
        must_copy[longest[pool.ref_counts[slots[longest]] == count]] = False
    return np.flatnonzero(must_copy)


def _must_read_new_rows(count: int, needed_by_table: Bools) -> bool:
    """Return whether attention reads the appended tensors instead of the pages.

    A short chunk whose rows are all in open pages is read from them, as single tokens are.
    """
    return count > 1 and (count > MAX_DRAFT_COLUMNS or bool(needed_by_table.any()))


def _plan_seals(
    table_indices: Ints, page_numbers: Ints, slots: Ints, page_table: PageTable, open_table: Ints
) -> Ints:
    """Return the `seals` of a plan. The source of a page that has new rows only is -1."""
    first = page_numbers * page_table.layer_group.page
    source = np.full(len(table_indices), -1)
    is_stored = first < page_table.seq_lens[table_indices]
    source[is_stored] = open_table[table_indices[is_stored], page_numbers[is_stored]]
    return np.stack([table_indices, slots, source, first - page_table.lengths[table_indices]], 1)


def advance_steadily(page_table: PageTable, count: int) -> AppendPlan:
    """Append `count` columns, at most the `steady_tokens` of a table: only lengths change."""
    numbers = page_table.numbers.copy()
    numbers[:, LENGTH] += count
    writes = _plan_next_writes(page_table, count)
    new_table = PageTable(
        page_table.layer_group,
        numbers,
        page_table.sealed_table,
        page_table.open_table,
        page_table.tables_per_sequence,
        page_table.steady_tokens - count,
        last_writes=writes,
        derived_from_tables=page_table.derived_from_tables,
    )
    return AppendPlan(page_table, new_table, new_table, count, writes=writes)


def _plan_next_writes(page_table: PageTable, count: int) -> Ints:
    """Return the writes of the next `count` tokens, for sequences past their padding."""
    if (last_writes := page_table.last_writes) is not None:  # the same pages, some rows later
        writes = last_writes.copy()
        writes[:, WRITE_ROW] += last_writes[:, WRITE_COUNT]
    else:
        lengths, page = page_table.lengths, page_table.layer_group.page
        tables = np.flatnonzero(lengths >= 0)
        writes = np.zeros((len(tables), NUM_WRITE_COLUMNS), np.int64)
        writes[:, WRITE_TABLE] = tables
        writes[:, WRITE_SLOT] = page_table.open_table[tables, lengths[tables] // page]
        writes[:, WRITE_ROW] = lengths[tables] % page
    writes[:, WRITE_COUNT] = count
    return writes


def _count_steady_tokens(layer_group: LayerGroup, lengths: Ints) -> int:
    """Return how many of the next tokens change only lengths, unless a page is shared."""
    steady_tokens = min(
        int(((offset - lengths - 1) % layer_group.page).min(initial=layer_group.page))
        for offset in layer_group.event_offsets
    )
    for threshold in (
        layer_group.paging.dense_until,
        layer_group.paging.dense_until + layer_group.slack,
    ):
        below = lengths[lengths < threshold]
        if len(below):
            steady_tokens = min(steady_tokens, int((threshold - below - 1).min()))
    return steady_tokens


def rewind_table(page_table: PageTable, lengths: Ints, pools: Pools) -> AppendPlan:
    """Shorten sequences to `lengths` and return the plan, which decodes pages to reopen them."""
    group = page_table.layer_group
    numbers = page_table.numbers.copy()
    numbers[:, LENGTH] = lengths
    rows = np.maximum(lengths, 0)
    due, stop = group.paging.count_due_pages_each(rows), -(-rows // group.page)
    numbers[:, STOP_SEALED] = np.minimum(page_table.stop_sealed, due)
    numbers[:, FIRST_OPEN] = _find_first_reopened(page_table, due)
    reopened = np.maximum(numbers[:, FIRST_OPEN], group.num_sink_pages)
    tables, page_numbers = expand_ranges(reopened, np.minimum(page_table.first_open, stop))
    slots = pools.open.allocate(len(tables))
    open_table = page_table.open_table
    if len(tables):
        open_table = open_table.copy()
        open_table[tables, page_numbers] = slots
    opens = np.stack([page_table.sealed_table[tables, page_numbers], slots], 1)
    numbers[rows == 0, FIRST_SEALED:] = 0  # empty sequences: all columns after PADDING
    partial = np.flatnonzero(rows % group.page)
    is_exclusive = not pools.open.mask_shared(
        open_table[partial, rows[partial] // group.page]
    ).any()
    new_table = PageTable(
        group,
        numbers,
        page_table.sealed_table,
        open_table,
        page_table.tables_per_sequence,
        steady_tokens=_count_steady_tokens(group, lengths) if is_exclusive else 0,
    )
    return AppendPlan(
        page_table, new_table, new_table, 0, reopens=opens, allocated_slots=(slots, slots[:0])
    )


def mask_reachable(page_table: PageTable, lengths: Ints) -> Bools:
    """Return a mask of the sequences that can be rewound to `lengths`.

    They still have all rows that the newest remaining token sees.
    """
    window = page_table.layer_group.window
    first_needed = page_table.pruned_before if window is None else np.maximum(lengths - window, 0)
    first_retained = np.maximum(
        page_table.first_row, page_table.layer_group.find_first_retained(page_table.lengths)
    )
    is_retained = (first_needed >= first_retained) & (lengths >= page_table.pruned_at)
    reachable: Bools = (lengths <= 0) | (lengths == page_table.lengths) | is_retained
    return reachable


def is_exact_rewind(page_table: PageTable, lengths: Ints) -> bool:
    """Return whether a rewind to `lengths` needs no decoded rows."""
    group, rows = page_table.layer_group, np.maximum(lengths, 0)
    first_open = np.maximum(
        _find_first_reopened(page_table, group.paging.count_due_pages_each(rows)),
        group.num_sink_pages,
    )
    return bool((first_open >= np.minimum(page_table.first_open, -(-rows // group.page))).all())


def _find_first_reopened(page_table: PageTable, due: Ints) -> Ints:
    """Return the first open page after a rewind that leaves `due` pages due.

    Nothing is reopened if the sealed pages end before the first open page.
    """
    reopened = np.minimum(page_table.first_open, np.maximum(due, page_table.first_sealed))
    return np.where(
        page_table.stop_sealed >= page_table.first_open, reopened, page_table.first_open
    )


def select_sequences(page_table: PageTable, indices: Ints) -> PageTable:
    """Return the table of the sequences `indices`, in this order, repeats allowed."""
    tables = page_table.expand_to_tables(indices)
    return PageTable(
        page_table.layer_group,
        page_table.numbers[tables],
        page_table.sealed_table[tables],
        page_table.open_table[tables],
        page_table.tables_per_sequence,
    )


def concat_tables(page_tables: Sequence[PageTable]) -> PageTable:
    """Concatenate the sequences of tables that hold slots of the same pools."""
    numbers = np.concatenate([page_table.numbers for page_table in page_tables])
    numbers[:, PADDING] = 0
    sealed_table = _concat_padded([page_table.sealed_table for page_table in page_tables])
    open_table = _concat_padded([page_table.open_table for page_table in page_tables])
    return PageTable(
        page_tables[0].layer_group,
        numbers,
        sealed_table,
        open_table,
        page_tables[0].tables_per_sequence,
    )


def _concat_padded(tables: Sequence[Ints]) -> Ints:
    """Concatenate tables, padded to the same width."""
    width = max(table.shape[1] for table in tables)
    return np.concatenate([np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in tables])


def _widen_table(table: Ints, width: int) -> Ints:
    """Return `table` with at least `width` entries per row."""
    old_width = table.shape[1]
    if width <= old_width:
        return table
    wide = np.zeros((len(table), max(width, 2 * old_width, 8)), np.int64)
    wide[:, :old_width] = table
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
    """Return a table with these `numbers` whose pages have new slots, in sequence order.

    A sequence that starts with the tokens of `prefix` shares its full pages.
    """
    no_pages = np.zeros((len(numbers), 0), np.int64)
    page_table = PageTable(layer_group, numbers, no_pages, no_pages, tables_per_sequence)
    if prefix is None:
        return relocate_table(page_table, pools.open, pools.sealed)
    shared_range = _find_common_pages(page_table, prefix)
    tables = [
        _allocate_slots(pages, pool, 1, *((table[0], *shared_range) if is_shared else ()))
        for pages, pool, table, is_shared in (
            (page_table.list_open_pages(), pools.open, prefix.open_table, not layer_group.seals),
            (page_table.list_sealed_pages(), pools.sealed, prefix.sealed_table, layer_group.seals),
        )
    ]
    return replace(page_table, open_table=tables[0], sealed_table=tables[1])


def share_prefix_pages(page_table: PageTable, prefix: PageTable) -> PageTable:
    """Return the table of a sequence in which the full pages of `prefix` have its slots."""
    seals = page_table.layer_group.seals
    pages = page_table.list_sealed_pages() if seals else page_table.list_open_pages()
    page_numbers = np.intersect1d(np.arange(*_find_common_pages(page_table, prefix)), pages[1])
    table = (page_table.sealed_table if seals else page_table.open_table).copy()
    table[0, page_numbers] = (prefix.sealed_table if seals else prefix.open_table)[0, page_numbers]
    return (
        replace(page_table, sealed_table=table) if seals else replace(page_table, open_table=table)
    )


def _find_common_pages(page_table: PageTable, prefix: PageTable) -> tuple[int, int]:
    """Return the range of full pages that `page_table` and its prefix have in common."""
    if page_table.layer_group.seals:
        return int(prefix.first_sealed[0]), int(prefix.stop_sealed[0])
    rows = min(int(prefix.seq_lens[0]), int(page_table.seq_lens[0]))
    return int(prefix.first_open[0]), rows // page_table.layer_group.page


def list_allocated_slots(page_table: PageTable, prefix: PageTable | None) -> tuple[Ints, Ints]:
    """Return the open and sealed slots of a new table, those shared with `prefix` excluded."""
    open_slots, sealed_slots = page_table.list_open_slots(), page_table.list_sealed_slots()
    if prefix is None:
        return open_slots, sealed_slots
    return np.setdiff1d(open_slots, prefix.list_open_slots()), np.setdiff1d(
        sealed_slots, prefix.list_sealed_slots()
    )


def relocate_table(
    page_table: PageTable, open_pool: Pool | None, sealed_pool: Pool | None
) -> PageTable:
    """Return the table with its pages in new slots of these pools; None keeps their slots."""
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
    """Return a page table for `pages`.

    Pages in [first_shared, stop_shared) use `prefix_slots`; the others are allocated.
    """
    tables, page_numbers = pages
    table = np.zeros((num_tables, int(page_numbers.max(initial=-1)) + 1), np.int64)
    is_shared = (page_numbers >= first_shared) & (page_numbers < stop_shared)
    table[tables[is_shared], page_numbers[is_shared]] = prefix_slots[page_numbers[is_shared]]
    table[tables[~is_shared], page_numbers[~is_shared]] = pool.allocate(int((~is_shared).sum()))
    return table
