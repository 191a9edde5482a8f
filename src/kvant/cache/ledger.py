"""Which extents hold, which forward is under way, and the slots that both keep.

What holds is one immutable `Book`, and every verb ends in the assignment of another: so an
exception, Ctrl-C among them, leaves the old state or the new one, for all layers. Counts of slots
change apart from that; where an interrupt came between, they are counted anew.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import RLock
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvant.cache.book import Asked, Book, Retired, Slots
from kvant.cache.changes import (
    Pools,
    advanced,
    calmly,
    most_beside,
    most_pages,
    most_slots,
    moved,
)
from kvant.cache.pool import Pool
from kvant.cache.rows import check_alike, check_sealed_before, padding_of
from kvant.cache.storage import Storage
from kvant.contracts import HostState
from kvant.errors import CapacityError, UnsupportedView
from kvant.extent import NO_SLOTS, Change, Extent, Ints, Kind

log = logging.getLogger("kvant")

T = TypeVar("T")
SERIALS = itertools.count()  # of holders of slots
NOTHING = np.zeros(0, np.int64)


class Ledger:
    """The integers of a cache: a `Holder` of slots in the pools of its kinds."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        pools: Sequence[Pools],
        leaves: Sequence[int | None],
        states: tuple[Any, ...] = (),
        storages: Mapping[int, Storage] | None = None,
        lock: Any = None,
    ) -> None:
        self.serial = next(SERIALS)
        self.kinds = tuple(kinds)
        self.leaves = tuple(leaves)  # the kind of each; None: it recurs
        self.prunes = any(kind.prune is not None for kind in kinds)
        self.book = Book(tuple(pools), (), states, dict(storages or {}))
        self.abandoned = 0
        self.changes = 0  # appends and verbs, by which memory may have changed
        self.backend: str | None = None  # that reads all layers; None: the first that does
        self.speculating = self.recording = False  # may a chunk be drafts, by us or by a host?
        self.prompting = False  # is it of a prompt, however short?
        self.seen: dict[int, Asked] = {}  # by leaf: what the newest forward asks
        self.prune: Callable[[], object] = int  # set by the layers, which know of rows
        self.host_states: tuple[HostState, ...] = ()
        self.lock = lock or RLock()  # of all caches that share these pools
        for pool in self._all():
            pool.join(self)

    def __del__(self) -> None:
        """Anywhere, even inside of a pool: so slots are left to whoever takes the next ones."""
        book: Book | None = self.__dict__.get("book")
        for kind, pools in enumerate(book.pools if book is not None else ()):
            for pool, slots in zip((pools.open, pools.sealed), self._held(kind), strict=True):
                pool.holders.pop(self.serial, None)
                pool.orphans.append((self.serial, slots))

    @property
    def pools(self) -> tuple[Pools, ...]:
        return self.book.pools

    @property
    def batch(self) -> int:
        return self.book.extents[0].batch if self.book.extents else 0

    def slots(self, pool: Pool) -> Ints:
        for kind, pools in enumerate(self.pools):
            if pool is pools.open:
                return self._held(kind)[0]
            if pool is pools.sealed:
                return self._held(kind)[1]
        return NOTHING

    @property
    def blank(self) -> bool:
        """Has no sequence a token, nor padding that was begun?"""
        return all((e.lengths == -e.padding).all() and not e.rows.any() for e in self.book.extents)

    def committed(self, kind: int) -> Extent | None:
        return self.book.extents[kind] if self.book.extents else None

    def extent(self, kind: int, leaf: int) -> Extent | None:
        """Where a layer is: what a forward under way brought it counts.

        Threads may ask while another one commits: then what holds from now on counts.
        """
        book = self.book
        change = book.changes.get(kind) if leaf in book.arrived else None
        if change is not None:
            return change.after
        return book.extents[kind] if book.extents else None

    def weight(self, kind: int) -> tuple[int, int]:
        """Slots, open and sealed, that this cache holds or that nobody does."""
        pools = self.pools[kind].open, self.pools[kind].sealed
        if any(pool.orphans for pool in pools):
            with self.counting():
                for pool in pools:
                    pool.collect()
        held = self._held(kind)
        opened, sealed = (len(np.unique(s)) + p.free for s, p in zip(held, pools, strict=True))
        return opened, sealed

    def weight_after(self, kind: int, extent: Extent, coming: int) -> tuple[int, int]:
        """The most that it can be once so many tokens came, at once or one by one."""
        now = self.weight(kind)
        if self.pools[kind].shared:
            need = most_beside(extent, coming)
            if self.kinds[kind].prune is not None:  # rows that stay are stored before others go
                after = most_slots(extent.kind, (extent.lengths + coming).clip(0).tolist())
                need = need[0] + after[0], need[1] + after[1]
        else:
            need = most_slots(extent.kind, (extent.lengths + coming).clip(0).tolist())
        return max(now[0], need[0]), max(now[1], need[1])

    def enter(self, leaf: int, count: int) -> None:
        """A layer is to get rows: where it has some of a forward under way, that one died.

        So did one that no layer has rows of yet. The first token behind a prompt prunes it.
        """
        self.changes += 1
        book = self.book
        if book.to_follow is not None:
            self._follow()
        if leaf in book.arrived or (book.changes and not book.arrived):
            self.rollback()
        if self.prunes and not (self.book.changes or self.book.arrived):
            self._heed()
            if not self.is_prompt(count):
                self.prune()

    def begin(
        self,
        kind: int,
        batch: int,
        count: int,
        start: Sequence[int] | Tensor | None = None,
        *,
        dense: bool = False,
        heads: int = 1,
    ) -> Change:
        """What `count` more columns do to a kind: made by the first of its layers that asks.

        Sequences have `heads` tables each.
        """
        book = self.book
        change = book.changes.get(kind)
        if change is None and count == 1 and start is None and book.extents:
            extent = book.extents[kind]
            capacity = self.kinds[kind].capacity
            fits = capacity is None or extent.columns < capacity
            if extent.calm and fits and (extent.batch, extent.heads) == (batch, heads):
                change = book.changes[kind] = calmly(extent)
        if change is None:
            given = None if start is None else padding_of(start, batch)
            change = self._changed(kind, batch, count, given, dense, heads)
        if start is not None or change.count != count or change.before.batch != batch:
            check_alike(change, batch, count, start)
        return change

    def expect(self, *, seals: bool) -> list[Change]:
        """What one more token of every sequence does to the kinds, but for the rows themselves.

        Those are written by somebody else, later: so no page may fall due with its own row, unless
        whoever writes it `seals` as well.
        """
        self.changes += 1
        if None in self.leaves or self.host_states:
            raise UnsupportedView("a layer that recurs: its state is no row that comes later")
        if self.prunes:
            raise UnsupportedView("a layer that prunes: its heads have tables of their own")
        if self.blank:
            raise CapacityError("no token yet, whose rows say what memory is needed: append first")
        for extent in () if seals else self.book.extents:
            check_sealed_before(extent)
        try:
            made = [self.begin(i, self.batch, 1, None, dense=False) for i in range(len(self.kinds))]
        except CapacityError:
            self.rollback()
            raise
        return made if seals else [replace(x, writes=x.writes[:0], memo={}) for x in made]

    def foresee(
        self, kind: int, batch: int, count: int, start: Any, *, dense: bool, heads: int
    ) -> tuple[int, int]:
        """The slots, open and sealed, by which the pools of a kind would grow."""
        with self.lock:
            if kind in self.book.changes:
                return 0, 0
            given = None if start is None else padding_of(start, batch)
            extent = self._beginning(kind, batch, count, given, heads)
            scratch = self.pools[kind].copy()
            if self.kinds[kind].capacity is not None and self.blank:
                self._reserve(kind, extent.tables, scratch)
            for which, slots in self.book.retired:
                if which == kind:
                    scratch.drop(*slots)
            tables = replace(extent, sealed=extent.sealed.copy(), open=extent.open.copy())
            advanced(tables, count, scratch, dense=dense)
            pools = self.pools[kind]
            return scratch.open.size - pools.open.size, scratch.sealed.size - pools.sealed.size

    def _beginning(
        self, kind: int, batch: int, count: int, given: tuple[int, ...] | None, heads: int
    ) -> Extent:
        """The extent that rows are added to, or an error."""
        one, extents = self.kinds[kind], self.book.extents
        fresh = not extents or self.blank
        extent = Extent.empty(one, given or (0,) * batch, heads) if fresh else extents[kind]
        if extent.batch != batch:
            raise ValueError(
                f"rows of {batch} sequences for a cache of {extent.batch}: a cache keeps the "
                "sequences that it began with, which can be repeated, selected and merged "
                "(kvant.merge)"
            )
        if extent.heads != heads:
            raise ValueError(f"rows of {heads} key heads for a layer of {extent.heads}")
        for change in self.book.changes.values():
            other = change.before
            began, begins = (e.of_sequences(e.padding).tolist() for e in (other, extent))
            if other.batch != batch or (fresh and began != begins):
                raise ValueError(
                    f"rows of {batch} sequences that begin at {begins}, where "
                    f"another layer of this forward got {other.batch} that begin at {began}"
                )
        longest = int(extent.rows.max(initial=0)) + count
        if one.capacity is not None and longest > one.capacity:
            raise CapacityError(
                f"{longest} tokens for a capacity of {one.capacity}: rewind, reset, or give the "
                f"spec capacity={longest} or none"
            )
        return extent

    def _reserve(self, kind: int, tables: int, pools: Pools) -> None:
        """Take all memory of a fixed capacity with the first token."""
        capacity = self.kinds[kind].capacity
        if capacity is not None:
            opened, sealed = most_pages(self.kinds[kind], capacity)
            pools.open.grow(tables * opened)
            pools.sealed.grow(tables * sealed)

    def _changed(
        self,
        kind: int,
        batch: int,
        count: int,
        given: tuple[int, ...] | None,
        dense: bool,
        heads: int,
    ) -> Change:
        extent = self._beginning(kind, batch, count, given, heads)
        pools = self.pools[kind]
        with self.counting():
            self.release()
            if self.blank:
                self._reserve(kind, extent.tables, pools)
            change = self.book.changes[kind] = advanced(extent, count, pools, dense=dense)
        return change

    def arrive(self, leaf: int, state: tuple[int, Any] | None = None) -> bool:
        """A layer has its rows, or its state. Was it the last one? Then the forward is kept."""
        book = self.book
        if len(book.arrived) + 1 < len(self.leaves):
            if state is not None:
                book.coming[state[0]] = state[1]
            book.arrived.add(leaf)
            return False
        after, gone = list[Extent](), list(book.retired)
        for kind, change in sorted(book.changes.items()):
            after.append(change.after)
            if len(change.dropped[0]) or len(change.dropped[1]):
                gone.append((kind, change.dropped))
        coming = book.coming if state is None else book.coming | dict([state])
        states = tuple(coming.get(i, past) for i, past in enumerate(book.states))
        to_follow = min(extent.columns for extent in after) if self.host_states else None
        came = max((change.count for change in book.changes.values()), default=1)
        self.book = Book(
            *(book.pools, tuple(after), states, book.storages),
            retired=tuple(gone),
            to_follow=to_follow,
            asked=book.asked,
            prompted=book.prompted or self.is_prompt(came),
        )
        if to_follow is not None:
            self._follow()
        if len(self.book.lengths) > 1:
            log.warning("layers hold different numbers of tokens: %s", sorted(self.book.lengths))
        if len(gone) > len(book.retired):
            self.compact()
        return True

    @property
    def asked_nbytes(self) -> int:
        """Bytes of the queries that are kept for a prune."""
        return sum(one.queries.nbytes for one in (*self.book.asked.values(), *self.seen.values()))

    def is_prompt(self, count: int) -> bool:
        """Are so many tokens, that come together, part of a prompt?"""
        return self.prompting or (count > 1 and not (self.speculating or self.recording))

    def ask(self, asked: dict[int, Asked], *, prompted: bool) -> None:
        """Know this of what was asked: nothing, once a prune is over or other tokens are here."""
        self.seen = {}
        self.book = replace(self.book, asked=asked, prompted=prompted)

    def _heed(self) -> None:
        """Know what the newest forward asked, if it was kept."""
        asked, seen, self.seen = dict(self.book.asked), self.seen, {}
        for leaf, new in seen.items():
            kind = self.leaves[leaf]
            if kind is not None and new.columns == self.book.extents[kind].columns:
                asked[leaf] = asked[leaf].then(new) if leaf in asked else new
        if seen:
            self.book = replace(self.book, asked=asked)

    def keep(self, book: Book) -> None:
        """Let this hold from now on, and no forward be under way."""
        self.book = replace(book, arrived=set(), coming={})

    def rollback(self) -> None:
        """Take back what a forward left that never reached every layer."""
        self.changes += 1
        self._follow()
        book = self.book
        if not book.arrived and not book.changes:
            self._heed()
            return
        self.seen = {}
        if book.arrived:
            log.warning(
                "a forward appended to %d of %d layers and was abandoned: its tokens are taken"
                " back",
                len(book.arrived),
                len(self.leaves),
            )
            self.abandoned += 1
        taken = tuple((kind, change.taken) for kind, change in book.changes.items())
        self.keep(replace(book, changes={}, retired=book.retired + taken))
        if book.arrived:
            for follower in self.host_states:
                follower.invalidate()

    def swap(
        self,
        extents: Iterable[Extent],
        states: tuple[Any, ...],
        taken: Iterable[Retired] = (),
        asked: Mapping[int, Asked] | None = None,
        *,
        prompted: bool = False,
    ) -> None:
        """Other extents over the same pools, while counts change; some slots were `taken` for it.

        They are held before the old ones go. Of what their tokens asked, `asked` stays known.
        """
        self.release()
        new = tuple(extents)
        for pools, extent in zip(self.pools, new, strict=False):
            pools.hold(extent)
        old = [(k, (e.open_slots(), e.sealed_slots())) for k, e in enumerate(self.book.extents)]
        retired = (*taken, *old)
        self.seen = {}
        now = replace(self.book, extents=new, states=states, changes={}, retired=retired)
        self.keep(replace(now, asked=dict(asked or {}), prompted=prompted))
        self.release()

    def check(self) -> None:
        """Are the slots of all pools free, or counted as often as they are held?"""
        with self.lock:
            with self.counting():
                pass  # where a change was interrupted, the next one counts them anew
            for pool in self._all():
                pool.check()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts change within; where that is interrupted, they are counted anew.

        All slots are taken within that an extent is to hold: before, they are nobody's.
        """
        with self.lock:
            pools = self._all()
            for pool in pools:
                if pool.torn or pool.missing:
                    pool.recount()
                pool.torn = True
            try:
                yield
            except Exception:
                for pool in pools:
                    pool.recount()
                raise
            for pool in pools:
                pool.torn = False

    def release(self) -> None:
        """Drop the slots that the last forward retired, while counts change."""
        retired = self.book.retired
        if retired:
            self.book = replace(self.book, retired=())
            for kind, slots in retired:
                self.pools[kind].drop(*slots)

    def _follow(self) -> None:
        """Tell states of the host of a forward that was kept, if they were not told."""
        length = self.book.to_follow
        if length is not None:
            for follower in self.host_states:
                follower.follow(length)
            self.book = replace(self.book, to_follow=None)

    def compact(self, *, pruned: bool = False) -> None:
        """Give back what a chunk took beyond what its tokens would have, or what a prune let go.

        The tokens are kept already: where there is no memory for it, the next chunk tries again.
        """
        for kind in range(len(self.kinds)):
            with suppress(MemoryError, torch.OutOfMemoryError):
                self._compact_kind(kind, pruned=pruned and self.kinds[kind].prune is not None)

    def _compact_kind(self, kind: int, *, pruned: bool) -> None:
        """Do it where nobody else holds pages.

        Pages of which there were too many, open or sealed, move to new tensors: whoever reads the
        old ones is not disturbed.
        """
        pools, book = self.pools[kind], self.book
        one, was = self.kinds[kind], book.extents[kind]
        opened, sealed = most_slots(one, was.rows.tolist())
        if pruned and one.capacity is None:
            step = pools.open.step
            held = (len(np.unique(slots)) for slots in (was.open_slots(), was.sealed_slots()))
            opened, sealed = (-(-count // step) * step for count in held)
        large = pools.open.size > opened, pools.sealed.size > sealed
        if pools.shared or not any(large):
            return
        new = Pools.of(one)
        self._reserve(kind, was.tables, new)
        now = moved(was, new.open if large[0] else None, new.sealed if large[1] else None)
        new = Pools(*_chosen(large, new, pools))
        storages = book.storages | {
            leaf: book.storages[leaf].moved_to(was, now, (new.open.size, new.sealed.size))
            for leaf, own in enumerate(self.leaves)
            if own == kind
        }
        for pool in new:
            pool.join(self)
        left = [k for k in book.retired if k[0] != kind]  # slots of pools that stay
        left += [(k, _chosen(large, NO_SLOTS, s)) for k, s in book.retired if k == kind]
        extents, both = _with(book.extents, kind, now), _with(book.pools, kind, new)
        self.keep(
            replace(book, extents=extents, pools=both, storages=storages, retired=tuple(left))
        )

    def _held(self, kind: int) -> Slots:
        book, parts = self.book, []
        if book.extents:
            parts.append((book.extents[kind].open_slots(), book.extents[kind].sealed_slots()))
        if kind in book.changes:
            parts.append(book.changes[kind].taken)
        parts += [slots for which, slots in book.retired if which == kind]
        both = tuple(zip(*parts, strict=True)) or ((NOTHING,), (NOTHING,))
        return np.concatenate(both[0]), np.concatenate(both[1])

    def _all(self) -> list[Pool]:
        return [pool for pools in self.pools for pool in pools]


def _chosen(which: tuple[bool, bool], these: tuple[T, T], others: tuple[T, T]) -> tuple[T, T]:
    """Of open pages and of sealed ones: these, or the others."""
    return these[0] if which[0] else others[0], these[1] if which[1] else others[1]


def _with(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])
