"""Test evictions: the victims are those of the written rule, without a measurement for each."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

import kvant
from hf.zoo import build
from kvant.cache import Cache
from kvant.cache.reports import (
    CacheUsage,
    count_state_nbytes,
    get_slot_nbytes,
    measure_usage,
)
from kvant.hf import TransformersCache
from kvant.prefixes import Prefixes
from kvant.prefixes.eviction import EvictionRules
from kvant.prefixes.memory import Evicted, PrefixPools
from kvant.prefixes.tree import PrefixEntry
from kvant.stores import FolderStore, Tiers
from kvant.stores.contract import Bytes
from kvant.vision import ImageFeatures
from prefixes.test_prefixes import VOCABULARY, assert_no_leaks

# The family, the spec, and whether a store write is pending for some entries.
WORLDS = [
    ("llama", "affine8,prefill=stored", False),
    ("llama", "affine4,tail=100", True),
    ("llama", "raw,window=90,sinks=4", False),
    ("gemma3", "raw", False),
    ("falcon_h1", "raw", True),
    ("qwen3_next", "raw", False),
]


class BlockedStore(FolderStore):
    """A store whose writes wait for an event."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, min_free=0)
        self.unblocked = Event()

    def put(self, page: str, part: str, blob: Bytes) -> None:
        self.unblocked.wait()
        super().put(page, part, blob)


