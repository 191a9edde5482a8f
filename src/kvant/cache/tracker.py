"""The committed page tables of a cache, its open forward, and the slots that both hold.

The state is one immutable `CacheState`, and every operation ends in the assignment of another. So
an exception, KeyboardInterrupt included, leaves the old state or the new one for all layers. Slot
counts change separately; after an interrupt they are recounted.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import RLock
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvant.cache import checks, pool_sizing
from kvant.cache.advance import Pools, advance, advance_steadily
from kvant.cache.pool import Pool
from kvant.cache.state import CacheState, PruningQueries, RetiredSlots, Slots
from kvant.cache.storage import Storage
from kvant.contracts import ExternalState
from kvant.errors import CapacityError, UnsupportedView
from kvant.page_table import AppendPlan, Ints, LayerGroup, PageTable

if TYPE_CHECKING:
    from kvant.cache.recurrent import StateHistory

logger = logging.getLogger("kvant")

HOLDER_SERIALS = itertools.count()  # serials of `SlotHolder`s
EMPTY_SLOTS = np.zeros(0, np.int64)


class StateTracker:
    """The integers of a cache: a `SlotHolder` in the pools of its layer groups."""

    def __init__(
        self,
        layer_groups: Sequence[LayerGroup],
        pools: Sequence[Pools],
        leaf_groups: Sequence[int | None],
        histories: tuple[StateHistory, ...] = (),
        storages: Mapping[int, Storage] | None = None,
        lock: RLock | None = None,
    ) -> None:
        self.serial = next(HOLDER_SERIALS)
        self.layer_groups = tuple(layer_groups)
        self.leaf_groups = tuple(leaf_groups)  # None: a recurrent layer
        self.prunes = any(group.pruning is not None for group in layer_groups)
        self.state = CacheState(tuple(pools), (), histories, dict(storages or {}))
        self.num_abandoned = 0  # forwards that were rolled back
        self.num_changes = 0  # operations that may have changed `nbytes`
        self.backend: str | None = None  # None: the first that supports the view
        self.in_speculation = False  # chunks may be drafts: within `speculation_mode`,
        self.external_speculation = False  # or because the model library says so
        self.in_prompt = False  # all tokens are of a prompt: within `prompt_mode`
        self.forward_queries: dict[int, PruningQueries] = {}  # of the newest forward, by leaf
        self.prune_callback: Callable[[], object] = int  # set by CacheContents, which has the rows
        self.external_states: tuple[ExternalState, ...] = ()
        self.lock = lock or RLock()  # shared by all caches over these pools
        for pool in self._list_pools():
            pool.add_holder(self)

    def __del__(self) -> None:
        """Leave the slots to the next allocation: this may run inside of a pool operation."""
        state: CacheState | None = self.__dict__.get("state")
        for group, pools in enumerate(state.pools if state is not None else ()):
            for pool, slots in zip(pools, self._list_slots(group), strict=True):
                pool.holders.pop(self.serial, None)
                pool.orphaned_slots.append((self.serial, slots))

    @property
    def pools(self) -> tuple[Pools, ...]:
        return self.state.pools

    @property
    def batch(self) -> int:
        return self.state.page_tables[0].batch if self.state.page_tables else 0

    def list_slots(self, pool: Pool) -> Ints:
        """Return the slots of `pool` that this cache holds."""
        for group, pools in enumerate(self.pools):
            if pool is pools.open:
                return self._list_slots(group)[0]
            if pool is pools.sealed:
                return self._list_slots(group)[1]
        return EMPTY_SLOTS

    @property
    def is_empty(self) -> bool:
        """Whether no column has been appended since the cache was created or reset."""
        return all(
            (table.lengths == -table.padding).all() and not table.seq_lens.any()
            for table in self.state.page_tables
        )

    def get_committed_table(self, group: int) -> PageTable | None:
        return self.state.page_tables[group] if self.state.page_tables else None

    def get_page_table(self, group: int, leaf: int) -> PageTable | None:
        """Return the table of a layer, with the rows of an open forward included.

        This reads one state, so it is safe while another thread commits.
        """
        state = self.state
        plan = state.plans.get(group) if leaf in state.appended_leaves else None
        if plan is not None:
            return plan.new_table
        return state.page_tables[group] if state.page_tables else None

    def count_slots(self, group: int) -> tuple[int, int]:
        """Return the open and the sealed slots that this cache holds or that are free."""
        pools = self.pools[group].open, self.pools[group].sealed
        if any(pool.orphaned_slots for pool in pools):
            with self.guard_counts():
                for pool in pools:
                    pool.collect_orphans()
        slots = self._list_slots(group)
        num_open, num_sealed = (
            len(np.unique(pool_slots)) + pool.num_free
            for pool_slots, pool in zip(slots, pools, strict=True)
        )
        return num_open, num_sealed

    def bound_slots_after(
        self, group: int, page_table: PageTable, num_new_tokens: int
    ) -> tuple[int, int]:
        """Return the most slots after `num_new_tokens` more tokens, in chunks or single ones."""
        present = self.count_slots(group)
        needed = pool_sizing.bound_slots_after(
            page_table, num_new_tokens, is_shared=self.pools[group].is_shared
        )
        return max(present[0], needed[0]), max(present[1], needed[1])

    def begin_append(self, leaf: int, count: int) -> None:
        """Prepare an append to a layer: roll back a failed forward, and prune if it is due.

        A forward has failed if this layer has its rows already, or if no layer has any. The first
        token after a prompt prunes it.
        """
        self.num_changes += 1
        state = self.state
        if state.unreported_length is not None:
            self._notify_external_states()
        if leaf in state.appended_leaves or (state.plans and not state.appended_leaves):
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
        """Return the plan for `count` more columns; the first layer of a group makes it."""
        state = self.state
        plan = state.plans.get(group)
        if plan is None and count == 1 and start is None and state.page_tables:
            page_table = state.page_tables[group]
            capacity = self.layer_groups[group].capacity
            fits = capacity is None or page_table.num_columns < capacity
            if (
                page_table.steady_tokens
                and fits
                and (page_table.batch, page_table.tables_per_sequence)
                == (batch, tables_per_sequence)
            ):
                plan = state.plans[group] = advance_steadily(page_table)
        if plan is None:
            padding = None if start is None else checks.parse_padding(start, batch)
            plan = self._make_plan(
                group, batch, count, padding, new_rows_dense, tables_per_sequence
            )
        if start is not None or plan.num_new != count or plan.old_table.batch != batch:
            checks.check_same_forward(plan, batch, count, start)
        return plan

    def plan_token(self, *, seals: bool) -> list[AppendPlan]:
        """Return one plan per group for one more token of every sequence.

        An external kernel writes its rows. So no page may be due with them, unless the kernel
        `seals`.
        """
        self.num_changes += 1
        if None in self.leaf_groups or self.external_states:
            raise UnsupportedView("a recurrent layer: its state cannot be written by a kernel")
        if self.prunes:
            raise UnsupportedView("a layer that prunes: its heads have tables of their own")
        if self.is_empty:
            raise CapacityError("no tokens yet, so the size of rows is unknown: append first")
        for page_table in () if seals else self.state.page_tables:
            checks.check_no_page_due(page_table)
        try:
            plans = [
                self.plan_append(i, self.batch, 1, None, new_rows_dense=False)
                for i in range(len(self.layer_groups))
            ]
        except CapacityError:
            self.rollback()
            raise
        if seals:
            return plans
        return [replace(plan, writes=plan.writes[:0], derived={}) for plan in plans]

    def predict_growth(
        self,
        group: int,
        batch: int,
        count: int,
        start: Sequence[int] | Tensor | None,
        *,
        new_rows_dense: bool,
        tables_per_sequence: int,
    ) -> tuple[int, int]:
        """Return the open and sealed slots by which an append would grow the pools of a group."""
        with self.lock:
            if group in self.state.plans:
                return 0, 0
            padding = None if start is None else checks.parse_padding(start, batch)
            page_table = self._get_base_table(group, batch, count, padding, tables_per_sequence)
            trial = self.pools[group].copy()
            if self.layer_groups[group].capacity is not None and self.is_empty:
                pool_sizing.reserve_capacity(page_table.layer_group, page_table.num_tables, trial)
            for retired_group, slots in self.state.retired_slots:
                if retired_group == group:
                    trial.drop_references(*slots)
            table_copy = replace(
                page_table,
                sealed_table=page_table.sealed_table.copy(),
                open_table=page_table.open_table.copy(),
            )
            advance(table_copy, count, trial, new_rows_dense=new_rows_dense)
            pools = self.pools[group]
            return trial.open.size - pools.open.size, trial.sealed.size - pools.sealed.size

    def _get_base_table(
        self,
        group: int,
        batch: int,
        count: int,
        padding: tuple[int, ...] | None,
        tables_per_sequence: int,
    ) -> PageTable:
        """Return the table that rows are appended to, or raise if they do not fit."""
        is_first = not self.state.page_tables or self.is_empty
        if is_first:
            padding = padding or (0,) * batch
            layer_group = self.layer_groups[group]
            page_table = PageTable.make_empty(layer_group, padding, tables_per_sequence)
        else:
            page_table = self.state.page_tables[group]
        plans = self.state.plans.values()
        checks.check_append_fits(
            page_table, plans, batch, count, tables_per_sequence, is_first=is_first
        )
        return page_table

    def _make_plan(
        self,
        group: int,
        batch: int,
        count: int,
        padding: tuple[int, ...] | None,
        new_rows_dense: bool,
        tables_per_sequence: int,
    ) -> AppendPlan:
        page_table = self._get_base_table(group, batch, count, padding, tables_per_sequence)
        pools = self.pools[group]
        with self.guard_counts():
            self.free_retired_slots()
            if self.is_empty:
                pool_sizing.reserve_capacity(page_table.layer_group, page_table.num_tables, pools)
            plan = self.state.plans[group] = advance(
                page_table, count, pools, new_rows_dense=new_rows_dense
            )
        return plan

    def commit_layer(self, leaf: int, history: tuple[int, StateHistory] | None = None) -> bool:
        """Record that a layer has its rows or state; return whether this commits the forward."""
        state = self.state
        if len(state.appended_leaves) + 1 < len(self.leaf_groups):
            if history is not None:
                state.new_histories[history[0]] = history[1]
            state.appended_leaves.add(leaf)
            return False
        new_tables, retired = list[PageTable](), list(state.retired_slots)
        for group, plan in sorted(state.plans.items()):
            new_tables.append(plan.new_table)
            if len(plan.freed_slots[0]) or len(plan.freed_slots[1]):
                retired.append((group, plan.freed_slots))
        new = state.new_histories if history is None else state.new_histories | dict([history])
        histories = tuple(new.get(i, old) for i, old in enumerate(state.histories))
        external_length = None
        if self.external_states:
            external_length = min(table.num_columns for table in new_tables)
        num_new = max((plan.num_new for plan in state.plans.values()), default=1)
        self.state = CacheState(
            *(state.pools, tuple(new_tables), histories, state.storages),
            retired_slots=tuple(retired),
            unreported_length=external_length,
            pruning_queries=state.pruning_queries,
            has_unpruned_prompt=state.has_unpruned_prompt or self.is_prompt(num_new),
        )
        if external_length is not None:
            self._notify_external_states()
        if len(self.state.lengths) > 1:
            logger.warning(
                "layers hold different numbers of tokens: %s", sorted(self.state.lengths)
            )
        if len(retired) > len(state.retired_slots):
            self.compact()
        return True

    @property
    def query_nbytes(self) -> int:
        """Bytes of the queries retained for a prune."""
        return sum(
            entry.queries.nbytes
            for entry in (*self.state.pruning_queries.values(), *self.forward_queries.values())
        )

    def is_prompt(self, count: int) -> bool:
        """Return whether a forward of `count` tokens is part of a prompt."""
        return self.in_prompt or (
            count > 1 and not (self.in_speculation or self.external_speculation)
        )

    def replace_queries(
        self, queries: dict[int, PruningQueries], *, has_unpruned_prompt: bool
    ) -> None:
        """Replace the queries retained for pruning; {} after a prune or new contents."""
        self.forward_queries = {}
        self.state = replace(
            self.state, pruning_queries=queries, has_unpruned_prompt=has_unpruned_prompt
        )

    def _collect_queries(self) -> None:
        """Retain the queries of the newest forward, if it was committed."""
        queries = dict(self.state.pruning_queries)
        newest = self.forward_queries
        self.forward_queries = {}
        for leaf, new in newest.items():
            group = self.leaf_groups[leaf]
            if group is not None and new.num_columns == self.state.page_tables[group].num_columns:
                queries[leaf] = queries[leaf].append(new) if leaf in queries else new
        if newest:
            self.state = replace(self.state, pruning_queries=queries)

    def commit(self, state: CacheState) -> None:
        """Replace the state; no forward is open afterwards."""
        self.state = replace(state, appended_leaves=set(), new_histories={})

    def rollback(self) -> None:
        """Roll back an incomplete forward."""
        self.num_changes += 1
        self._notify_external_states()
        state = self.state
        if not state.appended_leaves and not state.plans:
            self._collect_queries()
            return
        self.forward_queries = {}
        if state.appended_leaves:
            logger.warning(
                "a forward appended to %d of %d layers only: its tokens are rolled back",
                len(state.appended_leaves),
                len(self.leaf_groups),
            )
            self.num_abandoned += 1
        allocated = tuple((group, plan.allocated_slots) for group, plan in state.plans.items())
        self.commit(replace(state, plans={}, retired_slots=state.retired_slots + allocated))
        if state.appended_leaves:
            for external_state in self.external_states:
                external_state.invalidate()

    def replace_tables(
        self,
        page_tables: Iterable[PageTable],
        histories: tuple[StateHistory, ...],
        allocated_slots: Iterable[RetiredSlots] = (),
        queries: Mapping[int, PruningQueries] | None = None,
        *,
        has_unpruned_prompt: bool = False,
    ) -> None:
        """Replace the page tables over the same pools; call within `guard_counts`.

        `allocated_slots` were allocated for them. They are counted before the old slots are
        dropped. `queries` are those that stay valid.
        """
        self.free_retired_slots()
        new_tables = tuple(page_tables)
        for pools, page_table in zip(self.pools, new_tables, strict=False):
            pools.add_references(page_table)
        old_slots = [
            (group, (table.list_open_slots(), table.list_sealed_slots()))
            for group, table in enumerate(self.state.page_tables)
        ]
        retired = (*allocated_slots, *old_slots)
        self.forward_queries = {}
        state = replace(
            self.state, page_tables=new_tables, histories=histories, plans={}, retired_slots=retired
        )
        self.commit(
            replace(
                state, pruning_queries=dict(queries or {}), has_unpruned_prompt=has_unpruned_prompt
            )
        )
        self.free_retired_slots()

    def check(self) -> None:
        """Verify that each slot of the pools is free, or counted once per holder."""
        with self.lock:
            with self.guard_counts():
                pass  # recounts after an interrupted change
            for pool in self._list_pools():
                pool.check()

    @contextmanager
    def guard_counts(self) -> Iterator[None]:
        """Protect changes of slot counts: an interrupted change is recounted.

        Allocate all slots of a table inside the block: before it is assigned, no holder lists them.
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
        """Free the slots that the last forward released; call within `guard_counts`."""
        retired = self.state.retired_slots
        if retired:
            self.state = replace(self.state, retired_slots=())
            for group, slots in retired:
                self.pools[group].drop_references(*slots)

    def _notify_external_states(self) -> None:
        """Report a committed forward to external states, unless it was reported."""
        length = self.state.unreported_length
        if length is not None:
            for external_state in self.external_states:
                external_state.advance_to(length)
            self.state = replace(self.state, unreported_length=None)

    def compact(self, *, after_prune: bool = False) -> None:
        """Shrink pools that a chunk or a prune left larger than the tokens need.

        This is optional: without memory for the copy, the next chunk tries again.
        """
        for group in range(len(self.layer_groups)):
            with suppress(MemoryError, torch.OutOfMemoryError):
                self._compact_group(
                    group, after_prune=after_prune and self.layer_groups[group].pruning is not None
                )

    def _compact_group(self, group: int, *, after_prune: bool) -> None:
        state = pool_sizing.shrink_pools(
            self.state, group, self.leaf_groups, after_prune=after_prune
        )
        if state is not None:
            for pool in state.pools[group]:
                pool.add_holder(self)
            self.commit(state)

    def _list_slots(self, group: int) -> Slots:
        state, parts = self.state, []
        if state.page_tables:
            table = state.page_tables[group]
            parts.append((table.list_open_slots(), table.list_sealed_slots()))
        if group in state.plans:
            parts.append(state.plans[group].allocated_slots)
        parts += [slots for retired_group, slots in state.retired_slots if retired_group == group]
        by_pool = tuple(zip(*parts, strict=True)) or ((EMPTY_SLOTS,), (EMPTY_SLOTS,))
        return np.concatenate(by_pool[0]), np.concatenate(by_pool[1])

    def _list_pools(self) -> list[Pool]:
        return [pool for pools in self.pools for pool in pools]
