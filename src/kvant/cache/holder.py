"""The mutable part of a cache: its present state, its last forward, and the lock for both.

Layers and their cache refer to the same holder. The pools count one reference for each slot
that the holder lists.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from threading import RLock
from typing import Any

import numpy as np
import torch

from kvant.cache.forward import Forward, collect_queries
from kvant.cache.layout import AttentionLeaf, RecurrentLeaf
from kvant.cache.pruning import prune_state
from kvant.cache.recurrent import StateHistory
from kvant.cache.row_attention import RowAttention
from kvant.cache.state import CacheState
from kvant.cache.transitions import shrink_pools
from kvant.contracts import ExternalState, LayerStats
from kvant.page_table import Ints, PageTable
from kvant.pages.pool import GroupSlots, Pool, Slots, bound_slots_after
from kvant.pages.storage import Storage

logger = logging.getLogger("kvant")

HOLDER_SERIALS = itertools.count()  # serials of holders
EMPTY_SLOTS = np.zeros(0, np.int64)


class StateHolder:
    """The state and the last forward of a cache; `external_states` are updated by the model."""

    def __init__(
        self, state: CacheState, external_states: Mapping[str, ExternalState] | None = None
    ) -> None:
        self.serial = next(HOLDER_SERIALS)
        self.forward: Forward | None = None
        self.state = state
        self.external_states = dict(external_states or {})  # by leaf name
        warned = set[str]()  # each warning is issued once per cache
        self.stats = {name: LayerStats(warned=warned) for name in state.layout.names}
        for name, external_state in self.external_states.items():
            external_state.stats.warned = warned
            self.stats[name] = external_state.stats
        self.num_abandoned = 0  # forwards that were rolled back after a layer had appended
        self.num_changes = 0  # operations that may have changed the bytes of the cache
        self.num_appended_forwards = 0  # forwards that appended rows: not those of `plan_tokens`
        self.backend: str | None = None  # None: the first that supports the view
        # Set by `speculation_mode`, and by the model library: chunks may then be drafts.
        self.in_speculation = False
        self.external_speculation = False
        self.in_prompt = False  # set by `prompt_mode`: all tokens are part of a prompt
        self.row_attention: RowAttention | None = None  # set by `record_attention`
        state.pools.add_holder(self)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Queue the slots: a pool operation may be running, so a later one frees them."""
        if is_finalizing():  # modules, numpy among them, may be gone
            return
        state: CacheState | None = self.__dict__.get("state")
        for group, pools in enumerate(state.pools if state is not None else ()):
            for pool, slots in zip(pools, self._list_group_slots(group), strict=True):
                pool.holders.pop(self.serial, None)
                pool.orphaned_slots.append((self.serial, slots))

    @property
    def lock(self) -> RLock:
        """Shared by all caches over these pools."""
        return self.state.pools.lock

    # ---- slots

    def list_slots(self, pool: Pool) -> Ints:
        """Return the slots of `pool` that this cache holds."""
        for group, pools in enumerate(self.state.pools):
            if pool in pools:
                return self._list_group_slots(group)[pools.index(pool)]
        return EMPTY_SLOTS

    def count_slots(self, group: int) -> tuple[int, int]:
        """Return the numbers of open and of sealed slots that this cache holds or that are free."""
        pools = self.state.pools[group]
        if any(pool.orphaned_slots for pool in pools):
            with self.state.pools.guard_counts():
                for pool in pools:
                    pool.collect_orphans()
        slots = self._list_group_slots(group)
        num_open, num_sealed = (
            len(np.unique(pool_slots)) + pool.num_free
            for pool_slots, pool in zip(slots, pools, strict=True)
        )
        return num_open, num_sealed

    def bound_slots_after(
        self, group: int, page_table: PageTable, num_new_tokens: int
    ) -> tuple[int, int]:
        """Return upper bounds of open and of sealed slots after `num_new_tokens` more tokens."""
        present, is_shared = self.count_slots(group), self.state.pools[group].is_shared
        needed = bound_slots_after(page_table, num_new_tokens, is_shared=is_shared)
        return max(present[0], needed[0]), max(present[1], needed[1])

    def read(self) -> tuple[CacheState, Forward | None]:
        """Return the state, and the open forward that extends it; None: there is none.

        The two are consistent even while another thread commits.
        """
        state, forward = self.state, self.forward
        if forward is not None and forward.number != state.num_ended_forwards:
            forward = None
        return state, forward

    def get_page_table(self, leaf: AttentionLeaf) -> PageTable | None:
        """Return the table of a layer, with the rows of an open forward included."""
        state, forward = self.read()
        if forward is not None and leaf.index in forward.appended:
            return forward.plans[leaf.group].new_table
        return state.get_page_table(leaf.group)

    def get_history(self, leaf: RecurrentLeaf) -> StateHistory:
        """Return the states of a recurrent layer, with that of an open forward included."""
        state, forward = self.read()
        if forward is not None and leaf.index in forward.appended:
            return forward.histories[leaf.history]
        return state.histories[leaf.history]

    def get_storage(self, leaf: int) -> Storage | None:
        """Return the tensors of a layer, with those of an open forward; None before any rows."""
        state, forward = self.read()
        if forward is not None and leaf in forward.storages:
            return forward.storages[leaf]
        return state.storages.get(leaf)

    def _list_group_slots(self, group: int) -> Slots:
        (state, forward), parts = self.read(), []
        if state.page_tables:
            table = state.page_tables[group]
            parts.append((table.list_open_slots(), table.list_sealed_slots()))
        if forward is not None and group in forward.plans:
            parts.append(forward.plans[group].allocated_slots)
        parts += [slots for retired_group, slots in state.retired_slots if retired_group == group]
        by_pool = tuple(zip(*parts, strict=True)) or ((EMPTY_SLOTS,), (EMPTY_SLOTS,))
        return np.concatenate(by_pool[0]), np.concatenate(by_pool[1])

    # ---- forwards

    @property
    def open_forward(self) -> Forward | None:
        """The forward that has appended to some layers, or has planned to; None: there is none."""
        forward = self.read()[1]
        return forward if forward is not None and (forward.plans or forward.appended) else None

    def begin_append(self, leaf: int, count: int) -> Forward:
        """Return the open forward, or begin one; the first token after a prompt prunes the prompt.

        Roll back a failed forward first. A forward has failed if this layer already appended to it,
        or if it was planned and no layer appended.
        """
        self.num_changes += 1
        state, forward = self.read()
        if forward is not None and forward.appended and leaf not in forward.appended:
            return forward
        if state.unreported_length is not None:
            self._report_length()
        if forward is not None and (forward.plans or forward.appended):
            self.rollback()
        is_draft = self.in_speculation or self.external_speculation
        is_prompt = self.in_prompt or (count > 1 and not is_draft)
        if state.layout.prunes:
            self._collect_queries()
            if not is_prompt and count:
                self.prune()
        self.num_appended_forwards += 1
        return self.begin_forward(is_prompt=is_prompt)

    def begin_forward(self, *, is_prompt: bool) -> Forward:
        """Begin a forward while none is open; `is_prompt`: its tokens are part of a prompt."""
        if self.state.retired_slots:
            self.free_retired_pages()
        self.forward = forward = Forward(self.state, is_prompt=is_prompt)
        return forward

    def commit_layer(
        self, forward: Forward, leaf: int, history: tuple[int, StateHistory] | None = None
    ) -> bool:
        """Record that a layer has its rows or state; return whether this commits the forward."""
        if history is not None:
            forward.histories[history[0]] = history[1]
        if len(forward.appended) + 1 < len(self.state.layout.leaf_groups):
            forward.appended.add(leaf)
            return False
        self.commit(forward)
        return True

    def commit(self, forward: Forward) -> None:
        """Adopt the state after a forward whose layers all have their rows."""
        old = self.state
        self.state = forward.commit(old, has_external_states=bool(self.external_states))
        if self.external_states:
            self._report_length()
        if len(self.state.lengths) > 1:
            logger.warning(
                "layers hold different numbers of tokens: %s", sorted(self.state.lengths)
            )
        if len(self.state.retired_slots) > len(old.retired_slots):
            self.compact()
        # So that no old tensors are kept. A prune needs the queries that the forward records later.
        forward.state = self.state
        self.forward = forward if self.state.layout.prunes else None

    def rollback(self) -> None:
        """Roll back the last forward if it is incomplete; else move its queries to the state."""
        self.num_changes += 1
        self._report_length()
        forward = self.open_forward
        if forward is None:
            self._collect_queries()
            return
        forward.queries = {}
        num_layers = len(self.state.layout.leaf_groups)
        if forward.appended:
            logger.warning(
                "a forward appended to %d of %d layers only: its tokens are rolled back",
                len(forward.appended),
                num_layers,
            )
            self.num_abandoned += 1
        self.state = replace(
            self.state,
            retired_slots=self.state.retired_slots + forward.allocated_slots,
            num_ended_forwards=self.state.num_ended_forwards + 1,
        )
        if forward.appended:
            for external_state in self.external_states.values():
                external_state.invalidate()

    def _report_length(self) -> None:
        """Report a committed forward to external states, unless it was reported."""
        length = self.state.unreported_length
        if length is not None:
            for external_state in self.external_states.values():
                external_state.advance_to(length)
            self.state = replace(self.state, unreported_length=None)

    def _collect_queries(self) -> None:
        """Retain the queries of the last forward, if it was committed."""
        newest = self.forward.queries if self.forward is not None else {}
        if newest:
            self.state = replace(self.state, pruning_queries=collect_queries(self.state, newest))
            self.forward = None

    # ---- other operations

    def adopt(self, state: CacheState, allocated_slots: Iterable[GroupSlots] = ()) -> None:
        """Replace the state; call within `guard_counts` of its pools.

        `allocated_slots` have one reference from their allocation, and get another from the new
        tables. The first is dropped at the end, as are the references from the old tables.
        """
        self.num_changes += 1
        self.free_retired_slots()
        old = self.state
        state.pools.add_references(state.page_tables)
        state = replace(state, num_ended_forwards=old.num_ended_forwards + 1)
        if state.pools is old.pools:
            retired = (*allocated_slots, *old.list_table_slots())
            self.state = replace(state, retired_slots=retired)
            self.forward = None
            self.free_retired_slots()
            return
        state.pools.add_holder(self)
        with old.pools.guard_counts():
            self.state = replace(state, retired_slots=tuple(allocated_slots))
            old.pools.drop_references(old.list_table_slots())
            old.pools.remove_holder(self)
        self.forward = None
        self.free_retired_slots()

    def replace_state(self, **changes: Any) -> None:
        """Replace parts of the state that hold no slots."""
        self.num_changes += 1
        self.state = replace(self.state, **changes)
        if self.forward is not None:  # it keeps no old tensors
            self.forward.state = self.state

    @property
    def query_nbytes(self) -> int:
        """Bytes of the queries retained for a prune."""
        newest = {} if self.forward is None else self.forward.queries
        queries = (*self.state.pruning_queries.values(), *newest.values())
        return sum(entry.queries.nbytes for entry in queries)

    def free_retired_pages(self) -> None:
        """Free the pages that the last forward released; its views become invalid."""
        if self.state.retired_slots:
            with self.state.pools.guard_counts():
                self.free_retired_slots()

    def free_retired_slots(self) -> None:
        """Free the slots that the last forward released; call within `guard_counts`."""
        retired = self.state.retired_slots
        if retired:
            self.state = replace(self.state, retired_slots=())
            self.state.pools.drop_references(retired)

    def prune(self, row_attention: RowAttention | None = None) -> int:
        """Drop the rows that recipes do not retain; return how many per head, on average."""
        with self.state.pools.guard_counts():
            pruned, allocated, num_removed = prune_state(self.state, self.stats, row_attention)
            if pruned is self.state:
                return 0
            if not allocated:
                self.state = pruned
                return 0
            self.adopt(pruned, allocated)
        self.compact(after_prune=True)
        return num_removed

    def compact(self, *, after_prune: bool = False) -> None:
        """Shrink pools that a chunk or a prune left larger than the tokens need.

        This is optional: without memory for the copy, the next chunk tries again.
        """
        for group, layer_group in enumerate(self.state.layout.layer_groups):
            with suppress(MemoryError, torch.OutOfMemoryError):
                pruned = after_prune and layer_group.pruning is not None
                state = shrink_pools(self.state, group, after_prune=pruned)
                if state is not None:
                    for pool in state.pools[group]:
                        pool.add_holder(self)
                    self.state = state
