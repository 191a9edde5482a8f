"""From one extent to the next: pure integers. Slots are taken from pools, rows are not known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvant.cache.pool import Pool
from kvant.extent import (
    FIRST_OPEN,
    FIRST_SEALED,
    LENGTH,
    NO_SLOTS,
    PADDING,
    STOP_SEALED,
    Bools,
    Change,
    Extent,
    Ints,
    Kind,
    ranges,
)

FEW = 16  # columns of a draft, whose rows are read from where those of single tokens are
NEXT_ROW = np.array([0, 0, 1, 0, 0])  # to be added to writes


class Pools(NamedTuple):
    """The slots of the open and of the sealed pages of a kind."""

    open: Pool
    sealed: Pool

    @classmethod
    def of(cls, kind: Kind) -> Pools:
        step = max(1, kind.step // kind.page)
        return cls(Pool(step), Pool(step))

    @property
    def shared(self) -> bool:
        """Is there more than one who holds slots?"""
        return len(self.open.holders) > 1

    def copy(self) -> Pools:
        """The same counts, to try something out."""
        return Pools(self.open.copy(), self.sealed.copy())

    def hold(self, extent: Extent) -> None:
        """Count all slots of an extent once more."""
        self.open.hold(extent.open_slots())
        self.sealed.hold(extent.sealed_slots())

    def drop(self, open_slots: Ints, sealed_slots: Ints) -> None:
        self.open.drop(open_slots)
        self.sealed.drop(sealed_slots)


def advanced(extent: Extent, count: int, pools: Pools, *, dense: bool = False) -> Change:
    """`count` more columns of every sequence. `dense`: they all see each other as they came."""
    kind, old = extent.kind, extent.numbers
    page, before = kind.page, extent.lengths
    numbers = old.copy()
    numbers[:, LENGTH] = after = before + count
    seen, rows = extent.rows, np.maximum(after, 0)
    first_open = numbers[:, FIRST_OPEN] = np.maximum(extent.first_open, kind.first_open(after))
    # Where none is sealed, none before the open ones will ever be.
    none = extent.stop_sealed <= extent.first_sealed
    begins = np.where(none, np.maximum(extent.first_sealed, extent.first_open), extent.first_sealed)
    first_sealed = np.maximum(begins, kind.first_sealed(after))
    numbers[:, FIRST_SEALED] = first_sealed
    due = kind.paging.all_due(rows)
    numbers[:, STOP_SEALED] = np.maximum(np.maximum(extent.stop_sealed, due), first_sealed)
    new_page = -(-seen // page)
    open_table, fresh, copies, writes = _opened(extent, after, first_open, pools.open)

    # Sealed pages: those that fall due. A chunk that is dense to itself seals none that it lets go.
    begin = np.maximum(extent.stop_sealed, extent.first_open)
    edge = np.maximum(begin, np.minimum(due, new_page)) if dense else np.maximum(begin, due)
    rest = np.maximum(edge, first_sealed)
    which, number = _both(ranges(begin, edge), ranges(rest, due))
    sealed_table = _wide(extent.sealed, int(due.max(initial=0)))
    sealed_table[ranges(edge, np.minimum(rest, due))] = 0  # nobody reads these
    sealed_table[which, number] = slots = pools.sealed.take(len(which))
    seals = _seals(which, number, slots, extent, open_table)

    # What goes once all layers have written.
    there, at = _both(extent.sealed_pages(), (which, number))
    gone = at < first_sealed[there]
    closed = ranges(extent.first_open, np.minimum(first_open, extent.stop_open))
    kept = closed[1] < kind.sink_pages
    closed = closed[0][~kept], closed[1][~kept]
    dropped = np.concatenate([open_table[closed], copies[:, 0]]), sealed_table[there, at][gone]

    calm = _calm(kind, after)
    state = Extent(kind, numbers, sealed_table, open_table, extent.heads, calm)
    seen_from = numbers.copy()
    seen_from[:, FIRST_OPEN] = extent.first_open
    below = np.maximum(extent.stop_sealed, edge) > begins
    seen_from[:, FIRST_SEALED] = np.where(below, begins, first_sealed)
    same = not (len(kept) or len(dropped[1]))  # queries see pages that close, sinks or not
    during = state if same else replace(state, numbers=seen_from, memo={})
    return Change(
        before=extent,
        during=during,
        after=state,
        count=count,
        dense=dense,
        copies=copies,
        writes=writes,
        seals=seals,
        taken=(np.concatenate([fresh, copies[:, 1]]), slots),
        dropped=dropped,
        own=_own(count, (seen // page < first_open) | (dense & (due * page > seen))),
        room=(pools.open.size, pools.sealed.size),
    )


def _opened(
    extent: Extent, after: Ints, first_open: Ints, pool: Pool
) -> tuple[Ints, Ints, Ints, Ints]:
    """The table of open pages, new slots in it, the pages to copy first, and where rows go.

    New pages get slots, and the page that a sequence has begun is copied where others keep it.
    """
    page, before, seen, rows = extent.kind.page, extent.lengths, extent.rows, np.maximum(after, 0)
    new_page, stop = -(-seen // page), -(-rows // page)
    table = _wide(extent.open, int(stop.max(initial=0)))
    sinks = np.minimum(np.minimum(extent.kind.sink_pages, first_open), stop)
    which, number = _both(ranges(new_page, sinks), ranges(np.maximum(first_open, new_page), stop))
    fresh = pool.take(len(which))
    begun = np.flatnonzero((seen % page != 0) & (after > before))
    begun_page = seen[begun] // page
    old_slots = table[begun, begun_page]
    copied = _find_copies(old_slots, seen[begun], pool)
    copies = np.zeros((len(copied), 2), np.int64)
    if len(copied):
        table = table.copy()
        copies[:, 0] = old_slots[copied]
        copies[:, 1] = pool.take(len(copies))
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
    copied = pool.shared(slots)
    if copied.any():
        order = np.lexsort((-lengths, slots))  # by page, the longest first
        _, first, count = np.unique(slots[order], return_index=True, return_counts=True)
        longest = order[first]
        copied[longest[pool.counts[slots[longest]] == count]] = False
    return np.flatnonzero(copied)


def _own(count: int, needed: Bools) -> bool:
    """Are rows read where they came? A few that lie in open pages are read as single tokens are."""
    return count > 1 and (count > FEW or bool(needed.any()))


def _seals(which: Ints, number: Ints, slots: Ints, extent: Extent, open_table: Ints) -> Ints:
    """From where pages are sealed: from open ones, or from rows that came just now, whole."""
    first = number * extent.kind.page
    source = np.full(len(which), -1)
    held = first < extent.rows[which]
    source[held] = open_table[which[held], number[held]]
    return np.stack([which, slots, source, first - extent.lengths[which]], 1)


def calmly(extent: Extent) -> Change:
    """One more column of a calm extent: it changes nothing but the lengths."""
    numbers = extent.numbers.copy()
    numbers[:, LENGTH] += 1
    writes = _next(extent) if extent.newest is None else extent.newest + NEXT_ROW
    after = Extent(
        extent.kind,
        numbers,
        extent.sealed,
        extent.open,
        extent.heads,
        extent.calm - 1,
        newest=writes,
        shared=extent.shared,
    )
    return Change(extent, after, after, 1, writes=writes)


def _next(extent: Extent) -> Ints:
    """Where the next token goes, of sequences whose padding is over."""
    lengths, page = extent.lengths, extent.kind.page
    which = np.flatnonzero(lengths >= 0)
    writes = np.zeros((len(which), 5), np.int64)
    writes[:, 0] = which
    writes[:, 1] = extent.open[which, lengths[which] // page]
    writes[:, 2] = lengths[which] % page
    writes[:, 3] = 1
    return writes


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
    after = Extent(kind, numbers, extent.sealed, open_table, extent.heads)
    return Change(extent, after, after, 0, opens=opens, taken=(slots, slots[:0]))


def reachable(extent: Extent, lengths: Ints) -> Bools:
    """Are all rows there that the newest token sees once sequences are of these lengths?"""
    window = extent.kind.window
    low = extent.missing if window is None else np.maximum(lengths - window, 0)
    held = np.maximum(extent.first_row, extent.kind.keep(extent.lengths))
    back = (low >= held) & (lengths >= extent.pruned)
    there: Bools = (lengths <= 0) | (lengths == extent.lengths) | back
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
    at = extent.tables_of(index)
    return Extent(extent.kind, extent.numbers[at], extent.sealed[at], extent.open[at], extent.heads)


def joined(extents: Sequence[Extent]) -> Extent:
    """The sequences of all of these side by side; they must hold slots of the same pools."""
    numbers = np.concatenate([extent.numbers for extent in extents])
    numbers[:, PADDING] = 0
    sealed = _beside([extent.sealed for extent in extents])
    opened = _beside([extent.open for extent in extents])
    return Extent(extents[0].kind, numbers, sealed, opened, extents[0].heads)


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


def placed(
    kind: Kind, numbers: Ints, pools: Pools, begun: Extent | None = None, heads: int = 1
) -> Extent:
    """The extent whose pages lie in slots one after the other, in the order of their sequences.

    A sequence that begins with the same tokens as the one of `begun` shares whole pages with it.
    """
    blank = np.zeros((len(numbers), 0), np.int64)
    extent = Extent(kind, numbers, blank, blank, heads)
    if begun is None:
        return moved(extent, pools.open, pools.sealed)
    both = _whole(extent, begun)
    tables = [
        _table(pages, pool, 1, *((table[0], *both) if whole else ()))
        for pages, pool, table, whole in (
            (extent.open_pages(), pools.open, begun.open, not kind.seals),
            (extent.sealed_pages(), pools.sealed, begun.sealed, kind.seals),
        )
    ]
    return replace(extent, open=tables[0], sealed=tables[1])


def sharing(extent: Extent, begun: Extent) -> Extent:
    """The same sequence, whose whole pages are those of one with the same first tokens."""
    seals = extent.kind.seals
    pages = extent.sealed_pages() if seals else extent.open_pages()
    number = np.intersect1d(np.arange(*_whole(extent, begun)), pages[1])
    table = (extent.sealed if seals else extent.open).copy()
    table[0, number] = (begun.sealed if seals else begun.open)[0, number]
    return replace(extent, sealed=table) if seals else replace(extent, open=table)


def _whole(extent: Extent, begun: Extent) -> tuple[int, int]:
    """The whole pages, from one to another, that two sequences with the same first tokens have."""
    if extent.kind.seals:
        return int(begun.first_sealed[0]), int(begun.stop_sealed[0])
    rows = min(int(begun.rows[0]), int(extent.rows[0]))
    return int(begun.first_open[0]), rows // extent.kind.page


def taken_for(extent: Extent, begun: Extent | None) -> tuple[Ints, Ints]:
    """The slots, open and sealed, of an extent that was `placed`, but those that it shares."""
    opened, sealed = extent.open_slots(), extent.sealed_slots()
    if begun is None:
        return opened, sealed
    return np.setdiff1d(opened, begun.open_slots()), np.setdiff1d(sealed, begun.sealed_slots())


def moved(extent: Extent, opened: Pool | None, sealed: Pool | None) -> Extent:
    """The same pages in slots of other pools, one after the other; None: they stay."""
    open_table, sealed_table = extent.open, extent.sealed
    if opened is not None:
        open_table = _table(extent.open_pages(), opened, extent.tables)
    if sealed is not None:
        sealed_table = _table(extent.sealed_pages(), sealed, extent.tables)
    return Extent(extent.kind, extent.numbers, sealed_table, open_table, extent.heads)


def _table(
    pages: tuple[Ints, Ints],
    pool: Pool,
    batch: int,
    begun: Ints = NO_SLOTS[0],
    first: int = 0,
    stop: int = 0,
) -> Ints:
    """Slots for these pages: of a sequence that has `begun`, its own from `first` to `stop`."""
    which, number = pages
    table = np.zeros((batch, int(number.max(initial=-1)) + 1), np.int64)
    own = (number >= first) & (number < stop)
    table[which[own], number[own]] = begun[number[own]]
    table[which[~own], number[~own]] = pool.take(int((~own).sum()))
    return table


def most_pages(kind: Kind, length: int) -> tuple[int, int]:
    """The most pages, open and sealed, of a sequence on its way to a length, token by token.

    What is let go at a token is there until the next one. Numbers of pages repeat with the page
    once a window is full, and fall only where the first pages are sealed late.
    """
    late = min(length, kind.paging.dense_until + kind.slack)
    lengths = np.unique(np.concatenate([_last(length, kind.page), _last(late, kind.page)]))
    first = kind.first_open(lengths - 1)
    stop = -(-lengths // kind.page)
    opened = stop - first + np.minimum(kind.sink_pages, first)
    sealed = kind.paging.all_due(lengths) - kind.first_sealed(lengths - 1)
    return int(opened.max(initial=0)), max(0, int(sealed.max(initial=0)))


def most_slots(kind: Kind, lengths: Iterable[int]) -> tuple[int, int]:
    """The slots, open and sealed, of pools in which sequences came to these lengths like that."""
    pages = [most_pages(kind, kind.capacity or length) for length in lengths]
    step = Pools.of(kind).open.step
    opened, sealed = (-(-sum(some) // step) * step for some in zip(*pages, strict=True))
    return opened, sealed


def most_beside(extent: Extent, coming: int) -> tuple[int, int]:
    """The most slots, open and sealed, that a cache holds on its way some tokens further.

    At once or one by one, and whoever else holds its pages: those of now may stay until the way is
    over, and the page that a sequence has begun is copied. The bound of a cache by itself is lower,
    see `most_slots`: it gives back what a chunk took.
    """
    kind, after = extent.kind, np.maximum(extent.lengths + coming, 0)
    came = -(-after // kind.page) - extent.stop_open
    most = np.array([most_pages(kind, length)[0] for length in after.tolist()])
    opened = np.minimum(came, most) + (after > extent.rows)
    due = np.maximum(kind.paging.all_due(after) - extent.stop_sealed, 0)
    here = len(np.unique(extent.open_slots())), len(np.unique(extent.sealed_slots()))
    spare = Pools.of(kind).open.step - 1
    return here[0] + int(opened.sum()) + spare, here[1] + int(due.sum()) + spare


def _last(length: int, page: int) -> Ints:
    return np.arange(max(1, length - 2 * page), length + 1)
