"""Reports about caches: the backend that reads each layer, and the bytes of pages.

For several caches over the same pools, bytes are reported in total, per cache, and as freeable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from kvant.attention import explain
from kvant.cache.cache import Cache
from kvant.cache.state import CacheState
from kvant.page_table import Bools, Ints, LayerGroup
from kvant.pages.pool import Pools, Slots
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, Recipe, RecurrentSpec, SharedSpec
from kvant.spec import describe_spec


def explain_cache(cache: Cache) -> str:
    """Describe the format and the attention backend of each layer; merge equal lines."""
    texts = [_describe(recipe, cache.layers.get(i)) for i, recipe in enumerate(cache.spec.layers)]
    return "\n".join(f"{layers}: {text}" for layers, text in merge_equal_layers(texts))


def merge_equal_layers(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each run of layers with equal texts."""
    first = 0
    for text, run in groupby(texts):
        stop = first + len(list(run))
        yield f"layer {first}" if stop == first + 1 else f"layers {first}-{stop - 1}", text
        first = stop


def _describe(recipe: Recipe, layer: Any) -> str:
    if isinstance(recipe, GroupSpec):
        return " and ".join(
            f"{name}: {_describe(part, layer[name])}" for name, part in recipe.parts
        )
    if isinstance(recipe, RecurrentSpec):
        return "a recurrent state, read by the model"
    if isinstance(recipe, SharedSpec):
        return f"reads the rows of layer {recipe.layer}"
    if not isinstance(recipe, LayerSpec):
        return "no cache"
    layer_format = describe_spec(CacheSpec((recipe,)))
    if layer.storage is None or not layer.length:
        return f"{layer_format}; empty, so its backend is not known yet"
    explanation = explain(layer.view())
    refusals = "".join(f"; {name}: {reason}" for name, reason in explanation.refusals)
    return f"{layer_format}; {explanation.backend} reads it{refusals}"


@dataclass(frozen=True)
class PageUsage:
    """The pages that caches over the same pools hold."""

    num_caches: int
    slot_masks: dict[LayerGroup, tuple[Bools, Bools]]  # the open and sealed slots in use
    pools: tuple[Pools, ...]  # that the slots are of

    @property
    def num_pages(self) -> dict[LayerGroup, tuple[int, int]]:
        """Open and sealed pages in use, by layer group."""
        return {group: (int(o.sum()), int(s.sum())) for group, (o, s) in self.slot_masks.items()}

    def may_share_pages(self, cache: Cache) -> bool:
        """Whether `cache` uses the pools of these pages, or there are none."""
        pairs = zip(cache.state.pools, self.pools, strict=False)
        return all(own.open is pools.open for own, pools in pairs)

    def count_shared_pages(
        self, cache: Cache, sequence: int, length: int
    ) -> dict[LayerGroup, tuple[int, int]]:
        """Return how many full pages of the first `length` tokens of a sequence are in use here.

        Only layers without a window count: pages of a window are released later.
        """
        shared: dict[LayerGroup, tuple[int, int]] = {}
        if not self.may_share_pages(cache):
            return shared
        state = cache.state
        for page_table in state.page_tables:
            group = page_table.layer_group
            if group.window is None and group in self.slot_masks:
                num_tokens = min(length, int(page_table.seq_lens[sequence]))
                if group.seals:
                    count, table = group.paging.count_due_pages(num_tokens), page_table.sealed_table
                else:
                    count, table = num_tokens // group.page, page_table.open_table
                masks = self.slot_masks[group]
                num_shared = int(masks[group.seals][table[sequence, :count]].sum())
                shared[group] = (0, num_shared) if group.seals else (num_shared, 0)
        return shared


class SlotUsers(NamedTuple):
    """Which of several caches hold each slot of a pool."""

    slots: Ints  # of the first cache, then of the second, and so on
    users: Ints  # the index of the cache that holds each of `slots`
    num_users: Ints  # by slot of the pool
    has_others: Bools  # by slot of the pool: whether it is also held outside these caches
    nbytes: int  # of a slot


@dataclass(frozen=True)
class CacheUsage(PageUsage):
    """Bytes of pages, each counted once, and of recurrent states."""

    nbytes: int  # in total
    freeable_nbytes: int  # pages without other holders
    unique_nbytes: tuple[int, ...]  # per cache: pages that none of the others holds
    proportional_nbytes: tuple[float, ...]  # per cache: a page of n caches counts as 1/n of it
    # Per cache: a page that none of the others holds has a user outside these caches.
    has_outside_users: tuple[bool, ...]
    slot_users: tuple[SlotUsers, ...]  # of each pool


