"""Sizes of pools: bounds on slots, the reserve of a fixed capacity, and shrinking.

Forks share pools with other caches. Bounds are then higher, and pools are never shrunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from kvant.cache.advance import Pools, relocate_table
from kvant.cache.state import CacheState
from kvant.page_table import NO_SLOTS, Ints, LayerGroup, PageTable

T = TypeVar("T")


def bound_pages(layer_group: LayerGroup, length: int) -> tuple[int, int]:
    """Return the maximum of open and of sealed pages while a sequence grows to `length`.

    Pages that one token releases are freed at the next, so they count for one more token. Not all
    lengths are tried. Page counts grow until a window is full, and then repeat with a period of one
    page. They drop only where `dense_until` delays the first seals, so the last lengths before that
    are tried as well.
    """
    dense_length = min(length, layer_group.paging.dense_until + layer_group.slack)
    lengths = np.unique(
        np.concatenate(
            [
                _list_last_lengths(length, layer_group.page),
                _list_last_lengths(dense_length, layer_group.page),
            ]
        )
    )
    first = layer_group.find_first_open(lengths - 1)
    stop = -(-lengths // layer_group.page)
    num_open = stop - first + np.minimum(layer_group.num_sink_pages, first)
    num_sealed = layer_group.paging.count_due_pages_each(lengths) - layer_group.find_first_sealed(
        lengths - 1
    )
    return int(num_open.max(initial=0)), max(0, int(num_sealed.max(initial=0)))


def bound_slots(layer_group: LayerGroup, lengths: Iterable[int]) -> tuple[int, int]:
    """Return the maximum of open and of sealed slots of sequences that grow to `lengths`."""
    pages = [bound_pages(layer_group, layer_group.capacity or length) for length in lengths]
    step = Pools.make(layer_group).open.step
    max_open, max_sealed = (-(-sum(counts) // step) * step for counts in zip(*pages, strict=True))
    return max_open, max_sealed


def bound_slots_when_shared(page_table: PageTable, num_new_tokens: int) -> tuple[int, int]:
    """Return the maximum of slots of a cache with shared pools after `num_new_tokens` more tokens.

    The tokens may come as one chunk or singly. Other holders may keep all present pages, and a
    partly filled page is copied. A cache alone in its pools needs less, see `bound_slots`: it frees
    pages that a chunk needs only for a time.
    """
    group, new_lengths = page_table.layer_group, np.maximum(page_table.lengths + num_new_tokens, 0)
    new_pages = -(-new_lengths // group.page) - page_table.stop_open
    max_open = np.array([bound_pages(group, length)[0] for length in new_lengths.tolist()])
    added_open = np.minimum(new_pages, max_open) + (new_lengths > page_table.seq_lens)
    added_sealed = np.maximum(
        group.paging.count_due_pages_each(new_lengths) - page_table.stop_sealed, 0
    )
    present = (
        len(np.unique(page_table.list_open_slots())),
        len(np.unique(page_table.list_sealed_slots())),
    )
    rounding = Pools.make(group).open.step - 1
    num_open = present[0] + int(added_open.sum())
    num_sealed = present[1] + int(added_sealed.sum())
    return num_open + rounding, num_sealed + rounding


def _list_last_lengths(length: int, page: int) -> Ints:
    return np.arange(max(1, length - 2 * page), length + 1)


def bound_slots_after(
    page_table: PageTable, num_new_tokens: int, *, is_shared: bool
) -> tuple[int, int]:
    """Return the most slots after `num_new_tokens` more tokens, in shared pools or in own ones."""
    lengths = (page_table.lengths + num_new_tokens).clip(0).tolist()
    if not is_shared:
        return bound_slots(page_table.layer_group, lengths)
    max_open, max_sealed = bound_slots_when_shared(page_table, num_new_tokens)
    if page_table.layer_group.pruning is not None:  # a prune copies rows before it frees any
        pruned = bound_slots(page_table.layer_group, lengths)
        max_open, max_sealed = max_open + pruned[0], max_sealed + pruned[1]
    return max_open, max_sealed


def reserve_capacity(layer_group: LayerGroup, num_tables: int, pools: Pools) -> None:
    """Grow `pools` to the capacity of the group, if it has one."""
    if layer_group.capacity is not None:
        max_open, max_sealed = bound_pages(layer_group, layer_group.capacity)
        pools.open.grow(num_tables * max_open)
        pools.sealed.grow(num_tables * max_sealed)


def shrink_pools(
    state: CacheState, group: int, leaf_groups: Sequence[int | None], *, after_prune: bool
) -> CacheState | None:
    """Return the state with the pages of a group in smaller tensors; None: nothing to free.

    Pools with other holders are not shrunk. Readers of the old tensors are unaffected.
    """
    pools, old_table = state.pools[group], state.page_tables[group]
    layer_group = old_table.layer_group
    max_slots = bound_slots(layer_group, old_table.seq_lens.tolist())
    if after_prune and layer_group.capacity is None:
        num_open = len(np.unique(old_table.list_open_slots()))
        num_sealed = len(np.unique(old_table.list_sealed_slots()))
        step = pools.open.step
        max_slots = -(-num_open // step) * step, -(-num_sealed // step) * step
    is_large = pools.open.size > max_slots[0], pools.sealed.size > max_slots[1]
    if pools.is_shared or not any(is_large):
        return None
    new_pools = Pools.make(layer_group)
    reserve_capacity(layer_group, old_table.num_tables, new_pools)
    new_table = relocate_table(
        old_table,
        new_pools.open if is_large[0] else None,
        new_pools.sealed if is_large[1] else None,
    )
    new_pools = Pools(*_select_each(is_large, new_pools, pools))
    num_slots = new_pools.open.size, new_pools.sealed.size
    moved = {
        leaf: state.storages[leaf].relocate_pages(old_table, new_table, num_slots)
        for leaf, leaf_group in enumerate(leaf_groups)
        if leaf_group == group
    }
    retired = [entry for entry in state.retired_slots if entry[0] != group]
    retired += [  # slots of a pool that is not replaced
        (group, _select_each(is_large, NO_SLOTS, slots))
        for slots_group, slots in state.retired_slots
        if slots_group == group
    ]
    return replace(
        state,
        page_tables=_replace_item(state.page_tables, group, new_table),
        pools=_replace_item(state.pools, group, new_pools),
        storages=state.storages | moved,
        retired_slots=tuple(retired),
    )


def _select_each(
    mask: tuple[bool, bool], if_true: tuple[T, T], if_false: tuple[T, T]
) -> tuple[T, T]:
    """Select `if_true` or `if_false`, for open and for sealed pages."""
    return if_true[0] if mask[0] else if_false[0], if_true[1] if mask[1] else if_false[1]


def _replace_item(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])
