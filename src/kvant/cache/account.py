"""What some caches over the same pools take together, and what of it goes with each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvant.cache.cache import Cache


@dataclass(frozen=True)
class Account:
    """Bytes of pages, each counted once, and of states."""

    nbytes: int  # that any of them holds,
    idle: int  # of these, what nobody else holds
    own: tuple[int, ...]  # for each of them, what none of the others holds
    used: tuple[bool, ...]  # and has somebody else any of its pages, too?


def account(caches: Sequence[Cache]) -> Account:
    """Of caches over the same pools: those that came of one by fork, extract or merge."""
    own = [_states(cache) for cache in caches]
    nbytes = idle = sum(own)
    used = [False] * len(caches)
    if not caches:
        return Account(0, 0, (), ())
    ledger = caches[0]._ledger
    with ledger.counting():
        for kind, pools in enumerate(ledger.pools):
            leaves = [leaf for _, leaf in caches[0].contents.attention() if leaf.kind == kind]
            storages = [leaf.storage for leaf in leaves if leaf.storage is not None]
            sizes = (
                sum(storage.open_nbytes for storage in storages),
                sum(storage.sealed_nbytes for storage in storages),
            )
            for pool, size in zip((pools.open, pools.sealed), sizes, strict=True):
                pool.collect()
                held = [np.unique(cache._ledger.slots(pool)) for cache in caches]
                counts = np.zeros(pool.size, np.int64)  # by how many of these
                for slots in held:
                    counts[slots] += 1
                others = pool.counts > counts
                nbytes += size * int((counts > 0).sum())
                idle += size * int(((counts > 0) & ~others).sum())
                for number, slots in enumerate(held):
                    own[number] += size * int((counts[slots] == 1).sum())
                    used[number] |= bool(others[slots].any())
    return Account(nbytes, idle, tuple(own), tuple(used))


def _states(cache: Cache) -> int:
    """Bytes that are never shared."""
    own = sum(leaf.nbytes for _, leaf in cache.contents.recurrent())
    return own + sum(state.nbytes for state in cache.host_states)
