"""What some caches over the same pools take together, and what of it goes with each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvant.cache.cache import Cache
from kvant.cache.changes import Pools
from kvant.extent import Bools, Kind


@dataclass(frozen=True)
class Account:
    """Bytes of pages, each counted once, and of states."""

    nbytes: int  # that any of them holds,
    idle: int  # of these, what nobody else holds
    own: tuple[int, ...]  # for each of them, what none of the others holds,
    share: tuple[float, ...]  # and what it holds, a page of n of them as an n-th of it
    used: tuple[bool, ...]  # and has somebody else any page that it does not share with these?
    held: dict[Kind, tuple[Bools, Bools]]  # open and sealed slots: does any of them hold it?
    pools: tuple[Pools, ...]  # that the slots are of

    @property
    def pages(self) -> dict[Kind, tuple[int, int]]:
        """Open and sealed pages that any of them holds."""
        return {kind: (int(o.sum()), int(s.sum())) for kind, (o, s) in self.held.items()}

    def shared(self, cache: Cache, sequence: int, length: int) -> dict[Kind, tuple[int, int]]:
        """How many whole pages of the first tokens of a sequence are among them, for as long as it
        goes on: not those of a window, which pass."""
        found: dict[Kind, tuple[int, int]] = {}
        ledger = cache._ledger
        if any(a.open is not b.open for a, b in zip(ledger.pools, self.pools, strict=False)):
            return found
        for kind, extent in zip(cache._ledger.kinds, cache._ledger.book.extents, strict=True):
            if kind.window is None and kind in self.held:
                seen = min(length, int(extent.rows[sequence]))
                count = kind.paging.due(seen) if kind.seals else seen // kind.page
                table = extent.sealed if kind.seals else extent.open
                both = self.held[kind]
                number = int(both[kind.seals][table[sequence, :count]].sum())
                found[kind] = (0, number) if kind.seals else (number, 0)
        return found


def account(caches: Sequence[Cache]) -> Account:
    """Of caches over the same pools: those that came of one by fork, extract or merge."""
    own = [_states(cache) for cache in caches]
    nbytes = idle = sum(own)
    share = [float(nbytes) for nbytes in own]
    used = [False] * len(caches)
    if not caches:
        return Account(0, 0, (), (), (), {}, ())
    every: dict[Kind, tuple[Bools, Bools]] = {}
    ledger = caches[0]._ledger
    with ledger.counting():
        for kind, pools in enumerate(ledger.pools):
            leaves = [leaf for _, leaf in caches[0].contents.attention() if leaf.kind == kind]
            storages = [leaf.storage for leaf in leaves if leaf.storage is not None]
            sizes = (
                sum(storage.open_nbytes for storage in storages),
                sum(storage.sealed_nbytes for storage in storages),
            )
            any_of = []
            for pool, size in zip((pools.open, pools.sealed), sizes, strict=True):
                pool.collect()
                slots_of = [np.unique(cache._ledger.slots(pool)) for cache in caches]
                counts = np.zeros(pool.size, np.int64)  # by how many of these
                for slots in slots_of:
                    counts[slots] += 1
                others = pool.counts > counts
                any_of.append(counts > 0)
                nbytes += size * int(any_of[-1].sum())
                idle += size * int(((counts > 0) & ~others).sum())
                for number, slots in enumerate(slots_of):
                    own[number] += size * int((counts[slots] == 1).sum())
                    share[number] += size * float((1 / counts[slots]).sum())
                    used[number] |= bool(others[slots][counts[slots] == 1].any())
            every[ledger.kinds[kind]] = any_of[0], any_of[1]
    return Account(nbytes, idle, tuple(own), tuple(share), tuple(used), every, ledger.pools)


def _states(cache: Cache) -> int:
    """Bytes that are never shared."""
    own = sum(leaf.nbytes for _, leaf in cache.contents.recurrent())
    return own + sum(state.nbytes for state in cache.host_states)
