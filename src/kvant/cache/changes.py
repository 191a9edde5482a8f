"""From one extent to the next: pure integers. Slots are taken from pools, rows are not known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvant.cache.pool import Pool
from kvant.extent import (
    FIRST_OPEN,
    FIRST_SEALED,
    LENGTH,
    PADDING,
    STOP_SEALED,
    Bools,
    Change,
    Extent,
    Ints,
    Kind,
    ranges,
)


@dataclass(frozen=True)
class Pools:
    """The slots of the open and of the sealed pages of a kind."""

    open: Pool
    sealed: Pool

    @classmethod
    def of(cls, kind: Kind) -> Pools:
        step = max(1, kind.step // kind.page)
        return cls(Pool(step), Pool(step))

    def hold(self, extent: Extent) -> None:
        """Count all slots of an extent once more."""
        self.open.hold(extent.open_slots())
        self.sealed.hold(extent.sealed_slots())

    def drop(self, open_slots: Ints, sealed_slots: Ints) -> None:
        self.open.drop(open_slots)
        self.sealed.drop(sealed_slots)


def advanced(extent: Extent, count: int, pools: Pools, *, dense: bool = False) -> Change:
    """`count` more columns of every sequence. `dense`: they all see each other as they came."""
    if count == 1 and extent.calm:
        return _calmly(extent)
    kind, old = extent.kind, extent.numbers
    page, before = kind.page, extent.lengths
    numbers = old.copy()
    numbers[:, LENGTH] = after = before + count
    seen, rows = extent.rows, np.maximum(after, 0)
    first_open = numbers[:, FIRST_OPEN] = np.maximum(extent.first_open, kind.first_open(after))
    first_sealed = np.maximum(extent.first_sealed, kind.first_sealed(after))
    numbers[:, FIRST_SEALED] = first_sealed
    due = kind.paging.all_due(rows)
    numbers[:, STOP_SEALED] = np.maximum(np.maximum(extent.stop_sealed, due), first_sealed)
    new_page, stop = -(-seen // page), -(-rows // page)

    # Open pages: new ones get slots, and the one that is begun is copied where others hold it.
    open_table = _wide(extent.open, int(stop.max(initial=0)))
    sinks = np.minimum(np.minimum(kind.sink_pages, first_open), stop)
    which, number = _both(ranges(new_page, sinks), ranges(np.maximum(first_open, new_page), stop))
    fresh = pools.open.take(len(which))
    begun = np.flatnonzero((seen % page != 0) & (after > before))
    begun_page = seen[begun] // page
    old_slots = open_table[begun, begun_page]
    shared = pools.open.shared(old_slots)
    copies = np.zeros((int(shared.sum()), 2), np.int64)
    if shared.any():
        open_table = open_table.copy()
        copies[:, 0] = old_slots[shared]
        copies[:, 1] = pools.open.take(len(copies))
        open_table[begun[shared], begun_page[shared]] = copies[:, 1]
    open_table[which, number] = fresh

    # Rows go to new pages that stay, and to the page that is begun.
    which, number = np.concatenate([begun, which]), np.concatenate([begun_page, number])
    row = np.maximum(seen[which] - number * page, 0)
    end = np.minimum(rows[which] - number * page, page)
    column = number * page + row - before[which]
    writes = np.stack([which, open_table[which, number], row, end - row, column], 1)

    # Sealed pages: those that fall due. A chunk that is dense to itself seals none that it lets go.
    begin = np.maximum(extent.stop_sealed, extent.first_open)
    edge = np.maximum(begin, np.minimum(due, new_page)) if dense else np.maximum(begin, due)
    rest = np.maximum(edge, first_sealed)
    which, number = _both(ranges(begin, edge), ranges(rest, due))
    sealed_table = _wide(extent.sealed, int(due.max(initial=0)))
    holes = ranges(edge, np.minimum(rest, due))
    sealed_table[holes] = 0
    sealed_table[which, number] = slots = pools.sealed.take(len(which))
    came = number * page - before[which]
    from_open = number * page < seen[which]  # the others came just now, whole
    source = np.full(len(which), -1)
    source[from_open] = open_table[which[from_open], number[from_open]]
    seals = np.stack([which, slots, source, came], 1)

    # What goes once all layers have written.
    there, at = _both(extent.sealed_pages(), (which, number))
    gone = at < first_sealed[there]
    closed = ranges(extent.first_open, np.minimum(first_open, extent.stop_open))
    kept = closed[1] < kind.sink_pages
    closed = closed[0][~kept], closed[1][~kept]
    dropped = np.concatenate([open_table[closed], copies[:, 0]]), sealed_table[there, at][gone]

    calm = _calm(kind, after)
    state = Extent(kind, numbers, sealed_table, open_table, calm)
    seen_from = numbers.copy()
    seen_from[:, FIRST_OPEN] = extent.first_open
    below = np.maximum(extent.stop_sealed, edge) > extent.first_sealed
    seen_from[:, FIRST_SEALED] = np.where(below, extent.first_sealed, first_sealed)
    same = not (len(dropped[0]) - len(copies) or len(dropped[1]))
    during = state if same else replace(state, numbers=seen_from, memo={})
    taken = np.concatenate([fresh, copies[:, 1]]), slots
    return Change(
        extent, during, state, count, dense, copies, writes, seals, taken=taken, dropped=dropped
    )


def _calmly(extent: Extent) -> Change:
    """One more column, which changes nothing but the lengths."""
    numbers = extent.numbers.copy()
    numbers[:, LENGTH] += 1
    after = Extent(extent.kind, numbers, extent.sealed, extent.open, extent.calm - 1)
    lengths, page = extent.lengths, extent.kind.page
    which = np.arange(len(numbers))
    if lengths.min(initial=0) < 0:
        which = np.flatnonzero(lengths >= 0)
    writes = np.zeros((len(which), 5), np.int64)
    writes[:, 0] = which
    writes[:, 1] = extent.open[which, lengths[which] // page]
    writes[:, 2] = lengths[which] % page
    writes[:, 3] = 1
    return Change(extent, after, after, 1, writes=writes)


def _calm(kind: Kind, lengths: Ints) -> int:
    """How many tokens, one at a time, change nothing but the lengths."""
    calm = min(
        int(((event - lengths - 1) % kind.page).min(initial=kind.page)) for event in kind.events
    )
    for at in (kind.paging.dense_until, kind.paging.dense_until + kind.slack):
        soon = lengths[lengths < at]
        if len(soon):
            calm = min(calm, int((at - soon - 1).min()))
    return calm


def rewound(extent: Extent, lengths: Ints, pools: Pools) -> Change:
    """Sequences go back to these lengths: from their dense rows, or from decoded ones."""
    kind = extent.kind
    numbers = extent.numbers.copy()
    numbers[:, LENGTH] = lengths
    rows = np.maximum(lengths, 0)
    due, stop = kind.paging.all_due(rows), -(-rows // kind.page)
    numbers[:, STOP_SEALED] = np.minimum(extent.stop_sealed, due)
    numbers[:, FIRST_OPEN] = _first_reopened(extent, due)
    reopened = np.maximum(numbers[:, FIRST_OPEN], kind.sink_pages)
    which, number = ranges(reopened, np.minimum(extent.first_open, stop))
    slots = pools.open.take(len(which))
    open_table = extent.open
    if len(which):
        open_table = open_table.copy()
        open_table[which, number] = slots
    opens = np.stack([extent.sealed[which, number], slots], 1)
    numbers[rows == 0, FIRST_SEALED:] = 0
    after = Extent(kind, numbers, extent.sealed, open_table)
    return Change(extent, after, after, 0, opens=opens, taken=(slots, slots[:0]))


def reachable(extent: Extent, lengths: Ints) -> Bools:
    """Are all rows there that the newest token sees once sequences are of these lengths?"""
    window = extent.kind.window
    low = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
    held = np.maximum(extent.first_row, extent.kind.keep(extent.lengths))
    there: Bools = (lengths <= 0) | (lengths == extent.lengths) | (low >= held)
    return there


def exact(extent: Extent, lengths: Ints) -> bool:
    """Would a rewind find all rows as they came?"""
    kind, rows = extent.kind, np.maximum(lengths, 0)
    low = np.maximum(_first_reopened(extent, kind.paging.all_due(rows)), kind.sink_pages)
    return bool((low >= np.minimum(extent.first_open, -(-rows // kind.page))).all())


def _first_reopened(extent: Extent, due: Ints) -> Ints:
    """The first page that is open where so many are due: those between were sealed."""
    back = np.minimum(extent.first_open, np.maximum(due, extent.first_sealed))
    return np.where(extent.stop_sealed >= extent.first_open, back, extent.first_open)


def selected(extent: Extent, index: Ints) -> Extent:
    """These sequences, in this order, with repeats if there are any."""
    return Extent(extent.kind, extent.numbers[index], extent.sealed[index], extent.open[index])


def joined(extents: Sequence[Extent]) -> Extent:
    """The sequences of all of these side by side; they must hold slots of the same pools."""
    numbers = np.concatenate([extent.numbers for extent in extents])
    numbers[:, PADDING] = 0
    sealed = _beside([extent.sealed for extent in extents])
    opened = _beside([extent.open for extent in extents])
    return Extent(extents[0].kind, numbers, sealed, opened)


def _beside(tables: Sequence[Ints]) -> Ints:
    """Tables of several extents as one, all of one width."""
    width = max(table.shape[1] for table in tables)
    return np.concatenate([np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in tables])


def _wide(table: Ints, width: int) -> Ints:
    """A table with so many entries a sequence, or more."""
    have = table.shape[1]
    if width <= have:
        return table
    wide = np.zeros((len(table), max(width, 2 * have, 8)), np.int64)
    wide[:, :have] = table
    return wide


def _both(one: tuple[Ints, Ints], other: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    return np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]])
