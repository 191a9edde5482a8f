"""Cache prefixes for any number of models, specs, sessions and engines within one limit of bytes.

`Prefixes` owns the cached sequences of all models. A `PrefixNamespace` is the view of one reader
with one model, spec and salt. The way of a prefix between memory and stores:

         cache of a request, at a checkpoint or its end      cache of a new request
                  |                                                 ^
                  |  insert: fork                                   |  match: fork, rewind
                  v                                                 |
    memory     entries of a PrefixTree: caches over shared pools ---+---- evict: free
                  |                                ^
                  |  PrefixWrite                   |  insert_restored
                  |  in the background       RestoredPrefix
                  |                                ^
                  v                                |  find_hits: StoreHit; restore
    stores     blobs of pages, and of tail states -+
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any
from weakref import finalize

from transformers import PreTrainedModel

from kvant.cache import Cache
from kvant.cache.usage import CacheUsage, measure_usage
from kvant.hf import TransformersCache
from kvant.prefixes.namespace import (
    EXACT_CHUNK,
    NamespaceKeys,
    PrefixNamespace,
    find_dense_prompt_layer,
    pages_suffice,
)
from kvant.prefixes.prefix_store import PrefixStore, PrefixWrite
from kvant.prefixes.restore_times import TIME_SMOOTHING
from kvant.prefixes.tree import PrefixEntry, PrefixMatch, PrefixTree
from kvant.renamed import RenamedAttribute
from kvant.sizes import as_bytes
from kvant.spec import describe_spec
from kvant.stores import Store, Tiers, open_tiers

log = logging.getLogger("kvant")

LOW_WATERMARK = 0.9  # an eviction shrinks to this fraction of the limit
LOCK_TIMEOUT_S = 1.0  # seconds that an insert waits for the lock


class Prefixes:
    """Cached prefixes of prompts within a limit of bytes; for any number of threads.

    >>> prefixes = kvant.Prefixes("64MiB")
    >>> for text in ("import os, sys", "import os, re"):  # with a common prefix
    ...     steps = kvant.generate(model, tokenizer, text, prefixes=prefixes, max_new_tokens=4)
    ...     reply = "".join(step.text for step in steps)
    >>> prefixes.stats()["tokens_hit"] > 0
    True
    """

    # Old names of attributes, which warn.
    shelf = RenamedAttribute("open_namespace")
    archive = RenamedAttribute("prefix_store")

    def __init__(
        self,
        max_bytes: int | str | None = "1GiB",
        *,
        salt: str = "",
        exact: bool = False,
        store: str | Store | Sequence[str | Store] | Tiers | None = None,
    ) -> None:
        """`max_bytes` bounds all cached pages and states; None: no limit.

        Prefixes are also written to a `store` and restored from it: a folder, a URL, or a list of
        these, nearest first. Prefixes of another `salt` are not shared. With `exact`, a hit gives
        the same bits as a full prefill: it needs `prefill=stored` unless the format is raw, and
        only multiples of 512 prefilled tokens are reused.
        """
        limit = None if max_bytes is None else as_bytes(max_bytes)
        if limit is not None and limit < 0:
            raise ValueError(f"max_bytes={max_bytes}: 0 or more is needed")
        self.max_bytes = limit
        self.salt = salt
        self.exact = exact
        self.prefix_store: PrefixStore | None = None
        if store is not None:
            tiers = store if isinstance(store, Tiers) else open_tiers(store)
            self.prefix_store = PrefixStore(tiers, shared=tiers is store)
            finalize(self, self.prefix_store.close)
        self._lock = RLock()
        self._is_changing = False  # the thread that holds the lock is changing the trees
        self._trees: dict[bytes, PrefixTree] = {}
        self._pool_caches: dict[bytes, TransformersCache] = {}  # empty caches over the pools
        self._nbytes_bound = 0  # upper bound on the bytes: counts shared pages several times
        self._seconds_per_token: dict[bytes, float] = {}  # of prefill, by pools
        self._counts: Counter[str] = Counter()

    def open_namespace(
        self, model: PreTrainedModel, cache: TransformersCache, weights_check_interval: float = 0.0
    ) -> PrefixNamespace:
        """Return the namespace of a model and the spec of `cache`.

        It checks the weights when it matches or inserts a prompt, unless the last check was less
        than `weights_check_interval` seconds ago.
        """
        if self.exact and (layer := find_dense_prompt_layer(cache.spec)) is not None:
            raise ValueError(
                f"exact prefixes with prefill={layer.prefill}: a chunk reads its own rows before "
                "they are quantized, so results depend on chunk ends; set prefill=stored"
            )
        if cache.spec.prunes:
            raise ValueError(
                f"prefixes with {describe_spec(cache.spec)}: rows pruned from a prompt may matter "
                "to the next one; remove the prune from the spec, or use no prefixes"
            )
        return PrefixNamespace(self, model, cache, weights_check_interval)

    def __enter__(self) -> Prefixes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish pending store writes and free all prefixes; nothing is written afterwards.

        A store that does not answer ends the wait.
        """
        if self.prefix_store is not None:
            self.prefix_store.close()
        self.clear()

    def abandon(self) -> None:
        """Free all prefixes and drop pending store writes."""
        self.clear()
        if self.prefix_store is not None:
            self.prefix_store.close(0.0)

    def flush(self, seconds: float | None = None) -> bool:
        """Wait `seconds` at most for pending writes; return whether all are done.

        A failed write is done: `stats()` counts it. A store that does not answer for ten seconds
        ends the wait.
        """
        return self.prefix_store is None or self.prefix_store.tiers.flush(seconds)

    @property
    def nbytes_unwritten(self) -> int:
        """Bytes queued to be written to the store."""
        return 0 if self.prefix_store is None else self.prefix_store.tiers.writer.nbytes

    def clear(self) -> None:
        """Free all prefixes in memory; stores stay as they are."""
        with self._lock_for_change():
            for tree in self._trees.values():
                for entry in list(tree):
                    entry.cancel_writes()
                    tree.remove(entry)  # unlinks nodes, which are in reference cycles
            self._trees, self._pool_caches, self._nbytes_bound = {}, {}, 0

    def evict(self, nbytes: int) -> int:
        """Evict prefixes of at least `nbytes` bytes if possible; return the bytes freed."""
        with self._lock_for_change():
            before = self.nbytes
            self._shrink(before - nbytes)
            return before - self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all prefixes; pages that requests share are included."""
        with self._lock:
            return sum(usage.nbytes for usage in self._measure_groups())

    def stats(self) -> dict[str, Any]:
        """Return counts of prefixes, bytes, hits and misses; with a store, its stats."""
        with self._lock:
            usages = self._measure_groups()
            num_tokens, num_hit = self._counts["tokens_asked"], self._counts["tokens_hit"]
            return {
                "prefixes": sum(map(len, self._group_by_pools())),
                "nbytes": sum(usage.nbytes for usage in usages),
                "nbytes_idle": sum(usage.freeable_nbytes for usage in usages),
                "max_bytes": self.max_bytes,
                **{name: self._counts[name] for name in ("hits", "misses", "evicted")},
                "tokens_asked": num_tokens,
                "tokens_hit": num_hit,
                "hit_rate": num_hit / num_tokens if num_tokens else 0.0,
                **({} if self.prefix_store is None else {"store": self.prefix_store.stats()}),
            }

    # ---- for namespaces

    def _match_prefix(self, tree_key: bytes, tokens: Sequence[int], num_cached: int) -> PrefixMatch:
        with self._lock:
            if tree_key not in self._trees:
                return PrefixMatch(None, 0, 0, None)
            alignment = EXACT_CHUNK if self.exact else 1
            match = self._trees[tree_key].match_prefix(tokens, len(tokens) - 1, alignment)
            if match.entry is not None and match.length > num_cached:
                match.entry.last_used = time.monotonic()
                match.entry.num_uses += 1
            return match

    def _reject(self, tree_key: bytes, tokens: Sequence[int]) -> None:
        """Drop restored tokens from memory, and ignore them in stores."""
        if self.prefix_store is not None:
            self.prefix_store.reject(tree_key, tokens)
        with self._lock_for_change():
            if (tree := self._trees.get(tree_key)) is not None:
                for entry in tree.list_entries_sharing(tokens):
                    entry.cancel_writes()
                    tree.remove(entry)
            self._drop_empty_trees()

    def _record_lookup(self, num_prompt_tokens: int, num_cached: int) -> None:
        with self._lock:
            self._counts["hits" if num_cached else "misses"] += 1
            self._counts["tokens_asked"] += num_prompt_tokens
            self._counts["tokens_hit"] += num_cached

    def _count_cached_tokens(self, tree_key: bytes, tokens: Sequence[int]) -> int:
        """Return how many first tokens, fewer than all, are in memory."""
        with self._lock:
            tree = self._trees.get(tree_key)
            return 0 if tree is None else tree.match_prefix(tokens, len(tokens) - 1).length

    def _record_prefill_time(self, pools_key: bytes, seconds: float) -> None:
        with self._lock:
            mean = self._seconds_per_token.get(pools_key, seconds)
            mean = TIME_SMOOTHING * seconds + (1 - TIME_SMOOTHING) * mean
            self._seconds_per_token[pools_key] = mean

    def _insert(
        self,
        keys: NamespaceKeys,
        tokens: Sequence[int],
        cache: TransformersCache,
        num_prefilled: int,
    ) -> None:
        """Insert a prefix, unless it does not fit or the lock is not free in time.

        A garbage collection may close a generator, which then inserts its reply, at any point of
        this thread. If that is within a change of the trees, `_is_changing` skips the insert. If
        this thread holds the lock of the pools, the timeout prevents a deadlock.
        """
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            return
        try:
            if not self._is_changing:
                with self._lock_for_change():
                    self._insert_locked(keys, tokens, cache, num_prefilled)
        finally:
            self._lock.release()

    def _measure_pools(self, pools_key: bytes) -> CacheUsage:
        with self._lock:
            return measure_usage(list_caches(self._list_entries(pools_key)))

    def _has_unwritten(self, pools_key: bytes) -> bool:
        with self._lock:
            return any(entry.has_unwritten for _, entry in self._list_entries(pools_key))

    def _evict_from(
        self, pools_key: bytes, nbytes: int, *, include_unwritten: bool, include_used: bool
    ) -> bool:
        with self._lock_for_change():
            num_before = self._counts["evicted"]
            target = self._measure_pools(pools_key).nbytes - nbytes
            self._shrink(
                target, pools_key, include_unwritten=include_unwritten, include_used=include_used
            )
            return self._counts["evicted"] > num_before

    # ---- internals

    @contextmanager
    def _lock_for_change(self) -> Iterator[None]:
        with self._lock:
            was_changing, self._is_changing = self._is_changing, True
            try:
                yield
            finally:
                self._is_changing = was_changing

    def _insert_locked(
        self,
        keys: NamespaceKeys,
        tokens: Sequence[int],
        cache: TransformersCache,
        num_prefilled: int,
    ) -> None:
        pool_cache = self._pool_caches.get(keys.pools_key)
        if pool_cache is None:
            pool_cache = cache.fork()
            pool_cache.reset()
        # A merge shares the pages, and drops checkpoints of recurrent layers.
        merged = pool_cache.merge_with([cache])
        merged.context.attention_stats.clear()  # statistics of the request, not of the prefix
        nbytes = measure_usage([merged.states]).nbytes
        tree = self._trees.get(keys.tree_key)
        if tree is None:
            suffice = pages_suffice(cache.spec)
            tree = PrefixTree(
                keys.tree_key, keys.pools_key, pages_suffice=suffice, metadata=keys.metadata
            )
        if self.max_bytes is not None and nbytes > self.max_bytes:
            return
        self._pool_caches[keys.pools_key], self._trees[keys.tree_key] = pool_cache, tree
        entry = tree.insert(tokens, merged, num_prefilled)
        if entry is not None:
            entry.last_used = time.monotonic()
            entry.writes += self._write_to_store(tree, tokens, merged, num_prefilled)
        self._nbytes_bound += nbytes
        if self.max_bytes is not None and self._nbytes_bound > self.max_bytes:
            self._nbytes_bound = self.nbytes
            if self._nbytes_bound > self.max_bytes:
                self._shrink(int(LOW_WATERMARK * self.max_bytes), protected=entry)
                self._nbytes_bound = self.nbytes

    def _write_to_store(
        self, tree: PrefixTree, tokens: Sequence[int], cache: TransformersCache, num_prefilled: int
    ) -> list[PrefixWrite]:
        """Queue writes of what the store lacks."""
        if self.prefix_store is None:
            return []
        write = self.prefix_store.write(
            *(tree.root.key, tokens, cache.states, num_prefilled),
            metadata=tree.metadata,
            pages_suffice=tree.pages_suffice,
            max_length=num_prefilled // EXACT_CHUNK * EXACT_CHUNK if self.exact else None,
        )
        return [write] if write.page_set is not None else []

    def _group_by_pools(self) -> list[list[tuple[PrefixTree, PrefixEntry]]]:
        """Group all entries by their pools."""
        groups: dict[bytes, list[tuple[PrefixTree, PrefixEntry]]] = {}
        for tree in self._trees.values():
            groups.setdefault(tree.pools_key, []).extend((tree, entry) for entry in tree)
        return [group for group in groups.values() if group]

    def _measure_groups(self) -> list[CacheUsage]:
        return [measure_usage(list_caches(group)) for group in self._group_by_pools()]

    def _list_entries(self, pools_key: bytes) -> list[tuple[PrefixTree, PrefixEntry]]:
        """Return all entries in the pools of a key."""
        groups = self._group_by_pools()
        return next((group for group in groups if group[0][0].pools_key == pools_key), [])

    def _shrink(
        self,
        nbytes: int,
        pools_key: bytes | None = None,
        *,
        include_unwritten: bool = True,
        include_used: bool = True,
        protected: PrefixEntry | None = None,
    ) -> None:
        """Evict the entries of the least value per byte until `nbytes` are left.

        Entries whose pages no request uses go first; others only with `include_used`. Those with
        pending store writes go only with `include_unwritten`. Without `pools_key`, entries of all
        pools are considered.
        """
        while self._evict_least_valuable(
            nbytes,
            pools_key,
            include_unwritten=include_unwritten,
            include_used=include_used,
            protected=protected,
        ):
            pass  # each call frees the evicted pages on return, when its locals are released
        self._drop_empty_trees()

    def _evict_least_valuable(
        self,
        nbytes: int,
        pools_key: bytes | None,
        *,
        include_unwritten: bool,
        include_used: bool,
        protected: PrefixEntry | None,
    ) -> bool:
        """Evict entries, least value per byte first; return whether any was evicted.

        Stop after an entry with shared pages: its eviction changes the values of the others, so
        they must be measured again.
        """
        groups = [g for g in self._group_by_pools() if pools_key in (None, g[0][0].pools_key)]
        usages = [measure_usage(list_caches(group)) for group in groups]
        excess, now = sum(usage.nbytes for usage in usages) - nbytes, time.monotonic()
        candidates = sorted(
            (
                (in_use, _compute_value(entry, now) / max(share, 1.0), unique, share, tree, entry)
                for group, usage in zip(groups, usages, strict=True)
                for (tree, entry), unique, share, in_use in zip(
                    group,
                    usage.unique_nbytes,
                    usage.proportional_nbytes,
                    usage.has_outside_users,
                    strict=False,  # usage also lists pending caches, after the entries
                )
                if entry is not protected
                and (include_used or not in_use)
                and (include_unwritten or not entry.has_unwritten)
            ),
            key=lambda candidate: candidate[:2],
        )
        if excess <= 0:
            return False
        for _, _, unique, share, tree, entry in candidates:
            entry.cancel_writes()  # before the removal, which drops the last reference
            tree.remove(entry)
            self._counts["evicted"] += 1
            excess -= unique
            if excess <= 0 or share > unique:  # another entry may now hold its pages alone
                break
        return bool(candidates)

    def _drop_empty_trees(self) -> None:
        """Drop trees and pools without entries."""
        self._trees = {key: tree for key, tree in self._trees.items() if any(True for _ in tree)}
        pools_keys = {tree.pools_key for tree in self._trees.values()}
        self._pool_caches = {
            key: cache for key, cache in self._pool_caches.items() if key in pools_keys
        }


def list_caches(entries: Iterable[tuple[PrefixTree, PrefixEntry]]) -> list[Cache]:
    """Return the caches of entries, followed by other caches that are yet to be written."""
    listed = [entry for _, entry in entries]
    return [entry.cache.states for entry in listed] + [
        cache for entry in listed for cache in entry.pending_caches
    ]


def _compute_value(entry: PrefixEntry, now: float) -> float:
    """Return the tokens that an eviction would cost, weighted by uses and age.

    Tokens up to the nearest entry above in the tree would not be lost.
    """
    node = entry.node
    while node.parent is not None and not (node.entries and node is not entry.node):
        node = node.parent
    begin = max([other.length for other in node.entries if other is not entry], default=0)
    return max(entry.length - begin, 1) * (1 + entry.num_uses) / (1.0 + now - entry.last_used)
