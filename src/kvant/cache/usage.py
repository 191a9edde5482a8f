"""What some caches over the same pools take together, and what of it goes with each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvant.cache.advance import Pools
from kvant.cache.cache import Cache
from kvant.page_table import Bools, LayerGroup


@dataclass(frozen=True)
class CacheUsage:
    """Bytes of pages, each counted once, and of states."""

    nbytes: int  # that any of them holds,
    freeable_nbytes: int  # of these, what nobody else holds
    unique_nbytes: tuple[int, ...]  # for each of them, what none of the others holds,
    proportional_nbytes: tuple[
        float, ...
    ]  # and what it holds, a page of n of them as an n-th of it
    has_outside_users: tuple[
        bool, ...
    ]  # and has somebody else any page that it does not share with these?
    slot_masks: dict[
        LayerGroup, tuple[Bools, Bools]
    ]  # open and sealed slots: does any of them hold it?
    pools: tuple[Pools, ...]  # that the slots are of

    @property
    def num_pages(self) -> dict[LayerGroup, tuple[int, int]]:
        """Open and sealed pages that any of them holds."""
        return {kind: (int(o.sum()), int(s.sum())) for kind, (o, s) in self.slot_masks.items()}

    def count_shared_pages(
        self, cache: Cache, sequence: int, length: int
    ) -> dict[LayerGroup, tuple[int, int]]:
        """How many whole pages of the first tokens of a sequence are among them, for as long as it
        goes on: not those of a window, which pass."""
        found: dict[LayerGroup, tuple[int, int]] = {}
        ledger = cache._tracker
        if any(a.open is not b.open for a, b in zip(ledger.pools, self.pools, strict=False)):
            return found
        for kind, extent in zip(
            cache._tracker.layer_groups, cache._tracker.state.page_tables, strict=True
        ):
            if kind.window is None and kind in self.slot_masks:
                seen = min(length, int(extent.seq_lens[sequence]))
                count = kind.paging.count_due_pages(seen) if kind.seals else seen // kind.page
                table = extent.sealed_table if kind.seals else extent.open_table
                both = self.slot_masks[kind]
                number = int(both[kind.seals][table[sequence, :count]].sum())
                found[kind] = (0, number) if kind.seals else (number, 0)
        return found


def measure_usage(caches: Sequence[Cache]) -> CacheUsage:
    """Of caches over the same pools: those that came of one by fork, extract or merge."""
    own = [_count_state_nbytes(cache) for cache in caches]
    nbytes = idle = sum(own)
    share = [float(nbytes) for nbytes in own]
    used = [False] * len(caches)
    if not caches:
        return CacheUsage(0, 0, (), (), (), {}, ())
    every: dict[LayerGroup, tuple[Bools, Bools]] = {}
    ledger = caches[0]._tracker
    with ledger.guard_counts():
        for kind, pools in enumerate(ledger.pools):
            leaves = [leaf for _, leaf in caches[0].contents.list_attention() if leaf.group == kind]
            storages = [leaf.storage for leaf in leaves if leaf.storage is not None]
            sizes = (
                sum(storage.open_nbytes for storage in storages),
                sum(storage.sealed_nbytes for storage in storages),
            )
            any_of = []
            for pool, size in zip((pools.open, pools.sealed), sizes, strict=True):
                pool.collect_orphans()
                slots_of = [np.unique(cache._tracker.list_slots(pool)) for cache in caches]
                counts = np.zeros(pool.size, np.int64)  # by how many of these
                for slots in slots_of:
                    counts[slots] += 1
                others = pool.ref_counts > counts
                any_of.append(counts > 0)
                nbytes += size * int(any_of[-1].sum())
                idle += size * int(((counts > 0) & ~others).sum())
                for number, slots in enumerate(slots_of):
                    own[number] += size * int((counts[slots] == 1).sum())
                    share[number] += size * float((1 / counts[slots]).sum())
                    used[number] |= bool(others[slots][counts[slots] == 1].any())
            every[ledger.layer_groups[kind]] = any_of[0], any_of[1]
    return CacheUsage(nbytes, idle, tuple(own), tuple(share), tuple(used), every, ledger.pools)


def _count_state_nbytes(cache: Cache) -> int:
    """Bytes that are never shared."""
    own = sum(leaf.nbytes for _, leaf in cache.contents.list_recurrent())
    return own + sum(state.nbytes for state in cache.external_states)
