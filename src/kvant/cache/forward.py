"""An open forward: what the layers of a cache have appended so far, until all of them have.

    layers that appended    forward
    none                    not begun, or only planned: `plan_tokens`, for an external kernel
    some                    open: plans by layer group, new storages and states by layer
    all                     committed: the cache adopts the state that `commit` returns
    some, then one again    failed: it is rolled back, and another one begins

Nothing of it is visible in the committed state. So to roll back is to drop it, and to free the
slots that it allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from kvant.cache import checks
from kvant.cache.layout import AttentionLeaf
from kvant.cache.recurrent import StateHistory
from kvant.cache.state import CacheState, PruningQueries
from kvant.contracts import AttentionRequest
from kvant.errors import CapacityError, UnsupportedView
from kvant.lazy import Derived
from kvant.page_table import AppendPlan, PageTable
from kvant.pages.advance import MAX_DRAFT_COLUMNS, advance, advance_steadily
from kvant.pages.pool import GroupSlots, reserve_capacity
from kvant.pages.storage import Storage


class Forward:
    """The appends of one forward, which extends `state`."""

    def __init__(self, state: CacheState, *, is_prompt: bool = False) -> None:
        self.state = state
        self.number = state.num_ended_forwards  # forwards that ended before it
        self.is_prompt = is_prompt  # its tokens are part of a prompt
        self.plans: dict[int, AppendPlan] = {}  # by layer group
        self.appended: set[int] = set()  # leaves that have their rows or state
        self.histories: dict[int, StateHistory] = {}  # new ones, by index in `state.histories`
        self.storages: dict[int, Storage] = {}  # new ones, by leaf
        self.queries: dict[int, PruningQueries] = {}  # its newest queries, by leaf

    @property
    def allocated_slots(self) -> tuple[GroupSlots, ...]:
        return tuple((group, plan.allocated_slots) for group, plan in self.plans.items())

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
        """Return the plan for `count` more columns; the first layer of a group makes it.

        With `new_rows_dense`, attention reads them from the appended tensors, not from pages.
        """
        plan, state = self.plans.get(group), self.state
        is_short = 0 < count <= MAX_DRAFT_COLUMNS
        if plan is None and is_short and start is None and state.page_tables:
            page_table = state.page_tables[group]
            capacity = page_table.layer_group.capacity
            fits = capacity is None or page_table.num_columns + count <= capacity
            if (
                count <= page_table.steady_tokens
                and fits
                and (page_table.batch, page_table.tables_per_sequence)
                == (batch, tables_per_sequence)
            ):
                plan = self.plans[group] = advance_steadily(page_table, count)
        if plan is None:
            if self.histories:
                self.check_batch(batch)
            padding = None if start is None else checks.parse_padding(start, batch)
            base_table = self._get_base_table(group, batch, count, padding, tables_per_sequence)
            pools = state.pools[group]
            with state.pools.guard_counts():
                if state.is_empty:
                    reserve_capacity(base_table.layer_group, base_table.num_tables, pools)
                plan = self.plans[group] = advance(
                    base_table, count, pools, new_rows_dense=new_rows_dense
                )
        if start is not None or plan.num_new != count or plan.old_table.batch != batch:
            checks.check_same_forward(plan, batch, count, start)
        return plan

    def check_batch(self, batch: int) -> None:
        """Refuse a batch other than that of the layers before; 0: a state without tensors."""
        batches = {plan.old_table.batch for plan in self.plans.values()}
        batches |= {history.batch for history in self.histories.values()} - {0}
        if batch and batches - {batch}:
            raise ValueError(
                f"{batch} sequences, where another layer of this forward has {min(batches)}"
            )

    def plan_tokens(self, count: int, *, seals: bool) -> list[AppendPlan]:
        """Return one plan per group for `count` more tokens of every sequence.

        An external kernel writes their rows, and reads them from their pages. A kernel that also
        `seals` pages needs the lists of writes and seals. For others these lists are empty, and the
        tokens must not complete a page that must be sealed.
        """
        state = self.state
        if None in state.layout.leaf_groups:
            raise UnsupportedView("a recurrent layer: its state cannot be written by a kernel")
        if state.layout.prunes:
            raise UnsupportedView("a layer that prunes: its heads have tables of their own")
        if state.is_empty:
            raise CapacityError("no tokens yet, so the size of rows is unknown: append first")
        for page_table in () if seals else state.page_tables:
            checks.check_no_page_due(page_table, count)
        groups = range(len(state.layout.layer_groups))
        plans = [self.plan_append(group, state.batch, count) for group in groups]
        if any(plan.reads_new_rows for plan in plans):
            raise CapacityError(
                f"plan_tokens({count}): not all of their rows stay in open pages; use append(), or "
                "give the spec a larger slack=N"
            )
        if seals:
            return plans
        return [replace(plan, writes=plan.writes[:0], derived=Derived()) for plan in plans]

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
        if group in self.plans:
            return 0, 0
        state = self.state
        padding = None if start is None else checks.parse_padding(start, batch)
        page_table = self._get_base_table(group, batch, count, padding, tables_per_sequence)
        pools, trial = state.pools[group], state.pools[group].copy()
        if page_table.layer_group.capacity is not None and state.is_empty:
            reserve_capacity(page_table.layer_group, page_table.num_tables, trial)
        for retired_group, slots in state.retired_slots:
            if retired_group == group:
                trial.drop_references(*slots)
        table_copy = replace(
            page_table,
            sealed_table=page_table.sealed_table.copy(),
            open_table=page_table.open_table.copy(),
        )
        advance(table_copy, count, trial, new_rows_dense=new_rows_dense)
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
        state = self.state
        is_first = not state.page_tables or state.is_empty
        if is_first:
            layer_group = state.layout.layer_groups[group]
            page_table = PageTable.make_empty(
                layer_group, padding or (0,) * batch, tables_per_sequence
            )
        else:
            page_table = state.page_tables[group]
        checks.check_append_fits(
            page_table, self.plans.values(), batch, count, tables_per_sequence, is_first=is_first
        )
        return page_table

    def record_queries(
        self, leaf: AttentionLeaf, num_heads: int, request: AttentionRequest
    ) -> None:
        """Record the newest queries of a layer of `num_heads` key heads, for its next prune.

        Only the first call counts: layers that share these rows call it later.
        """
        if leaf.index in self.queries or leaf.spec.prune is None:
            return
        max_queries = leaf.spec.prune.score.num_queries + MAX_DRAFT_COLUMNS
        batch, num_query_heads, _, dim = request.q.shape
        newest = request.q.detach()[:, :, -max_queries:].reshape(
            batch, num_heads, num_query_heads // num_heads, -1, dim
        )
        num_columns = self.plans[leaf.group].new_table.num_columns
        self.queries[leaf.index] = PruningQueries(
            newest.clone(), num_columns, request.scale, max_queries
        )

    def commit(self, current: CacheState, *, has_external_states: bool) -> CacheState:
        """Return the state after this forward, whose layers all have their rows.

        `current` is the state of the cache; a storage may have moved since the forward began.
        """
        new_tables: list[PageTable] = []
        freed: list[GroupSlots] = []
        for group, plan in sorted(self.plans.items()):
            new_tables.append(plan.new_table)
            if len(plan.freed_slots[0]) or len(plan.freed_slots[1]):
                freed.append((group, plan.freed_slots))
        histories, storages = current.histories, current.storages
        if self.histories:
            histories = tuple(self.histories.get(i, old) for i, old in enumerate(histories))
        if self.storages:
            storages = {**storages, **self.storages}
        return CacheState(
            current.layout,
            current.pools,
            tuple(new_tables),
            histories,
            storages,
            retired_slots=(*current.retired_slots, *freed) if freed else current.retired_slots,
            unreported_length=(
                min(table.num_columns for table in new_tables) if has_external_states else None
            ),
            pruning_queries=current.pruning_queries,
            has_unpruned_prompt=current.has_unpruned_prompt or self.is_prompt,
            num_ended_forwards=current.num_ended_forwards + 1,
        )


def collect_queries(
    state: CacheState, newest: Mapping[int, PruningQueries]
) -> Mapping[int, PruningQueries]:
    """Return the retained queries, extended by `newest` of the last forward if it committed."""
    queries = dict(state.pruning_queries)
    for leaf, new in newest.items():
        group = state.layout.leaf_groups[leaf]
        if group is not None and new.num_columns == state.page_tables[group].num_columns:
            queries[leaf] = queries[leaf].append(new) if leaf in queries else new
    return queries
