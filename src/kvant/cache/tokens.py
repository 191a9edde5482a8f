"""Tokens that an external kernel stores: planned before the kernel runs, and committed after.

plan_tokens   ->   the kernel writes the rows and computes attention   ->   commit_tokens
allocates the slots of the rows                                             or `rollback`
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from kvant.attention.store_rows import count_sealed_pages, make_empty_rows, store_rows
from kvant.cache.cache import Cache
from kvant.cache.holder import StateHolder
from kvant.contracts import PagedTensors
from kvant.errors import CacheError, CapacityError, UnsupportedView
from kvant.page_table import AppendPlan


def plan_tokens(cache: Cache, count: int = 1, *, seals: bool = False) -> list[AppendPlan]:
    """Allocate `count` more tokens of every sequence, whose rows an external kernel writes.

    Pages that are due by now are sealed here, and shared pages to be written are copied. If the
    kernel `seals`, it does both itself. Return one plan per layer group: it tells where rows go.
    Call `commit_tokens` afterwards, or `rollback`.
    """
    cache.rollback()
    holder = cache.holder
    with holder.lock:
        holder.num_changes += 1
        if holder.external_states:
            raise UnsupportedView("a recurrent layer: its state cannot be written by a kernel")
        forward = holder.begin_forward(is_prompt=holder.in_prompt)
        try:
            plans = forward.plan_tokens(count, seals=seals)
        except CapacityError:
            cache.rollback()
            raise
        # A steady plan has no page to allocate, copy or seal.
        if not all(plan.is_steady for plan in plans):
            _prepare_pages(holder, plans, seals=seals)
    return plans


def _prepare_pages(holder: StateHolder, plans: Sequence[AppendPlan], *, seals: bool) -> None:
    """Allocate memory for the slots of `plans`; unless the kernel `seals`, copy and seal pages."""
    for leaf in holder.state.layout.attention:
        plan, storage = plans[leaf.group], holder.state.storages[leaf.index]
        if not plan.is_steady:
            pools = holder.state.pools[leaf.group]
            storage.ensure_slots(pools.open.size, pools.sealed.size)
            if not seals:  # the rows of the tokens are written later
                empty_rows = make_empty_rows(plan, storage.sides)
                store_rows(plan, empty_rows, storage.sides, holder.stats[leaf.name])


def list_page_buffers(cache: Cache) -> list[Mapping[str, PagedTensors]]:
    """Return the tensors of each attention layer; reallocating them replaces the mapping."""
    return [storage.sides for storage in cache.holder.state.storages.values()]


def commit_tokens(cache: Cache, backend: str, page_buffers: Sequence[object] | None = None) -> bool:
    """Commit the tokens of `plan_tokens`, whose rows and attention an external kernel computed.

    Return False, and roll back, if `page_buffers` are no longer those of this cache: another cache
    of the same pools has reallocated them.
    """
    holder = cache.holder
    with holder.lock:
        forward = holder.open_forward
        num_groups = len(holder.state.layout.layer_groups)
        if forward is None or len(forward.plans) < num_groups or forward.appended:
            raise CacheError("commit_tokens without plan_tokens: call plan_tokens first")
        buffers = list_page_buffers(cache)
        if page_buffers is not None and not all(map(operator.is_, page_buffers, buffers)):
            holder.rollback()
            return False
        for leaf in holder.state.layout.attention:
            stats = holder.stats[leaf.name]
            stats.appends += 1
            stats.attend_calls[backend] += 1
        holder.commit(forward)
        return True


def record_sealed_pages(cache: Cache, plans: Sequence[AppendPlan], backend: str) -> None:
    """Count the pages of `plans` that an external kernel has sealed from open pages."""
    for leaf in cache.state.layout.attention:
        if len((plan := plans[leaf.group]).seals):
            sides = cache.state.storages[leaf.index].sides
            stats = cache.holder.stats[leaf.name]
            count_sealed_pages(plan, make_empty_rows(plan, sides), sides, stats, backend)
