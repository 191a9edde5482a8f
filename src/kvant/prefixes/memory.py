"""Hold the cached prefixes of all models in memory, and evict them within one limit of bytes.

PrefixMemory              the limit, the lock, counts
  PrefixPools             one model and spec: pools of pages, prefill times
    PrefixTree            one salt: entries, found by their tokens
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any, NamedTuple

from kvant.cache.usage import CacheUsage, measure_usage
from kvant.hf import TransformersCache
from kvant.prefixes.checkpoints import pages_suffice
from kvant.prefixes.keys import PAGE_TOKENS, NamespaceKeys
from kvant.prefixes.prefix_store import PrefixStore
from kvant.prefixes.restore import TIME_SMOOTHING
from kvant.prefixes.tree import PrefixEntry, PrefixMatch, PrefixTree

LOW_WATERMARK = 0.9  # an eviction shrinks to this fraction of the limit
LOCK_TIMEOUT_S = 1.0  # seconds that an insert waits for the lock


class EvictionCandidate(NamedTuple):
    """An entry that may be evicted."""

    tree: PrefixTree
    entry: PrefixEntry
    is_used: bool  # a request uses its pages
    value: float  # per byte, see `_compute_value`
    unique_nbytes: int  # of pages that no other entry holds
    proportional_nbytes: float  # a page of n entries counts as 1/n of it

    @property
    def shares_pages(self) -> bool:
        """Whether its eviction changes the bytes that other entries hold alone."""
        return self.proportional_nbytes > self.unique_nbytes


class EvictionRules(NamedTuple):
    """Which entries may be evicted."""

    include_unwritten: bool = True  # also entries with pending store writes
    include_used: bool = True  # also entries whose pages a request uses
    protected: PrefixEntry | None = None

    def allow(self, candidate: EvictionCandidate) -> bool:
        return (
            candidate.entry is not self.protected
            and (self.include_used or not candidate.is_used)
            and (self.include_unwritten or not candidate.entry.has_unwritten)
        )


EVICT_ANY = EvictionRules()


class Evicted(NamedTuple):
    """The result of an eviction."""

    num_entries: int
    nbytes: int


class PrefixPools:
    """Cached prefixes of one model and spec over shared pools: a tree per salt."""

    def __init__(self, lock: RLock) -> None:
        """`lock` is that of the memory; its holder may change the trees."""
        self.cache: TransformersCache | None = None  # empty, over the pools; None: no prefix yet
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
        """Measure all entries, then the caches of replaced entries with pending writes."""
        with self._lock:
            entries = list(self)
            caches = [entry.cache.states for entry in entries]
            return measure_usage([*caches, *(c for e in entries for c in e.pending_caches)])

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

    def match_prefix(
        self, tree_key: bytes, tokens: Sequence[int], num_cached: int, alignment: int = 1
    ) -> PrefixMatch:
        """Match all but the last of `tokens`; count a use of a match beyond `num_cached`."""
        with self._lock:
            if tree_key not in self.trees:
                return PrefixMatch(None, 0, 0, None)
            match = self.trees[tree_key].match_prefix(tokens, len(tokens) - 1, alignment)
            if match.entry is not None and match.length > num_cached:
                match.entry.last_used = time.monotonic()
                match.entry.num_uses += 1
            return match

    def count_cached_tokens(self, tree_key: bytes, tokens: Sequence[int]) -> int:
        """Count the first tokens that are in memory; the last of `tokens` never counts."""
        with self._lock:
            tree = self.trees.get(tree_key)
            return 0 if tree is None else tree.match_prefix(tokens, len(tokens) - 1).length

    def list_candidates(self, usage: CacheUsage) -> list[EvictionCandidate]:
        """Return all entries with their values; `usage` is of `measure`."""
        now = time.monotonic()
        pairs = [(tree, entry) for tree in self.trees.values() for entry in tree]
        return [
            EvictionCandidate(
                *(tree, entry, is_used),
                _compute_value(entry, now) / max(proportional, 1.0),
                *(unique, proportional),
            )
            for (tree, entry), unique, proportional, is_used in zip(
                pairs,
                usage.unique_nbytes,
                usage.proportional_nbytes,
                usage.has_outside_users,
                strict=False,  # usage also lists pending caches, after the entries
            )
        ]

    def drop_empty_trees(self) -> None:
        """Drop trees without entries, and the pools without trees."""
        self.trees = {key: tree for key, tree in self.trees.items() if any(True for _ in tree)}
        if not self.trees:
            self.cache = None


class PrefixMemory:
    """Prefixes of all models within a limit of bytes, also written to a store; thread-safe."""

    def __init__(self, max_bytes: int | None, prefix_store: PrefixStore | None) -> None:
        self.max_bytes = max_bytes
        self.prefix_store = prefix_store
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
        """Bytes of all prefixes; pages that requests share are included."""
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

    def insert(
        self,
        keys: NamespaceKeys,
        tokens: Sequence[int],
        cache: TransformersCache,
        num_prefilled: int,
        alignment: int | None,
    ) -> None:
        """Insert a prefix, unless it does not fit or the lock is not free in time.

        Only multiples of `alignment` are written to the store.

        Closing a generator inserts its reply, and a garbage collection may close one at any time.
        If this thread is changing the trees then, `_is_changing` skips the insert. If it holds the
        lock of the pools, the timeout prevents a deadlock.
        """
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            return
        try:
            if not self._is_changing:
                with self._lock_for_change():
                    self._insert(keys, tokens, cache, num_prefilled, alignment)
        finally:
            self._lock.release()

    def reject(self, keys: NamespaceKeys, tokens: Sequence[int]) -> None:
        """Drop restored tokens from memory, and ignore them in stores."""
        if self.prefix_store is not None:
            self.prefix_store.reject(keys.tree_key, tokens)
        with self._lock_for_change():
            pools = self.get_pools(keys.pools_key)
            if (tree := pools.trees.get(keys.tree_key)) is not None:
                for entry in tree.list_entries_sharing(tokens):
                    entry.cancel_writes()
                    tree.remove(entry)
            pools.drop_empty_trees()

    def evict(
        self,
        nbytes: int,
        pools: PrefixPools | None = None,
        rules: EvictionRules = EVICT_ANY,
    ) -> Evicted:
        """Evict prefixes until `nbytes` are freed or none is left; with `pools`, only theirs."""
        with self._lock_for_change():
            groups = list(self) if pools is None else [pools]
            before = sum(group.measure().nbytes for group in groups)
            count = self._shrink(groups, before - nbytes, rules)
            return Evicted(count, before - sum(group.measure().nbytes for group in groups))

    def clear(self) -> None:
        """Free all prefixes; stores stay as they are."""
        with self._lock_for_change():
            for pools in self:
                for tree in pools.trees.values():
                    for entry in list(tree):
                        entry.cancel_writes()
                        tree.remove(entry)  # unlinks nodes, which are in reference cycles
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

    def _insert(
        self,
        keys: NamespaceKeys,
        tokens: Sequence[int],
        cache: TransformersCache,
        num_prefilled: int,
        alignment: int | None,
    ) -> None:
        pools, suffice = self.get_pools(keys.pools_key), pages_suffice(cache.spec)
        pool_cache = pools.cache
        if pool_cache is None:
            pool_cache = cache.fork()
            pool_cache.reset()
        # A merge shares the pages, and drops checkpoints of recurrent layers.
        merged = pool_cache.merge_with([cache])
        merged.context.attention_stats.clear()  # statistics of the request, not of the prefix
        nbytes = measure_usage([merged.states]).nbytes
        if self.max_bytes is not None and nbytes > self.max_bytes:
            return
        tree = pools.trees.get(keys.tree_key)
        if tree is None:
            tree = PrefixTree(keys.tree_key, pages_suffice=suffice)
        pools.cache, pools.trees[keys.tree_key] = pool_cache, tree
        entry = tree.insert(tokens, merged, num_prefilled)
        if entry is not None:
            entry.last_used = time.monotonic()
            if self.prefix_store is not None:
                write = self.prefix_store.write(
                    *(keys.tree_key, tokens, merged.states, num_prefilled),
                    metadata=keys.metadata,
                    pages_suffice=suffice,
                    max_length=alignment and num_prefilled // alignment * alignment,
                )
                entry.writes += [write] if write.page_set is not None else []
        self._nbytes_bound += nbytes
        if self.max_bytes is not None and self._nbytes_bound > self.max_bytes:
            self._nbytes_bound = self.nbytes
            if self._nbytes_bound > self.max_bytes:
                target = int(LOW_WATERMARK * self.max_bytes)
                self._shrink(list(self), target, EvictionRules(protected=entry))
                self._nbytes_bound = self.nbytes

    def _shrink(self, groups: Sequence[PrefixPools], nbytes: int, rules: EvictionRules) -> int:
        """Evict entries of `groups` until they have `nbytes`; return how many were evicted."""
        total = 0
        while count := self._evict_least_valuable(groups, nbytes, rules):
            total += count  # each call frees the evicted pages on return, with its locals
        for pools in groups:
            pools.drop_empty_trees()
        return total

    def _evict_least_valuable(
        self, groups: Sequence[PrefixPools], nbytes: int, rules: EvictionRules
    ) -> int:
        """Evict entries that no request uses, then others; among equals, least value first.

        Stop after an entry with shared pages: its eviction changes the values of the others, so
        they must be measured again. Return how many were evicted.
        """
        usages = [pools.measure() for pools in groups]
        excess, count = sum(usage.nbytes for usage in usages) - nbytes, 0
        if excess <= 0:
            return 0
        candidates = [
            candidate
            for pools, usage in zip(groups, usages, strict=True)
            for candidate in pools.list_candidates(usage)
            if rules.allow(candidate)
        ]
        candidates.sort(key=lambda candidate: (candidate.is_used, candidate.value))
        for candidate in candidates:
            candidate.entry.cancel_writes()  # before the removal, which drops the last reference
            candidate.tree.remove(candidate.entry)
            self.counts["evicted"] += 1
            count += 1
            excess -= candidate.unique_nbytes
            if excess <= 0 or candidate.shares_pages:  # another may now hold its pages alone
                break
        return count


def _compute_value(entry: PrefixEntry, now: float) -> float:
    """Return the tokens that an eviction would lose, weighted by uses and age.

    Tokens up to the nearest entry above in the tree would stay cached.
    """
    node = entry.node
    while node.parent is not None and not (node.entries and node is not entry.node):
        node = node.parent
    begin = max([other.length for other in node.entries if other is not entry], default=0)
    return max(entry.length - begin, 1) * (1 + entry.num_uses) / (1.0 + now - entry.last_used)
