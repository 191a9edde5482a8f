"""Hold the cached prefixes of all models in memory; evict some to stay within a byte limit.

PrefixMemory              the limit, the lock, counts
  PrefixPools             one model and spec: pools of pages, prefill times
    PrefixTree            one salt: entries, found by their tokens
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from threading import RLock
from typing import Any, NamedTuple

from kvant.cache.reports import CacheUsage, PageUsage, measure_pages, measure_usage
from kvant.hf import TransformersCache
from kvant.prefixes.eviction import EVICT_ANY, EvictionOrder, EvictionRules
from kvant.prefixes.keys import PAGE_TOKENS, NamespaceKeys
from kvant.prefixes.prefix_store import CachedPrefix, PrefixStore
from kvant.prefixes.restore import TIME_SMOOTHING
from kvant.prefixes.tree import PrefixEntry, PrefixMatch, PrefixTree, list_caches
from kvant.vision import ImageFeatures

LOW_WATERMARK = 0.9  # an eviction shrinks to this fraction of the limit
LOCK_TIMEOUT_S = 1.0  # seconds that an insert waits for the lock


class Evicted(NamedTuple):
    """The result of an eviction."""

    num_entries: int
    nbytes: int


class PrefixPools:
    """Cached prefixes of one model and spec over shared pools: a tree per salt."""

    def __init__(self, lock: RLock) -> None:
        """`lock` is that of the memory; its holder may change the trees."""
        # An empty cache that uses the pools; None while they have no prefix.
        self.cache: TransformersCache | None = None
        self.trees: dict[bytes, PrefixTree] = {}
        self._lock = lock
        self._seconds_per_token = math.inf  # of a prefill

    def __iter__(self) -> Iterator[PrefixEntry]:
        for tree in self.trees.values():
            yield from tree

    @property
    def has_unwritten(self) -> bool:
        """Whether some entries have pending store writes."""
        with self._lock:
            return any(entry.has_unwritten for entry in self)

    def measure(self) -> CacheUsage:
        """Measure all entries and their image features.

        Values per cache list the entries first, then the caches of replaced entries whose store
        write is pending.
        """
        with self._lock:
            entries = list(self)
            usage = measure_usage(list_caches(entries)[0])
            num_users = self._count_feature_users()
        own_nbytes = [
            sum(f.nbytes for f in entry.features.values() if num_users[f] == 1) for entry in entries
        ]
        pairs = zip_longest(usage.unique_nbytes, own_nbytes, fillvalue=0)
        return replace(
            usage,
            nbytes=usage.nbytes + sum(features.nbytes for features in num_users),
            unique_nbytes=tuple(map(sum, pairs)),
        )

    def measure_pages(self) -> PageUsage:
        """Return the pages of all entries, and of replaced entries whose store write is pending."""
        with self._lock:
            return measure_pages(list_caches(list(self))[0])

    def count_image_tokens(self) -> int:
        """Return the tokens of all images whose features are kept, each counted once."""
        with self._lock:
            return sum(features.num_tokens for features in self._count_feature_users())

    def _count_feature_users(self) -> Counter[ImageFeatures]:
        """Count the entries that keep the features of each image."""
        return Counter(features for entry in self for features in entry.features.values())

    def record_prefill_time(self, count: int, seconds: float) -> None:
        """Record that `count` prompt tokens were prefilled in `seconds`."""
        if count < PAGE_TOKENS:  # short chunks say little about long ones
            return
        new = seconds / count
        with self._lock:
            mean = new if self._seconds_per_token == math.inf else self._seconds_per_token
            self._seconds_per_token = TIME_SMOOTHING * new + (1 - TIME_SMOOTHING) * mean

    def estimate_prefill_seconds(self, count: int) -> float:
        """Return the expected seconds of a prefill; infinity before the first measurement."""
        return self._seconds_per_token * count

    def match_prefix(self, tree_key: bytes, tokens: Sequence[int]) -> PrefixMatch:
        """Match all but the last of `tokens`."""
        with self._lock:
            tree = self.trees.get(tree_key)
            return PrefixMatch() if tree is None else tree.match_prefix(tokens)

    def drop_empty_trees(self) -> None:
        """Drop trees without entries; if none is left, also drop the cache over the pools."""
        self.trees = {key: tree for key, tree in self.trees.items() if any(True for _ in tree)}
        if not self.trees:
            self.cache = None


class PrefixMemory:
    """Prefixes of all models within a limit of bytes, also written to a store; thread-safe."""

    def __init__(
        self,
        max_bytes: int | None,
        prefix_store: PrefixStore | None = None,
        alignment: int | None = None,
    ) -> None:
        """With an `alignment`, reused lengths are multiples of it and hold no decoded tokens."""
        self.max_bytes = max_bytes
        self.prefix_store = prefix_store
        self.alignment = alignment
        self.counts: Counter[str] = Counter()
        self._lock = RLock()
        self._is_changing = False  # the thread that holds the lock is changing the trees
        self._pools: dict[bytes, PrefixPools] = {}
        self._nbytes_bound = 0  # upper bound on `nbytes`: counts shared pages several times

    def __iter__(self) -> Iterator[PrefixPools]:
        return iter(list(self._pools.values()))

    def get_pools(self, pools_key: bytes) -> PrefixPools:
        """Return the pools of a model and spec; at first they are empty."""
        return self._pools.setdefault(pools_key, PrefixPools(self._lock))

    @property
    def nbytes(self) -> int:
        """Bytes of all prefixes, including pages that running requests use too."""
        with self._lock:
            return sum(pools.measure().nbytes for pools in self)

    def record_lookup(self, num_prompt_tokens: int, num_cached: int) -> None:
        """Count prompt tokens, and those found in the cache."""
        with self._lock:
            self.counts["hits" if num_cached else "misses"] += 1
            self.counts["tokens_asked"] += num_prompt_tokens
            self.counts["tokens_hit"] += num_cached

    def stats(self) -> dict[str, Any]:
        """Return counts of prefixes, bytes, hits and misses."""
        with self._lock:
            usages = [pools.measure() for pools in self]
            num_tokens, num_hit = self.counts["tokens_asked"], self.counts["tokens_hit"]
            return {
                "prefixes": sum(len(list(pools)) for pools in self),
                "nbytes": sum(usage.nbytes for usage in usages),
                "nbytes_idle": sum(usage.freeable_nbytes for usage in usages),
                "max_bytes": self.max_bytes,
                **{name: self.counts[name] for name in ("hits", "misses", "evicted")},
                "tokens_asked": num_tokens,
                "tokens_hit": num_hit,
                "hit_rate": num_hit / num_tokens if num_tokens else 0.0,
            }

    def insert(self, keys: NamespaceKeys, prefix: CachedPrefix) -> None:
        """Insert a prefix, unless it does not fit or the lock is not free in time.

        Garbage collection may call this within any code: it closes a generator of tokens, which
        then inserts its sequence. If the thread is changing the trees, `_is_changing` skips the
        insert. If the thread holds the lock of the page pools, and the holder of `_lock` waits for
        the page pools, both would wait forever: the timeout ends that.
        """
        if self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            try:
                if not self._is_changing:
                    with self._lock_for_change():
                        self._insert(keys, prefix)
            finally:
                self._lock.release()

    def reject(self, keys: NamespaceKeys, tokens: Sequence[int]) -> None:
        """Drop entries that may share pages with a restored prefix, and ignore it in stores."""
        if self.prefix_store is not None:
            self.prefix_store.reject(keys.tree_key, tokens)
        with self._lock_for_change():
            pools = self.get_pools(keys.pools_key)
            if (tree := pools.trees.get(keys.tree_key)) is not None:
                for entry in tree.list_entries_sharing(tokens):
                    entry.remove()
            pools.drop_empty_trees()

    def evict(
        self,
        nbytes: int,
        pools: PrefixPools | None = None,
        rules: EvictionRules = EVICT_ANY,
    ) -> Evicted:
        """Evict prefixes until `nbytes` are freed or none is left; with `pools`, only theirs."""
        with self._lock_for_change():
            order = self._make_order(list(self) if pools is None else [pools], rules)
            return self._evict(order, order.nbytes - nbytes)

    def clear(self) -> None:
        """Free all prefixes; stores stay as they are."""
        with self._lock_for_change():
            for pools in self:
                for entry in list(pools):
                    entry.remove()  # unlinks nodes, which are in reference cycles
                pools.drop_empty_trees()
            self._nbytes_bound = 0

    @contextmanager
    def _lock_for_change(self) -> Iterator[None]:
        with self._lock:
            was_changing, self._is_changing = self._is_changing, True
            try:
                yield
            finally:
                self._is_changing = was_changing

    def _insert(self, keys: NamespaceKeys, prefix: CachedPrefix) -> None:
        pools = self.get_pools(keys.pools_key)
        pool_cache = pools.cache
        if pool_cache is None:
            pool_cache = prefix.cache.fork()
            pool_cache.reset()
        # A merge shares the pages, and drops earlier states of recurrent layers (checkpoints).
        prefix = replace(prefix, cache=pool_cache.merge_with([prefix.cache]))
        prefix.cache.context.attention_stats.clear()  # of the request, not of the prefix
        nbytes = measure_usage([prefix.cache.states]).nbytes
        nbytes += sum(features.nbytes for features in prefix.features.values())
        if self.max_bytes is not None and nbytes > self.max_bytes:
            return
        pools.cache = pool_cache
        tree = pools.trees.setdefault(keys.tree_key, PrefixTree(keys.tree_key, self.alignment))
        entry = tree.insert(prefix)
        if entry is not None and self.prefix_store is not None:
            max_length = self.alignment and prefix.num_prefilled // self.alignment * self.alignment
            write = self.prefix_store.write(keys.tree_key, prefix, keys.metadata, max_length)
            entry.writes += [write] if write.page_set is not None else []
        self._nbytes_bound += nbytes
        if self.max_bytes is not None and self._nbytes_bound > self.max_bytes:
            self._nbytes_bound = self.nbytes
            if self._nbytes_bound > self.max_bytes:
                target = int(LOW_WATERMARK * self.max_bytes)
                order = self._make_order(list(self), EvictionRules(protected=entry))
                self._evict(order, target)
                self._nbytes_bound = order.nbytes

    def _make_order(self, all_pools: Sequence[PrefixPools], rules: EvictionRules) -> EvictionOrder:
        return EvictionOrder([list(pools.trees.values()) for pools in all_pools], rules)

    def _evict(self, order: EvictionOrder, nbytes: int) -> Evicted:
        """Evict entries in their order until `nbytes` remain."""
        before, count = order.nbytes, 0
        while order.nbytes > nbytes and order.evict():
            self.counts["evicted"] += 1
            count += 1
        for pools in self:
            pools.drop_empty_trees()
        return Evicted(count, before - order.nbytes)