def measure_pages(caches: Sequence[Cache]) -> PageUsage:
    """Return the pages that caches over the same pools hold, without their bytes and users."""
    slot_masks: dict[LayerGroup, tuple[Bools, Bools]] = {}
    if not caches:
        return PageUsage(0, slot_masks, ())
    state = caches[0].state
    with state.pools.lock:
        for group, pools in enumerate(state.pools):
            open_mask, sealed_mask = (np.zeros(pool.size, bool) for pool in pools)
            open_slots, sealed_slots = zip(*_list_slots(caches, group), strict=True)
            open_mask[np.concatenate(open_slots)] = True
            sealed_mask[np.concatenate(sealed_slots)] = True
            slot_masks[state.layout.layer_groups[group]] = open_mask, sealed_mask
    return PageUsage(len(caches), slot_masks, tuple(state.pools))


def measure_usage(caches: Sequence[Cache]) -> CacheUsage:
    """Measure caches over the same pools, as forks, extracts and merges of one cache are."""
    if not caches:
        return CacheUsage(0, {}, (), 0, 0, (), (), (), ())
    unique = np.array([count_state_nbytes(cache) for cache in caches])
    nbytes = freeable = int(unique.sum())
    proportional, has_outside_users = unique.astype(float), np.zeros(len(caches), bool)
    state, slot_users = caches[0].state, _list_slot_users(caches)
    for slots, users, num_users, has_others, size in slot_users:
        is_unique = num_users[slots] == 1
        nbytes += size * int((num_users > 0).sum())
        freeable += size * int(((num_users > 0) & ~has_others).sum())
        unique += size * np.bincount(users[is_unique], minlength=len(caches))
        proportional += size * np.bincount(users, 1 / num_users[slots], len(caches))
        has_outside_users[users[is_unique & has_others[slots]]] = True
    masks = [users.num_users > 0 for users in slot_users]
    return CacheUsage(
        num_caches=len(caches),
        slot_masks={
            group: (masks[2 * i], masks[2 * i + 1])
            for i, group in enumerate(state.layout.layer_groups)
        },
        pools=tuple(state.pools),
        nbytes=nbytes,
        freeable_nbytes=freeable,
        unique_nbytes=tuple(unique.tolist()),
        proportional_nbytes=tuple(proportional.tolist()),
        has_outside_users=tuple(has_outside_users.tolist()),
        slot_users=slot_users,
    )


def _list_slot_users(caches: Sequence[Cache]) -> tuple[SlotUsers, ...]:
    """Return the users of the slots of each pool: for each group of the open, then the sealed."""
    slot_users, state = list[SlotUsers](), caches[0].state
    with state.pools.guard_counts():
        for group, pools in enumerate(state.pools):
            slots_by_pool = zip(*_list_slots(caches, group), strict=True)
            sizes = get_slot_nbytes(state, group)
            for pool, size, slots_by_cache in zip(pools, sizes, slots_by_pool, strict=True):
                pool.collect_orphans()
                slots = np.concatenate(slots_by_cache)
                users = np.repeat(np.arange(len(caches)), list(map(len, slots_by_cache)))
                num_users = np.bincount(slots, minlength=pool.size)
                has_others = pool.ref_counts > num_users
                slot_users.append(SlotUsers(slots, users, num_users, has_others, size))
    return tuple(slot_users)


def _list_slots(caches: Sequence[Cache], group: int) -> list[Slots]:
    """Return the open and the sealed slots of a layer group that each cache holds, each once."""
    slots = list[Slots]()
    for cache in caches:
        state, forward = cache.holder.read()
        if forward is None or not forward.plans:
            slots.append(state.distinct_slots[group])
        else:  # with those that the forward has allocated
            open_slots, sealed_slots = map(cache.holder.list_slots, state.pools[group])
            slots.append((np.unique(open_slots), np.unique(sealed_slots)))
    return slots


def measure_pools(cache: Cache) -> dict[str, int]:
    """Return the bytes of pages in the pools of a cache: held, the shared part of it, and free."""
    held = shared = free = 0
    state = cache.state
    with state.pools.guard_counts():  # other threads may take slots
        for group, pools in enumerate(state.pools):
            for pool, size in zip(pools, get_slot_nbytes(state, group), strict=True):
                pool.collect_orphans()
                held += size * (pool.size - pool.num_free)
                shared += size * int((pool.ref_counts > 1).sum())
                free += size * pool.num_free
    return {"nbytes_held": held, "nbytes_shared": shared, "nbytes_free": free}


def get_slot_nbytes(state: CacheState, group: int) -> tuple[int, int]:
    """Return the bytes of an open and of a sealed slot, over all layers of a group."""
    storages = [
        state.storages[leaf.index]
        for leaf in state.layout.attention
        if leaf.group == group and leaf.index in state.storages
    ]
    return (
        sum(storage.open_nbytes for storage in storages),
        sum(storage.sealed_nbytes for storage in storages),
    )


def count_state_nbytes(cache: Cache) -> int:
    """Return the bytes of recurrent states, which caches do not share."""
    nbytes = sum(history.nbytes for history in cache.state.histories)
    return nbytes + sum(state.nbytes for state in cache.holder.external_states.values())
