"""Prefixes: what was read once is there for whoever begins with the same tokens.

One owner for any number of models, specs, sessions and engines. It holds caches over shared pools
within a limit of bytes. A `Shelf` is what a reader of one model and one spec sees of it.
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

LOW_WATERMARK = 0.9  # of the limit: so much is left once something had to go
LOCK_TIMEOUT_S = 1.0  # seconds that a reply waits to be kept


class Prefixes:
    """Caches that may be gone on from, within a limit of bytes; for any number of threads.

    >>> prefixes = kvant.Prefixes("64MiB")
    >>> for text in ("import os, sys", "import os, re"):  # they begin alike
    ...     steps = kvant.generate(model, tokenizer, text, prefixes=prefixes, max_new_tokens=4)
    ...     reply = "".join(step.text for step in steps)
    >>> prefixes.stats()["tokens_hit"] > 0
    True
    """

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
        """`max_bytes` bounds all pages and states that are kept; None: only memory does.

        What is kept is also written to a `store`, and comes back from there: a folder, a URL, or a
        list of them, the nearest first. Who has another `salt` gets none of these. With `exact` a
        hit gives the bits of a prompt that was read from its beginning: it needs `prefill=stored`
        where a format is not raw, ends at multiples of 512 tokens, and is never of tokens that were
        decoded.
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
        self._is_changing = False  # does this thread change something?
        self._trees: dict[bytes, PrefixTree] = {}
        self._pool_caches: dict[bytes, TransformersCache] = {}  # empty: they lend their pools
        self._max_nbytes_now = 0  # bytes that there may be by now
        self._seconds_per_token: dict[
            bytes, float
        ] = {}  # by pools: seconds in which a token is read
        self._counts: Counter[str] = Counter()

    def open_namespace(
        self, model: PreTrainedModel, cache: TransformersCache, weights_check_interval: float = 0.0
    ) -> PrefixNamespace:
        """What a reader of this model sees whose caches are like this one.

        It looks at the weights whenever it begins or keeps a prompt, unless it did so less than
        `believed` seconds ago.
        """
        if self.exact and (layer := find_dense_prompt_layer(cache.spec)) is not None:
            raise ValueError(
                f"exact prefixes with prefill={layer.prefill}: chunks of a prompt see their own "
                "rows dense, so that what is stored depends on where they end; give the spec "
                "prefill=stored"
            )
        if cache.spec.prunes:
            raise ValueError(
                f"prefixes with {describe_spec(cache.spec)}: rows that one prompt leaves out may "
                "matter "
                "to the next; leave the prune out, or share no prefixes"
            )
        return PrefixNamespace(self, model, cache, weights_check_interval)

    def __enter__(self) -> Prefixes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all of them, once they are in the store; nothing is written after that.

        A store that does not answer is not waited for.
        """
        if self.prefix_store is not None:
            self.prefix_store.close()
        self.clear()

    def abandon(self) -> None:
        """Let go of all of them; what is not in the store yet does not come there."""
        self.clear()
        if self.prefix_store is not None:
            self.prefix_store.close(0.0)

    def flush(self, seconds: float | None = None) -> bool:
        """Wait `seconds` at most for pending writes; return whether none is pending any more.

        A write that failed is not pending: `stats()` counts it. A store that does not answer for
        ten seconds ends the wait.
        """
        return self.prefix_store is None or self.prefix_store.tiers.flush(seconds)

    @property
    def nbytes_unwritten(self) -> int:
        """Bytes that wait to be written to the store."""
        return 0 if self.prefix_store is None else self.prefix_store.tiers.writer.nbytes

    def clear(self) -> None:
        """Let go of all of them; what is in a store stays there."""
        with self._lock_for_change():
            for tree in self._trees.values():
                for kept in list(tree):
                    kept.cancel_writes()
                    tree.remove(kept)  # its nodes know each other, and would go later
            self._trees, self._pool_caches, self._max_nbytes_now = {}, {}, 0

    def evict(self, nbytes: int) -> int:
        """Let go of at least so many bytes, if there are as many; how many that was."""
        with self._lock_for_change():
            before = self.nbytes
            self._shrink(before - nbytes)
            return before - self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept; a page that somebody uses, too, is one of them."""
        with self._lock:
            return sum(measure_usage(list_caches(some)).nbytes for some in self._group_by_pools())

    def stats(self) -> dict[str, Any]:
        """What is kept, what it takes, and how much of what was asked was there."""
        with self._lock:
            accounts = [measure_usage(list_caches(some)) for some in self._group_by_pools()]
            asked, hit = self._counts["tokens_asked"], self._counts["tokens_hit"]
            return {
                "prefixes": sum(map(len, self._group_by_pools())),
                "nbytes": sum(one.nbytes for one in accounts),
                "nbytes_idle": sum(one.freeable_nbytes for one in accounts),
                "max_bytes": self.max_bytes,
                **{name: self._counts[name] for name in ("hits", "misses", "evicted")},
                "tokens_asked": asked,
                "tokens_hit": hit,
                "hit_rate": hit / asked if asked else 0.0,
                **({} if self.prefix_store is None else {"store": self.prefix_store.stats()}),
            }

    # ---- what shelves ask

    def _match_prefix(self, tree_key: bytes, tokens: Sequence[int], num_cached: int) -> PrefixMatch:
        with self._lock:
            if tree_key not in self._trees:
                return PrefixMatch(None, 0, 0, None)
            every = EXACT_CHUNK if self.exact else 1
            match = self._trees[tree_key].match_prefix(tokens, len(tokens) - 1, every)
            if match.entry is not None and match.length > num_cached:
                match.entry.last_used, match.entry.num_uses = (
                    time.monotonic(),
                    match.entry.num_uses + 1,
                )
            return match

    def _reject(self, name: bytes, tokens: Sequence[int]) -> None:
        """Drop what a store had of these tokens, from memory and from its index."""
        if self.prefix_store is not None:
            self.prefix_store.reject(name, tokens)
        with self._lock_for_change():
            if (tree := self._trees.get(name)) is not None:
                for kept in tree.find_sharing(tokens):
                    kept.cancel_writes()
                    tree.remove(kept)
            self._drop_empty_trees()

    def _record_lookup(self, num_prompt_tokens: int, num_cached: int) -> None:
        with self._lock:
            self._counts["hits" if num_cached else "misses"] += 1
            self._counts["tokens_asked"] += num_prompt_tokens
            self._counts["tokens_hit"] += num_cached

    def _count_cached_tokens(self, tree_key: bytes, tokens: Sequence[int]) -> int:
        """How many of the first tokens, not all, there are in memory."""
        with self._lock:
            tree = self._trees.get(tree_key)
            return 0 if tree is None else tree.match_prefix(tokens, len(tokens) - 1).length

    def _record_prefill_time(self, pools_key: bytes, seconds: float) -> None:
        with self._lock:
            old = self._seconds_per_token.get(pools_key, seconds)
            self._seconds_per_token[pools_key] = (
                TIME_SMOOTHING * seconds + (1 - TIME_SMOOTHING) * old
            )

    def _insert(
        self,
        keys: NamespaceKeys,
        tokens: Sequence[int],
        cache: TransformersCache,
        num_prefilled: int,
    ) -> None:
        """Unless it does not fit, or a collection of garbage ended a reply in the middle of this.

        Who collects garbage may hold the pools: so it does not wait for who waits for them.
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
            return any(kept.has_unwritten for _, kept in self._list_entries(pools_key))

    def _evict_from(
        self, pools_key: bytes, nbytes: int, *, include_unwritten: bool, include_used: bool
    ) -> bool:
        with self._lock_for_change():
            before, left = self._counts["evicted"], self._measure_pools(pools_key).nbytes - nbytes
            self._shrink(
                left, pools_key, include_unwritten=include_unwritten, include_used=include_used
            )
            return self._counts["evicted"] > before

    # ---- within

    @contextmanager
    def _lock_for_change(self) -> Iterator[None]:
        with self._lock:
            before, self._is_changing = self._is_changing, True
            try:
                yield
            finally:
                self._is_changing = before

    def _insert_locked(
        self,
        keys: NamespaceKeys,
        tokens: Sequence[int],
        cache: TransformersCache,
        num_prefilled: int,
    ) -> None:
        name, home = keys.tree_key, keys.pools_key
        lends = self._pool_caches.get(home)
        if lends is None:
            lends = cache.fork()
            lends.reset()
        # What is merged shares the pages, and has no checkpoints of recurrent layers.
        merged = lends.merge_with([cache])
        merged.context.attention_stats.clear()  # what it read is somebody else's
        alone = measure_usage([merged.states]).nbytes
        tree = self._trees.get(name)
        if tree is None:
            suffice = pages_suffice(cache.spec)
            tree = PrefixTree(name, home, pages_suffice=suffice, metadata=keys.metadata)
        if self.max_bytes is not None and alone > self.max_bytes:
            return
        self._pool_caches[home], self._trees[name] = lends, tree
        kept = tree.insert(tokens, merged, num_prefilled)
        if kept is not None:
            kept.last_used = time.monotonic()
            kept.writes += self._write_to_store(tree, tokens, merged, num_prefilled)
        self._max_nbytes_now += alone
        if self.max_bytes is not None and self._max_nbytes_now > self.max_bytes:
            self._max_nbytes_now = self.nbytes
            if self._max_nbytes_now > self.max_bytes:
                self._shrink(int(LOW_WATERMARK * self.max_bytes), protected=kept)
                self._max_nbytes_now = self.nbytes

    def _write_to_store(
        self, tree: PrefixTree, tokens: Sequence[int], cache: TransformersCache, num_prefilled: int
    ) -> list[PrefixWrite]:
        """Let the store have what it has not."""
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
        """All that is kept, by the pools in which it lies."""
        found: dict[bytes, list[tuple[PrefixTree, PrefixEntry]]] = {}
        for tree in self._trees.values():
            found.setdefault(tree.pools_key, []).extend((tree, kept) for kept in tree)
        return [some for some in found.values() if some]

    def _list_entries(self, pools_key: bytes) -> list[tuple[PrefixTree, PrefixEntry]]:
        """All that is kept in some pools."""
        return next(
            (some for some in self._group_by_pools() if some[0][0].pools_key == pools_key), []
        )

    def _shrink(
        self,
        nbytes: int,
        pools_key: bytes | None = None,
        *,
        include_unwritten: bool = True,
        include_used: bool = True,
        protected: PrefixEntry | None = None,
    ) -> None:
        """Let go of what is worth least for its bytes, until so many are left.

        First of what nobody uses, and only of that unless it may be `used`; only of what no store
        waits for unless it may be `unwritten`. In the pools of `home`, or in all. `but` that, which
        is new, stays.
        """
        while self._evict_least_valuable(
            nbytes,
            pools_key,
            include_unwritten=include_unwritten,
            include_used=include_used,
            protected=protected,
        ):
            pass  # nobody holds any more what went
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
        """A round of that; False where nothing went."""
        groups = [x for x in self._group_by_pools() if pools_key in (None, x[0][0].pools_key)]
        accounts = [measure_usage(list_caches(some)) for some in groups]
        over, now = sum(one.nbytes for one in accounts) - nbytes, time.monotonic()
        worth = sorted(
            (
                (in_use, _compute_value(kept, now) / max(share, 1.0), own, share, tree, kept)
                for some, told in zip(groups, accounts, strict=True)
                for (tree, kept), own, share, in_use in zip(
                    some,
                    told.unique_nbytes,
                    told.proportional_nbytes,
                    told.has_outside_users,
                    strict=False,  # others wait behind
                )
                if kept is not protected
                and (include_used or not in_use)
                and (include_unwritten or not kept.has_unwritten)
            ),
            key=lambda one: one[:2],
        )
        if over <= 0:
            return False
        for _, _, own, share, tree, kept in worth:
            kept.cancel_writes()  # first: once it is in no tree, nobody else can
            tree.remove(kept)
            self._counts["evicted"] += 1
            over -= own
            if over <= 0 or share > own:  # what it shared may be another one's alone by now
                break
        return bool(worth)

    def _drop_empty_trees(self) -> None:
        """Forget trees and pools in which nothing is kept."""
        self._trees = {name: tree for name, tree in self._trees.items() if any(True for _ in tree)}
        homes = {tree.pools_key for tree in self._trees.values()}
        self._pool_caches = {
            name: home for name, home in self._pool_caches.items() if name in homes
        }


def list_caches(entries: Iterable[tuple[PrefixTree, PrefixEntry]]) -> list[Cache]:
    """The caches of what is kept; behind them, others that are yet to be written."""
    kept = [kept for _, kept in entries]
    return [one.cache.states for one in kept] + [
        cache for one in kept for cache in one.pending_caches
    ]


def _compute_value(entry: PrefixEntry, now: float) -> float:
    """Tokens that would have to be read again, by how long ago they were of use."""
    before = entry.node
    while before.parent is not None and not (before.entries and before is not entry.node):
        before = before.parent
    begin = max([one.length for one in before.entries if one is not entry], default=0)
    return max(entry.length - begin, 1) * (1 + entry.num_uses) / (1.0 + now - entry.last_used)