class World:
    """Random prefixes of one model that share pages, and requests that use some of them."""

    def __init__(self, family: str, spec: str, seed: int, store: Tiers | None = None) -> None:
        self.model = build(family)
        self.chance = random.Random(seed)
        self.prefixes = Prefixes(None, store=store)
        self.root = kvant.cache_for(self.model, spec)
        self.namespace = self.prefixes.open_namespace(self.model, self.root, 1e9)
        self.sequences: list[tuple[list[int], TransformersCache]] = [([], self.root)]
        self.images = [ImageFeatures(torch.zeros(1, n, 50)) for n in (1, 7, 9, 400)]

    @property
    def pools(self) -> PrefixPools:
        return self.namespace.pools

    def grow(self, count: int) -> None:
        """Insert prefixes, most of them continuations of others; keep some caches in use."""
        for _ in range(count):
            tokens, cache = self.chance.choice(self.sequences)
            new = [self.chance.randrange(3, VOCABULARY) for _ in range(self.chance.choice(SIZES))]
            cache = cache.fork()
            with torch.no_grad():
                self.model(torch.tensor([new]), past_key_values=cache, use_cache=True)
            tokens = tokens + new
            images = self.chance.sample(self.images, self.chance.choice([0, 0, 1, 2]))
            features = {bytes([i]): image for i, image in enumerate(images)}
            self.namespace.insert_prefix(tokens, cache, len(tokens), features)
            self.sequences.append((tokens, cache))
        for entry in self.pools:
            entry.num_uses = self.chance.choice([0, 0, 1, 5])
            entry.last_used = time.monotonic() - self.chance.uniform(1, 1000)
        del cache
        users = self.chance.sample(self.sequences[1:], count // 6)
        self.sequences = [self.sequences[0], *users]


SIZES = (1, 5, 40, 64, 70, 130, 200)


class Holdings:
    """All caches and images of some entries, measured from scratch as the sets of their slots."""

    def __init__(self, entries: Sequence[PrefixEntry]) -> None:
        self.entries = entries
        self.caches = [e.cache.states for e in entries]
        self.caches += [cache for entry in entries for cache in entry.pending_caches]

    def iterate_pools(self) -> Iterator[tuple[Any, int, list[Any]]]:
        """Yield each pool with the bytes of its slots and the slots of each cache."""
        state = self.caches[0].state
        for group, pools in enumerate(state.pools):
            for pool, size in zip(pools, get_slot_nbytes(state, group), strict=True):
                yield pool, size, [np.unique(c.holder.list_slots(pool)) for c in self.caches]

    @property
    def nbytes(self) -> int:
        images = {image for entry in self.entries for image in entry.features.values()}
        nbytes = sum(map(count_state_nbytes, self.caches)) + sum(i.nbytes for i in images)
        for _, size, slots in self.iterate_pools() if self.caches else ():
            nbytes += size * len(np.unique(np.concatenate(slots)))
        return nbytes

    def measure(self, evicted: Sequence[Cache]) -> tuple[list[float], list[bool], list[int]]:
        """Return the proportional bytes, the use, and the unique bytes of each cache.

        The unique bytes are without image features.
        """
        shares = [float(count_state_nbytes(cache)) for cache in self.caches]
        unique, used = [int(share) for share in shares], [False] * len(self.caches)
        for pool, size, slots in self.iterate_pools() if self.caches else ():
            counts = Counter(slot for own in slots for slot in own.tolist())
            references = pool.ref_counts.copy()
            for cache in evicted:  # they still exist, to predict the evictions
                np.subtract.at(references, cache.holder.list_slots(pool), 1)
            for i, own in enumerate(slots):
                shares[i] += size * float(sum(1 / counts[slot] for slot in own.tolist()))
                alone = [slot for slot in own.tolist() if counts[slot] == 1]
                unique[i] += size * len(alone)
                used[i] |= any(references[slot] > 1 for slot in alone)
        return shares, used, unique


def count_lost_tokens(entry: PrefixEntry, entries: Sequence[PrefixEntry]) -> int:
    """Return the tokens after the nearest entry of `entries` above in the tree."""
    node = entry.node.parent or entry.node
    while node.parent is not None and not any(other.node is node for other in entries):
        node = node.parent
    lengths = [other.length for other in entries if other.node is node and other is not entry]
    return max(entry.length - max(lengths, default=0), 1)


def predict_victims(
    entries: Sequence[PrefixEntry], nbytes: int, rules: EvictionRules
) -> tuple[list[PrefixEntry], int]:
    """Return the entries to evict and the bytes freed.

    After each eviction of an entry with shared pages, all entries are measured from scratch.
    """
    victims, remaining, now = list[PrefixEntry](), list(entries), time.monotonic()
    ranking, before = list[PrefixEntry](), Holdings(entries).nbytes
    left = before
    while before - left < nbytes:
        if not ranking:
            shares, used, unique = Holdings(remaining).measure(Holdings(victims).caches)
            keys = {
                entry: (
                    used[number],
                    count_lost_tokens(entry, remaining)
                    * (1 + entry.num_uses)
                    / (1 + now - entry.last_used)
                    / max(shares[number], 1.0),
                )
                for number, entry in enumerate(remaining)
                if entry is not rules.protected
                and (rules.include_used or not used[number])
                and (rules.include_unwritten or not entry.has_unwritten)
            }
            ranking = sorted(keys, key=keys.__getitem__)
            is_shared = {
                entry: share > own
                for entry, share, own in zip(remaining, shares, unique, strict=False)
            }
        if not ranking:
            break
        victims.append(victim := ranking.pop(0))
        remaining.remove(victim)
        left = Holdings(remaining).nbytes
        if is_shared[victim]:
            ranking = []
    return victims, before - left


@pytest.fixture(name="world", params=range(len(WORLDS)))
def fixture_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    family, spec, writes = WORLDS[request.param]
    store = BlockedStore(tmp_path)
    world = World(family, spec, request.param, Tiers([store]) if writes else None)
    yield world
    store.unblocked.set()
    world.sequences.clear()
    assert_no_leaks(world.prefixes)
    world.prefixes.close()


def test_victims_are_those_of_measurements_after_each_eviction(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)  # values depend on it
    for turn in range(4):
        world.grow(30)
        entries = list(world.pools)
        rules = EvictionRules(
            include_unwritten=turn != 1,
            include_used=turn != 2,
            protected=None if turn % 2 else world.chance.choice(entries),
        )
        nbytes = int(world.chance.choice([0.2, 0.5, 0.9]) * world.pools.measure().nbytes)
        victims, freed = predict_victims(entries, nbytes, rules)
        left = {entry.last_used for entry in entries if entry not in victims}  # unique
        expected = Evicted(len(victims), freed)
        del entries, victims  # they hold pages
        assert world.prefixes.memory.evict(nbytes, rules=rules) == expected
        del rules
        assert {entry.last_used for entry in world.pools} == left


def test_usage_is_that_of_sets_of_slots(world: World) -> None:
    """After inserts, evictions and released requests, with and without image features."""
    for _ in range(3):
        world.grow(20)
        world.prefixes.memory.evict(world.pools.measure().nbytes // 5)
        usage, pages = world.pools.measure(), world.pools.measure_pages()
        holdings = Holdings(list(world.pools))
        shares, used, unique = holdings.measure([])
        assert usage.nbytes == holdings.nbytes
        users = Counter(f for entry in holdings.entries for f in entry.features.values())
        for number, entry in enumerate(holdings.entries):
            unique[number] += sum(f.nbytes for f in entry.features.values() if users[f] == 1)
        assert list(usage.unique_nbytes) == unique
        assert list(usage.has_outside_users) == used
        assert usage.proportional_nbytes == pytest.approx(shares)
        assert pages.num_pages == usage.num_pages
        assert pages.num_caches == len(holdings.caches) == len(unique)
        slots = [np.unique(np.concatenate(slots)) for *_, slots in holdings.iterate_pools()]
        counts = [count for pair in usage.num_pages.values() for count in pair]
        assert counts == list(map(len, slots))
        del holdings


def test_eviction_of_many_entries_measures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: after each victim with shared pages, all entries were measured again."""
    world, calls = World("llama", "affine8,prefill=stored", seed=0), list[int]()
    world.grow(60)
    world.sequences.clear()

    def count(caches: Sequence[Cache]) -> CacheUsage:
        calls.append(len(caches))
        return measure_usage(caches)

    for module in ("kvant.prefixes.memory", "kvant.prefixes.eviction"):
        monkeypatch.setattr(f"{module}.measure_usage", count)
    nbytes = world.prefixes.nbytes // 2
    calls.clear()
    assert world.prefixes.memory.evict(nbytes).num_entries > 10
    assert len(calls) == 1
