"""Give one reader, a session or an engine, the prefixes of one model, spec and salt.

A namespace identifies the model by a hash of its weights. It matches prompts, plans the lengths at
which to insert them, and restores them from a store.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from kvant.errors import CacheError
from kvant.hf import TransformersCache
from kvant.prefixes.checkpoints import CheckpointPlanner, pages_suffice
from kvant.prefixes.keys import ModelKeys, NamespaceKeys
from kvant.prefixes.memory import PrefixMemory, PrefixPools
from kvant.prefixes.prefix_store import PrefixStore, RestoredPrefix
from kvant.prefixes.restore import STORE_TIMEOUT_S, LookupDeadline
from kvant.prefixes.threads import DaemonExecutor
from kvant.prefixes.tree import PrefixMismatch, find_resumable_length

log = logging.getLogger("kvant")

EXACT_CHUNK = 512  # tokens of a chunk with `exact`; exact prefixes end at multiples of it
MAX_RESTORE_TRIES = 4  # stored prefixes that are tried for a prompt, the longest first


class PendingRestore(NamedTuple):
    """A restored prefix that no request or tree has taken over yet."""

    keys: NamespaceKeys
    restored: RestoredPrefix
    num_cached: int  # first tokens that were in memory already

    @property
    def restored_range(self) -> range:
        """The tokens that were not in memory."""
        return range(self.num_cached, len(self.restored.tokens))


@dataclass(frozen=True)
class StoreLookup:
    """Look up prompts of one namespace in a store, also in another thread."""

    store: PrefixStore
    memory: PrefixMemory
    model_keys: ModelKeys

    def run(
        self,
        tokens: Sequence[int],
        base_cache: TransformersCache,
        num_cached: int,
        deadline: LookupDeadline,
    ) -> PendingRestore | None:
        """Restore tokens beyond `num_cached` from the store, into the pools of `base_cache`.

        `base_cache` is empty or has the first tokens. Return None if a prefill is expected to be
        faster, or nothing was restored.
        """
        model, keys = self.model_keys.model, self.model_keys.refresh()
        if model is None or keys is None or deadline.compute_seconds_left() <= 0:
            return None
        pools, suffice = self.memory.get_pools(keys.pools_key), pages_suffice(self.model_keys.spec)
        hits = self.store.find_hits(
            keys.tree_key, tokens, base_cache.states, num_cached, pages_suffice=suffice
        )
        for hit in islice(hits, MAX_RESTORE_TRIES):
            deadline.end_time = math.inf
            prefill_seconds = pools.estimate_prefill_seconds(hit.length - num_cached)
            if deadline.compute_seconds_left() <= 0:
                return None
            if not self.store.restore_times.can_restore_within(hit.length, prefill_seconds):
                return None
            deadline.end_time = time.monotonic() + prefill_seconds
            restored = self.store.restore(hit, tokens, base_cache, model.device, deadline)
            if restored is None:
                continue
            if restored.cache.find_exact_rewind(len(tokens) - 1) > num_cached:
                return PendingRestore(keys, restored, num_cached)
            restored.cache.clear()
        return None

    def run_with_timeout(
        self, tokens: Sequence[int], empty_cache: TransformersCache, num_cached: int
    ) -> PendingRestore | None:
        """Run in a thread of its own, for `STORE_TIMEOUT_S` at most."""
        end_time = time.monotonic() + STORE_TIMEOUT_S
        deadline = LookupDeadline(lambda: end_time - time.monotonic())
        executor = DaemonExecutor(1, "kvant-store-read")
        deadline.allocate(lambda: empty_cache)
        future = executor.submit(self.run, tokens, empty_cache, num_cached, deadline)
        executor.shutdown()
        try:
            restore = future.result(STORE_TIMEOUT_S)
        except TimeoutError:
            log.warning("a store does not answer: prefilling %d tokens", len(tokens))
            deadline.cancel()
            return None
        except BaseException:  # including an interrupt
            deadline.cancel()
            raise
        deadline.release(empty_cache)
        return restore


class PrefixNamespace:
    """Prefixes of one model, spec and salt, for one reader."""

    def __init__(
        self,
        memory: PrefixMemory,
        model: PreTrainedModel,
        cache: TransformersCache,
        salt: str,
        weights_check_interval: float,
        *,
        exact: bool,
    ) -> None:
        """The weights are checked again after `weights_check_interval` seconds."""
        self.memory = memory
        # The number of tokens at whose multiples prompt chunks must end; None: anywhere.
        self.chunk_alignment = EXACT_CHUNK if exact else None
        self._model_keys = ModelKeys(model, cache, (salt,), weights_check_interval, exact=exact)
        self._matched_keys: NamespaceKeys | None = None
        self._planner = CheckpointPlanner(
            cache.spec, self.chunk_alignment, has_store=memory.prefix_store is not None
        )
        self._mismatch: PrefixMismatch | None = None  # of the prompt that was matched last
        # Length of the cached pages of the last prompt, if no entry can be resumed there; else 0.
        self._branch_point = 0

    @property
    def _keys(self) -> NamespaceKeys:
        """Keys of the last match, even if the model changed since; before it, the current keys."""
        if self._matched_keys is None:
            self._matched_keys = self._model_keys.refresh() or NamespaceKeys()
        return self._matched_keys

    @property
    def pools(self) -> PrefixPools:
        """The pools of this model and spec, which all salts share."""
        return self.memory.get_pools(self._keys.pools_key)

    def fork(self, salt: str | None = None) -> PrefixNamespace:
        """Return a copy for another reader, with another `salt` unless it is None."""
        copy = PrefixNamespace.__new__(PrefixNamespace)
        copy.__dict__.update(self.__dict__)
        copy._model_keys = self._model_keys.fork(salt)
        if salt is not None:
            copy._matched_keys = None
        return copy

    def invalidate_weights_check(self) -> None:
        """Check the weights again at the next use: the model may have been changed."""
        self._model_keys.invalidate()

    # ---- from a store

    def needs_shapes(self, cache: TransformersCache) -> bool:
        """Return whether a token must be prefilled before blobs can be checked.

        The check compares shapes, which are unknown before the first forward.
        """
        if self.memory.prefix_store is None or cache.has_shapes:
            return False
        if self._model_keys.refresh() is None:
            return False
        return self.pools.cache is None or not self.pools.cache.has_shapes

    def open_store_lookup(self) -> StoreLookup | None:
        """Return a lookup that may run in another thread; None without a store."""
        store = self.memory.prefix_store
        return None if store is None else StoreLookup(store, self.memory, self._model_keys.fork())

    def fetch_from_store(self, tokens: Sequence[int], base_cache: TransformersCache) -> range:
        """Restore what a store has of `tokens`, if that is faster than a prefill.

        Return the range of restored tokens. A store that does not answer costs `STORE_TIMEOUT_S`.
        """
        try:
            keys = None if self.memory.prefix_store is None else self._model_keys.refresh()
            lookup = self.open_store_lookup()
            if keys is None or lookup is None:
                return range(0)
            pools = self.memory.get_pools(keys.pools_key)
            num_cached = max(base_cache.length, pools.count_cached_tokens(keys.tree_key, tokens))
            empty_cache = (self.pools.cache or base_cache).fork()
            empty_cache.reset()
            restore = lookup.run_with_timeout(tokens, empty_cache, num_cached)
            if restore is not None:
                self.insert_restored(restore)
                return restore.restored_range
        except Exception as error:  # the prompt can still be prefilled
            text = repr(error)  # a log handler may keep the error, whose traceback holds caches
            log.warning("a prompt was not looked up in a store: %s", text)
        return range(0)

    def insert_restored(self, restore: PendingRestore) -> None:
        """Insert a restored prefix, so that the next match of its prompt finds it."""
        prefix, alignment = restore.restored, self.chunk_alignment
        self.memory.insert(
            restore.keys, prefix.tokens, prefix.cache, prefix.num_prefilled, alignment
        )

    def count_usable_tokens(self, restore: PendingRestore, max_tokens: int) -> int:
        """Return the longest restored length <= `max_tokens` from which generation can continue.

        It is 0 if the model changed since the lookup.
        """
        if restore.keys != self._keys:
            return 0
        return find_resumable_length(restore.restored, max_tokens, self.chunk_alignment or 1)

    def reject(self, tokens: Sequence[int]) -> None:
        """Drop a restored prefix on which the model failed."""
        log.warning("dropping a restored prefix of %d tokens: the model failed on it", len(tokens))
        self.memory.reject(self._keys, tokens)

    # ---- in memory

    def match_prefix(
        self, tokens: Sequence[int], base_cache: TransformersCache, num_prefilled: int
    ) -> tuple[TransformersCache, int]:
        """Return the cache to prefill these tokens with, and how many of its tokens were prefilled.

        It is `base_cache`, of which `num_prefilled` tokens were prefilled, or a fork of a prefix
        with more tokens.
        """
        last_keys, alignment = self._matched_keys, self.chunk_alignment
        self._mismatch, self._branch_point = None, 0
        keys = self._model_keys.refresh()
        if keys is None:
            return base_cache, num_prefilled
        self._matched_keys = keys
        is_reusable = alignment is None and keys == (last_keys or keys)
        num_cached = base_cache.length if is_reusable else 0
        match = self.pools.match_prefix(keys.tree_key, tokens, num_cached, alignment or 1)
        self._mismatch = match.mismatch
        served = max(match.length, num_cached)
        self._branch_point = match.num_shared if match.num_shared > served else 0
        if match.entry is not None and match.length > num_cached:
            cache = match.entry.cache.fork()
            cache.rewind(match.length)
            num_prefilled = min(match.entry.num_prefilled, match.length)
        elif num_cached:
            return base_cache, num_prefilled
        else:
            pool_cache = self.pools.cache
            cache = base_cache if pool_cache is None else pool_cache.fork()
            cache.reset()
            num_prefilled = 0
        cache.backend = base_cache.backend
        return cache, num_prefilled

    def plan_checkpoints(
        self, tokens: Sequence[int], num_cached: int, branch_points: Sequence[int]
    ) -> list[int]:
        """Return the lengths at which to insert a prompt while it is prefilled, in order."""
        if self._model_keys.no_prefixes_reason is not None:
            return []
        return self._planner.plan(len(tokens), num_cached, branch_points, self._branch_point)

    def insert_prefix(
        self, tokens: Sequence[int], cache: TransformersCache, num_prefilled: int
    ) -> None:
        """Insert the cache of these tokens, if its model can have prefixes.

        An error is logged, not raised: the request has its reply already.
        """
        source = self._model_keys
        if source.no_prefixes_reason is not None or not tokens or cache.length != len(tokens):
            return
        try:
            if cache.spec == source.spec and source.refresh() == self._keys:
                alignment = self.chunk_alignment
                self.memory.insert(self._keys, tokens, cache, num_prefilled, alignment)
        except (CacheError, MemoryError, RuntimeError, ValueError) as error:
            text = repr(error)  # a log handler may keep the error, whose traceback holds the cache
            log.warning("a prefix of %d tokens was not inserted: %s", len(tokens), text)

    def describe_mismatch(self, tokenizer: Any) -> str | None:
        """Describe where the last prompt diverged from the prefixes, or why there are none."""
        if (reason := self._model_keys.no_prefixes_reason) is not None:
            return f"prefixes are not cached for this model: {reason}"
        if (mismatch := self._mismatch) is None:
            return None
        cached = tokenizer.decode(list(mismatch.cached_tokens))
        prompt = tokenizer.decode(list(mismatch.prompt_tokens))
        position = f"{mismatch.position:,}"
        return f"prefix lost at token {position}: {cached!r} is cached, the prompt has {prompt!r}"
