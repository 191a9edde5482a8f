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

from kvant.cache.advance import (
    Pools,
    advance,
    advance_steadily,
    bound_pages,
    bound_slots,
    bound_slots_when_shared,
    relocate_table,
)
from kvant.cache.checks import check_no_page_due, check_same_forward, parse_padding
from kvant.cache.pool import Pool
from kvant.cache.state import CacheState, PruningQueries, RetiredSlots, Slots
from kvant.cache.storage import Storage
from kvant.contracts import ExternalState
from kvant.errors import CapacityError, UnsupportedView
from kvant.page_table import NO_SLOTS, AppendPlan, Ints, LayerGroup, PageTable

logger = logging.getLogger("kvant")

T = TypeVar("T")
HOLDER_SERIALS = itertools.count()  # of holders of slots
EMPTY_SLOTS = np.zeros(0, np.int64)


class StateTracker:
    """The integers of a cache: a `Holder` of slots in the pools of its kinds."""

    def __init__(
        self,
        layer_groups: Sequence[LayerGroup],
        pools: Sequence[Pools],
        leaf_groups: Sequence[int | None],
        histories: tuple[Any, ...] = (),
        storages: Mapping[int, Storage] | None = None,
        lock: Any = None,
    ) -> None:
        self.serial = next(HOLDER_SERIALS)
        self.layer_groups = tuple(layer_groups)
        self.leaf_groups = tuple(leaf_groups)  # the kind of each; None: it recurs
        self.prunes = any(kind.pruning is not None for kind in layer_groups)
        self.state = CacheState(tuple(pools), (), histories, dict(storages or {}))
        self.num_abandoned = 0
        self.num_changes = 0  # appends and verbs, by which memory may have changed
        self.backend: str | None = None  # that reads all layers; None: the first that does
        self.in_speculation = self.external_speculation = (
            False  # may a chunk be drafts, by us or by a host?
        )
        self.in_prompt = False  # is it of a prompt, however short?
        self.forward_queries: dict[
            int, PruningQueries
        ] = {}  # by leaf: what the newest forward asks
        self.prune_callback: Callable[[], object] = int  # set by the layers, which know of rows
        self.external_states: tuple[ExternalState, ...] = ()
        self.lock = lock or RLock()  # of all caches that share these pools
        for pool in self._list_pools():
            pool.add_holder(self)

    def __del__(self) -> None:
        """Anywhere, even inside of a pool: so slots are left to whoever takes the next ones."""
        state: CacheState | None = self.__dict__.get("state")
        for kind, pools in enumerate(state.pools if state is not None else ()):
            for pool, slots in zip((pools.open, pools.sealed), self._list_slots(kind), strict=True):
                pool.holders.pop(self.serial, None)
                pool.orphaned_slots.append((self.serial, slots))

    @property
    def pools(self) -> tuple[Pools, ...]:
        return self.state.pools

    @property
    def batch(self) -> int:
        return self.state.page_tables[0].batch if self.state.page_tables else 0

    def list_slots(self, pool: Pool) -> Ints:
        for kind, pools in enumerate(self.pools):
            if pool is pools.open:
                return self._list_slots(kind)[0]
            if pool is pools.sealed:
                return self._list_slots(kind)[1]
        return EMPTY_SLOTS

    @property
    def is_empty(self) -> bool:
        """Has no sequence a token, nor padding that was begun?"""
        return all(
            (e.lengths == -e.padding).all() and not e.seq_lens.any() for e in self.state.page_tables
        )

    def get_committed_table(self, group: int) -> PageTable | None:
        return self.state.page_tables[group] if self.state.page_tables else None

    def get_page_table(self, group: int, leaf: int) -> PageTable | None:
        """Where a layer is: what a forward under way brought it counts.

        Threads may ask while another one commits: then what holds from now on counts.
        """
        book = self.state
        change = book.plans.get(group) if leaf in book.appended_leaves else None
        if change is not None:
            return change.new_table
        return book.page_tables[group] if book.page_tables else None

    def count_slots(self, group: int) -> tuple[int, int]:
        """Slots, open and sealed, that this cache holds or that nobody does."""
        pools = self.pools[group].open, self.pools[group].sealed
        if any(pool.orphaned_slots for pool in pools):
            with self.guard_counts():
                for pool in pools:
                    pool.collect_orphans()
        held = self._list_slots(group)
        opened, sealed = (len(np.unique(s)) + p.num_free for s, p in zip(held, pools, strict=True))
        return opened, sealed

    def bound_slots_after(self, group: int, page_table: PageTable, coming: int) -> tuple[int, int]:
        """The most that it can be once so many tokens came, at once or one by one."""
        now = self.count_slots(group)
        if self.pools[group].is_shared:
            need = bound_slots_when_shared(page_table, coming)
            if (
                self.layer_groups[group].pruning is not None
            ):  # rows that stay are stored before others go
                after = bound_slots(
                    page_table.layer_group, (page_table.lengths + coming).clip(0).tolist()
                )
                need = need[0] + after[0], need[1] + after[1]
        else:
            need = bound_slots(
                page_table.layer_group, (page_table.lengths + coming).clip(0).tolist()
            )
        return max(now[0], need[0]), max(now[1], need[1])

    def begin_append(self, leaf: int, count: int) -> None:
        """A layer is to get rows: where it has some of a forward under way, that one died.

        So did one that no layer has rows of yet. The first token behind a prompt prunes it.
        """
        self.num_changes += 1
        book = self.state
        if book.unreported_length is not None:
            self._notify_external_states()
        if leaf in book.appended_leaves or (book.plans and not book.appended_leaves):
            self.rollback()
        if self.prunes and not (self.state.plans or self.state.appended_leaves):
            self._collect_queries()
            if not self.is_prompt(count):
                self.prune_callback()

    def plan_append(
        self,
        group: int,
        batch: int,
        count: int,
        start: Sequence[int] | Tensor | None = None,
        *,
        new_rows_dense: bool = False,
        tables_per_sequence: int = 1,
    ) -> AppendPlan:
        """What `count` more columns do to a kind: made by the first of its layers that asks.

        Sequences have `heads` tables each.
        """
        book = self.state
        change = book.plans.get(group)
        if change is None and count == 1 and start is None and book.page_tables:
            extent = book.page_tables[group]
            capacity = self.layer_groups[group].capacity
            fits = capacity is None or extent.num_columns < capacity
            if (
                extent.steady_tokens
                and fits
                and (extent.batch, extent.tables_per_sequence) == (batch, tables_per_sequence)
            ):
                change = book.plans[group] = advance_steadily(extent)
        if change is None:
            given = None if start is None else parse_padding(start, batch)
            change = self._make_plan(
                group, batch, count, given, new_rows_dense, tables_per_sequence
            )
        if start is not None or change.num_new != count or change.old_table.batch != batch:
            check_same_forward(change, batch, count, start)
        return change

    def plan_token(self, *, seals: bool) -> list[AppendPlan]:
        """What one more token of every sequence does to the kinds, but for the rows themselves.

        Those are written by somebody else, later: so no page may fall due with its own row, unless
        whoever writes it `seals` as well.
        """
        self.num_changes += 1
        if None in self.leaf_groups or self.external_states:
            raise UnsupportedView("a layer that recurs: its state is no row that comes later")
        if self.prunes:
            raise UnsupportedView("a layer that prunes: its heads have tables of their own")
        if self.is_empty:
            raise CapacityError("no token yet, whose rows say what memory is needed: append first")
        for extent in () if seals else self.state.page_tables:
            check_no_page_due(extent)
        try:
            made = [
                self.plan_append(i, self.batch, 1, None, new_rows_dense=False)
                for i in range(len(self.layer_groups))
            ]
        except CapacityError:
            self.rollback()
            raise
        return made if seals else [replace(x, writes=x.writes[:0], derived={}) for x in made]

    def predict_growth(
        self,
        group: int,
        batch: int,
        count: int,
        start: Any,
        *,
        new_rows_dense: bool,
        tables_per_sequence: int,
    ) -> tuple[int, int]:
        """The slots, open and sealed, by which the pools of a kind would grow."""
        with self.lock:
            if group in self.state.plans:
                return 0, 0
            given = None if start is None else parse_padding(start, batch)
            extent = self._get_base_table(group, batch, count, given, tables_per_sequence)
            scratch = self.pools[group].copy()
            if self.layer_groups[group].capacity is not None and self.is_empty:
                self._reserve_capacity(group, extent.num_tables, scratch)
            for which, slots in self.state.retired_slots:
                if which == group:
                    scratch.drop_references(*slots)
            tables = replace(
                extent, sealed_table=extent.sealed_table.copy(), open_table=extent.open_table.copy()
            )
            advance(tables, count, scratch, new_rows_dense=new_rows_dense)
            pools = self.pools[group]
            return scratch.open.size - pools.open.size, scratch.sealed.size - pools.sealed.size

    def _get_base_table(
        self,
        group: int,
        batch: int,
        count: int,
        padding: tuple[int, ...] | None,
        tables_per_sequence: int,
    ) -> PageTable:
        """The extent that rows are added to, or an error."""
        one, extents = self.layer_groups[group], self.state.page_tables
        fresh = not extents or self.is_empty
        extent = (
            PageTable.make_empty(one, padding or (0,) * batch, tables_per_sequence)
            if fresh
            else extents[group]
        )
        if extent.batch != batch:
            raise ValueError(
                f"rows of {batch} sequences for a cache of {extent.batch}: a cache keeps the "
                "sequences that it began with, which can be repeated, selected and merged "
                "(kvant.merge)"
            )
        if extent.tables_per_sequence != tables_per_sequence:
            raise ValueError(
                f"rows of {tables_per_sequence} key heads for a layer of "
                f"{extent.tables_per_sequence}"
            )
        for change in self.state.plans.values():
            other = change.old_table
            began, begins = (e.reduce_to_sequences(e.padding).tolist() for e in (other, extent))
            if other.batch != batch or (fresh and began != begins):
                raise ValueError(
                    f"rows of {batch} sequences that begin at {begins}, where "
                    f"another layer of this forward got {other.batch} that begin at {began}"
                )
        longest = int(extent.seq_lens.max(initial=0)) + count
        if one.capacity is not None and longest > one.capacity:
            raise CapacityError(
                f"{longest} tokens for a capacity of {one.capacity}: rewind, reset, or give the "
                f"spec capacity={longest} or none"
            )
        return extent

    def _reserve_capacity(self, group: int, num_tables: int, pools: Pools) -> None:
        """Take all memory of a fixed capacity with the first token."""
        capacity = self.layer_groups[group].capacity
        if capacity is not None:
            opened, sealed = bound_pages(self.layer_groups[group], capacity)
            pools.open.grow(num_tables * opened)
            pools.sealed.grow(num_tables * sealed)

    def _make_plan(
        self,
        group: int,
        batch: int,
        count: int,
        padding: tuple[int, ...] | None,
        new_rows_dense: bool,
        tables_per_sequence: int,
    ) -> AppendPlan:
        extent = self._get_base_table(group, batch, count, padding, tables_per_sequence)
        pools = self.pools[group]
        with self.guard_counts():
            self.free_retired_slots()
            if self.is_empty:
                self._reserve_capacity(group, extent.num_tables, pools)
            change = self.state.plans[group] = advance(
                extent, count, pools, new_rows_dense=new_rows_dense
            )
        return change

    def commit_layer(self, leaf: int, history: tuple[int, Any] | None = None) -> bool:
        """A layer has its rows, or its state. Was it the last one? Then the forward is kept."""
        book = self.state
        if len(book.appended_leaves) + 1 < len(self.leaf_groups):
            if history is not None:
                book.new_histories[history[0]] = history[1]
            book.appended_leaves.add(leaf)
            return False
        after, gone = list[PageTable](), list(book.retired_slots)
        for kind, change in sorted(book.plans.items()):
            after.append(change.new_table)
            if len(change.freed_slots[0]) or len(change.freed_slots[1]):
                gone.append((kind, change.freed_slots))
        coming = book.new_histories if history is None else book.new_histories | dict([history])
        states = tuple(coming.get(i, past) for i, past in enumerate(book.histories))
        to_follow = min(extent.num_columns for extent in after) if self.external_states else None
        came = max((change.num_new for change in book.plans.values()), default=1)
        self.state = CacheState(
            *(book.pools, tuple(after), states, book.storages),
            retired_slots=tuple(gone),
            unreported_length=to_follow,
            pruning_queries=book.pruning_queries,
            has_unpruned_prompt=book.has_unpruned_prompt or self.is_prompt(came),
        )
        if to_follow is not None:
            self._notify_external_states()
        if len(self.state.lengths) > 1:
            logger.warning(
                "layers hold different numbers of tokens: %s", sorted(self.state.lengths)
            )
        if len(gone) > len(book.retired_slots):
            self.compact()
        return True

    @property
    def query_nbytes(self) -> int:
        """Bytes of the queries that are kept for a prune."""
        return sum(
            one.queries.nbytes
            for one in (*self.state.pruning_queries.values(), *self.forward_queries.values())
        )

    def is_prompt(self, count: int) -> bool:
        """Are so many tokens, that come together, part of a prompt?"""
        return self.in_prompt or (
            count > 1 and not (self.in_speculation or self.external_speculation)
        )

    def replace_queries(
        self, queries: dict[int, PruningQueries], *, has_unpruned_prompt: bool
    ) -> None:
        """Know this of what was asked: nothing, once a prune is over or other tokens are here."""
        self.forward_queries = {}
        self.state = replace(
            self.state, pruning_queries=queries, has_unpruned_prompt=has_unpruned_prompt
        )

    def _collect_queries(self) -> None:
        """Know what the newest forward asked, if it was kept."""
        asked, seen, self.forward_queries = (
            dict(self.state.pruning_queries),
            self.forward_queries,
            {},
        )
        for leaf, new in seen.items():
            kind = self.leaf_groups[leaf]
            if kind is not None and new.num_columns == self.state.page_tables[kind].num_columns:
                asked[leaf] = asked[leaf].append(new) if leaf in asked else new
        if seen:
            self.state = replace(self.state, pruning_queries=asked)

    def commit(self, state: CacheState) -> None:
        """Let this hold from now on, and no forward be under way."""
        self.state = replace(state, appended_leaves=set(), new_histories={})

    def rollback(self) -> None:
        """Take back what a forward left that never reached every layer."""
        self.num_changes += 1
        self._notify_external_states()
        book = self.state
        if not book.appended_leaves and not book.plans:
            self._collect_queries()
            return
        self.forward_queries = {}
        if book.appended_leaves:
            logger.warning(
                "a forward appended to %d of %d layers and was abandoned: its tokens are taken"
                " back",
                len(book.appended_leaves),
                len(self.leaf_groups),
            )
            self.num_abandoned += 1
        taken = tuple((kind, change.allocated_slots) for kind, change in book.plans.items())
        self.commit(replace(book, plans={}, retired_slots=book.retired_slots + taken))
        if book.appended_leaves:
            for follower in self.external_states:
                follower.invalidate()

    def replace_tables(
        self,
        page_tables: Iterable[PageTable],
        histories: tuple[Any, ...],
        allocated_slots: Iterable[RetiredSlots] = (),
        queries: Mapping[int, PruningQueries] | None = None,
        *,
        has_unpruned_prompt: bool = False,
    ) -> None:
        """Other extents over the same pools, while counts change; some slots were `taken` for it.

        They are held before the old ones go. Of what their tokens asked, `asked` stays known.
        """
        self.free_retired_slots()
        new = tuple(page_tables)
        for pools, extent in zip(self.pools, new, strict=False):
            pools.add_references(extent)
        old = [
            (k, (e.list_open_slots(), e.list_sealed_slots()))
            for k, e in enumerate(self.state.page_tables)
        ]
        retired = (*allocated_slots, *old)
        self.forward_queries = {}
        now = replace(
            self.state, page_tables=new, histories=histories, plans={}, retired_slots=retired
        )
        self.commit(
            replace(
                now, pruning_queries=dict(queries or {}), has_unpruned_prompt=has_unpruned_prompt
            )
        )
        self.free_retired_slots()

    def check(self) -> None:
        """Are the slots of all pools free, or counted as often as they are held?"""
        with self.lock:
            with self.guard_counts():
                pass  # where a change was interrupted, the next one counts them anew
            for pool in self._list_pools():
                pool.check()

    @contextmanager
    def guard_counts(self) -> Iterator[None]:
        """Counts change within; where that is interrupted, they are counted anew.

        All slots are taken within that an extent is to hold: before, they are nobody's.
        """
        with self.lock:
            pools = self._list_pools()
            for pool in pools:
                if pool.counts_interrupted or pool.has_lost_holder:
                    pool.recount()
                pool.counts_interrupted = True
            try:
                yield
            except Exception:
                for pool in pools:
                    pool.recount()
                raise
            for pool in pools:
                pool.counts_interrupted = False

    def free_retired_slots(self) -> None:
        """Drop the slots that the last forward retired, while counts change."""
        retired = self.state.retired_slots
        if retired:
            self.state = replace(self.state, retired_slots=())
            for kind, slots in retired:
                self.pools[kind].drop_references(*slots)

    def _notify_external_states(self) -> None:
        """Tell states of the host of a forward that was kept, if they were not told."""
        length = self.state.unreported_length
        if length is not None:
            for follower in self.external_states:
                follower.advance_to(length)
            self.state = replace(self.state, unreported_length=None)

    def compact(self, *, after_prune: bool = False) -> None:
        """Give back what a chunk took beyond what its tokens would have, or what a prune let go.

        The tokens are kept already: where there is no memory for it, the next chunk tries again.
        """
        for kind in range(len(self.layer_groups)):
            with suppress(MemoryError, torch.OutOfMemoryError):
                self._compact_group(
                    kind, after_prune=after_prune and self.layer_groups[kind].pruning is not None
                )

    def _compact_group(self, group: int, *, after_prune: bool) -> None:
        """Do it where nobody else holds pages.

        Pages of which there were too many, open or sealed, move to new tensors: whoever reads the
        old ones is not disturbed.
        """
        pools, book = self.pools[group], self.state
        one, was = self.layer_groups[group], book.page_tables[group]
        opened, sealed = bound_slots(one, was.seq_lens.tolist())
        if after_prune and one.capacity is None:
            step = pools.open.step
            held = (
                len(np.unique(slots)) for slots in (was.list_open_slots(), was.list_sealed_slots())
            )
            opened, sealed = (-(-count // step) * step for count in held)
        large = pools.open.size > opened, pools.sealed.size > sealed
        if pools.is_shared or not any(large):
            return
        new = Pools.make(one)
        self._reserve_capacity(group, was.num_tables, new)
        now = relocate_table(was, new.open if large[0] else None, new.sealed if large[1] else None)
        new = Pools(*_select_each(large, new, pools))
        storages = book.storages | {
            leaf: book.storages[leaf].relocate_pages(was, now, (new.open.size, new.sealed.size))
            for leaf, own in enumerate(self.leaf_groups)
            if own == group
        }
        for pool in new:
            pool.add_holder(self)
        left = [k for k in book.retired_slots if k[0] != group]  # slots of pools that stay
        left += [(k, _select_each(large, NO_SLOTS, s)) for k, s in book.retired_slots if k == group]
        extents, both = (
            _replace_item(book.page_tables, group, now),
            _replace_item(book.pools, group, new),
        )
        self.commit(
            replace(
                book, page_tables=extents, pools=both, storages=storages, retired_slots=tuple(left)
            )
        )

    def _list_slots(self, group: int) -> Slots:
        book, parts = self.state, []
        if book.page_tables:
            parts.append(
                (
                    book.page_tables[group].list_open_slots(),
                    book.page_tables[group].list_sealed_slots(),
                )
            )
        if group in book.plans:
            parts.append(book.plans[group].allocated_slots)
        parts += [slots for which, slots in book.retired_slots if which == group]
        both = tuple(zip(*parts, strict=True)) or ((EMPTY_SLOTS,), (EMPTY_SLOTS,))
        return np.concatenate(both[0]), np.concatenate(both[1])

    def _list_pools(self) -> list[Pool]:
        return [pool for pools in self.pools for pool in pools]


def _select_each(
    mask: tuple[bool, bool], if_true: tuple[T, T], if_false: tuple[T, T]
) -> tuple[T, T]:
    """Of open pages and of sealed ones: these, or the others."""
    return if_true[0] if mask[0] else if_false[0], if_true[1] if mask[1] else if_false[1]


def _replace_item(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])
