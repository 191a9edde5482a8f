"""Give one reader (a session or an engine) the prefixes of one model, spec and salt.

A namespace identifies the model by a hash of its weights. It matches prompts, chooses at which
lengths of a prompt to cache a prefix, and restores prefixes from a store.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

from transformers import PreTrainedModel

from kvant.cache.layout import iterate_leaves
from kvant.errors import CacheError
from kvant.hf import TransformersCache
from kvant.prefixes.keys import PAGE_TOKENS, ModelKeys, NamespaceKeys
from kvant.prefixes.memory import PrefixMemory, PrefixPools
from kvant.prefixes.prefix_store import MIN_TAIL_DIVISOR, CachedPrefix, PrefixStore, pages_suffice
from kvant.prefixes.restore import STORE_TIMEOUT_S, LookupDeadline, start_daemon
from kvant.prefixes.tree import (
    PrefixesUnsupported,
    PrefixMismatch,
    PrefixMiss,
    find_resumable_length,
)
from kvant.recipes import LayerSpec
from kvant.vision import NO_FEATURES, ImageFeatures

log = logging.getLogger("kvant")

MAX_RESTORE_TRIES = 4  # stored prefixes that are tried for a prompt, the longest first
CHECKPOINT_INTERVAL = 2048  # tokens between checkpoints of a long prompt
MIN_LONG_PROMPT = 4096  # a prompt with more tokens to prefill is long
MAX_INTERVAL_CHECKPOINTS = 4  # a long prompt gets at most this many of them: the last ones


class PendingRestore(NamedTuple):
    """A restored prefix that no request or tree has taken over yet."""

    keys: NamespaceKeys
    restored: CachedPrefix
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
        model, keys = self.model_keys.model(), self.model_keys.refresh()
        if model is None or keys is None or deadline.compute_seconds_left() <= 0:
            return None
        pools = self.memory.get_pools(keys.pools_key)
        hits = self.store.find_hits(keys.tree_key, tokens, base_cache, num_cached)
        for hit in islice(hits, MAX_RESTORE_TRIES):
            deadline.end_time = math.inf
            prefill_seconds = pools.estimate_prefill_seconds(hit.length - num_cached)
            if deadline.compute_seconds_left() <= 0:
                return None
            if not self.store.restore_times.can_restore_within(hit.length, prefill_seconds):
                return None
            deadline.end_time = time.monotonic() + prefill_seconds
            restored = self.store.restore(hit, base_cache, model.device, deadline)
            if restored is None:
                continue
            if restored.cache.find_exact_rewind(len(tokens) - 1) > num_cached:
                return PendingRestore(keys, restored, num_cached)
            restored.cache.clear()
        return None


class PrefixNamespace:
    """Prefixes of one model, adapter, spec and salt, for one reader."""

    def __init__(
        self,
        memory: PrefixMemory,
        model: PreTrainedModel,
        cache: TransformersCache,
        salt: str,
        weights_check_interval: float,
    ) -> None:
        """The weights are checked again after `weights_check_interval` seconds."""
        self.memory = memory
        # Prompt chunks must end at multiples of this number of tokens; None: anywhere.
        self.chunk_alignment = memory.alignment
        exact = memory.alignment is not None
        self._model_keys = ModelKeys(model, cache, (salt,), weights_check_interval, exact=exact)
        self._matched_keys: NamespaceKeys | None = None
        self._mismatch: PrefixMismatch | None = None  # of the prompt that was matched last
        # Where the last prompt left the tree, if that is beyond the tokens it could reuse; else 0.
        self._branch_point = 0

    @property
    def _keys(self) -> NamespaceKeys:
        """Keys of the last match, even if the model changed since.

        Before any match, the keys of the model as it was when this was first read.
        """
        if self._matched_keys is None:
            self._matched_keys = self._model_keys.refresh() or NamespaceKeys()
        return self._matched_keys

    @property
    def pools(self) -> PrefixPools:
        """The pools of this model and spec, which all salts and adapters share."""
        return self.memory.get_pools(self._keys.pools_key)

    @property
    def has_keys(self) -> bool:
        """Whether prefixes of the model could be cached at the last match."""
        return bool(self._keys.tree_key)

    def fork(self, salt: str | None = None, adapter_key: str | None = None) -> PrefixNamespace:
        """Return a copy for another reader, with another salt or adapter unless it is None."""
        fork = copy.copy(self)
        fork._model_keys = self._model_keys.fork(salt, adapter_key)
        if (salt, adapter_key) != (None, None):
            fork._matched_keys = None
        return fork

    def invalidate_weights_check(self) -> None:
        """Check the weights again at the next use: the model may have been changed."""
        self._model_keys.invalidate()

    # ---- from a store

    def needs_shapes(self, cache: TransformersCache) -> bool:
        """Return whether a token must be prefilled before blobs can be checked.

        The check compares shapes, which are unknown before the first forward.
        """
        has_store = self.memory.prefix_store is not None
        if not has_store or cache.has_shapes or self._model_keys.refresh() is None:
            return False
        return self.pools.cache is None or not self.pools.cache.has_shapes

    def open_store_lookup(self) -> StoreLookup | None:
        """Return a lookup that may run in another thread; None without a store."""
        store = self.memory.prefix_store
        return None if store is None else StoreLookup(store, self.memory, self._model_keys.fork())

    def fetch_from_store(self, tokens: Sequence[int], base_cache: TransformersCache) -> range:
        """Restore what a store has of `tokens`, if that is faster than a prefill.

        Return the range of restored tokens. The lookup runs in a thread of its own: a store that
        does not answer costs `STORE_TIMEOUT_S`.
        """
        end_time = time.monotonic() + STORE_TIMEOUT_S
        deadline = LookupDeadline(lambda: end_time - time.monotonic())
        try:
            keys = None if self.memory.prefix_store is None else self._model_keys.refresh()
            lookup = self.open_store_lookup()
            if keys is None or lookup is None:
                return range(0)
            match = self.memory.get_pools(keys.pools_key).match_prefix(keys.tree_key, tokens)
            num_cached = max(base_cache.length, match.length)
            empty_cache = (self.pools.cache or base_cache).fork()
            empty_cache.reset()
            deadline.allocate(lambda: empty_cache)
            run = partial(lookup.run, tokens, empty_cache, num_cached, deadline)
            restore = start_daemon(run, "kvant-store-read").result(STORE_TIMEOUT_S)
            if restore is not None:
                self.insert_restored(restore)
                return restore.restored_range
        except TimeoutError:
            log.warning("a store does not answer: prefilling %d tokens", len(tokens))
        except Exception as error:  # the prompt can still be prefilled
            text = repr(error)  # a log handler may keep the error, whose traceback holds caches
            log.warning("a prompt was not looked up in a store: %s", text)
        finally:
            deadline.cancel()  # frees the memory of the lookup, also after an interrupt
        return range(0)

    def insert_restored(self, restore: PendingRestore) -> None:
        """Insert a restored prefix, so that the next match of its prompt finds it."""
        self.memory.insert(restore.keys, restore.restored)

    def count_usable_tokens(self, restore: PendingRestore, max_tokens: int) -> int:
        """Return the longest restored length <= `max_tokens` from which generation can continue.

        It is 0 if the lookup and the last match had different keys: the model changed in between.
        """
        if restore.keys != self._keys:
            return 0
        return find_resumable_length(restore.restored, max_tokens, self.chunk_alignment)

    def reject(self, tokens: Sequence[int]) -> None:
        """Drop a restored prefix on which the model failed."""
        log.warning("dropping a restored prefix of %d tokens: the model failed on it", len(tokens))
        self.memory.reject(self._keys, tokens)

    # ---- in memory

    def match_prefix(
        self, tokens: Sequence[int], base_cache: TransformersCache, num_prefilled: int
    ) -> tuple[TransformersCache, int]:
        """Return the cache to prefill these tokens with, and how many of its tokens were prefilled.

        Its other tokens were decoded. The cache is a fork of a cached prefix if that has more of
        the tokens than `base_cache`. Otherwise it is `base_cache`, or an empty cache if no tokens
        can be reused. Tokens of `base_cache` are not reused if there is a `chunk_alignment`, or
        if the model changed. The argument `num_prefilled` counts those of `base_cache` that were
        prefilled.
        """
        last_keys = self._matched_keys
        self._mismatch, self._branch_point = None, 0
        keys = self._model_keys.refresh()
        if keys is None:
            return base_cache, num_prefilled
        self._matched_keys = keys
        is_reusable = self.chunk_alignment is None and keys == (last_keys or keys)
        num_cached = base_cache.length if is_reusable else 0
        match = self.pools.match_prefix(keys.tree_key, tokens)
        self._mismatch = match.mismatch
        served = max(match.length, num_cached)
        self._branch_point = match.num_shared if match.num_shared > served else 0
        if match.entry is not None and match.length > num_cached:
            match.entry.record_use()
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
        """Return the lengths of the prefixes to insert while a prompt is prefilled, in order.

        If pages suffice, a prompt can be resumed at every page. Otherwise, prefixes end at the
        branch point of the last match, at the last whole page, at intervals of a long prompt, and
        at `branch_points`: lengths at which other prompts may diverge.

        With a store, also insert the whole prompt if its partial last page has more than
        1 / `MIN_TAIL_DIVISOR` of its tokens. That page is then stored without tokens of the reply,
        and another process can restore it for the same prompt.
        """
        if self._model_keys.no_prefixes_reason is not None:
            return []
        count, spec, alignment = len(tokens), self._model_keys.spec, self.chunk_alignment
        points = set[int]()
        if not pages_suffice(spec):
            points = {self._branch_point, (count - 1) // PAGE_TOKENS * PAGE_TOKENS, *branch_points}
            if count - num_cached > MIN_LONG_PROMPT:
                intervals = range(CHECKPOINT_INTERVAL, count, CHECKPOINT_INTERVAL)
                points |= set(intervals[-MAX_INTERVAL_CHECKPOINTS:])
            if alignment is not None:
                points = {point // alignment * alignment for point in points}
        checkpoints = {point for point in points if num_cached < point < count}
        recipes = [recipe for _, recipe in iterate_leaves(spec)]
        page_sizes = [recipe.page for recipe in recipes if isinstance(recipe, LayerSpec)]
        has_recurrent = len(page_sizes) < len(recipes)
        if self.memory.prefix_store is not None and alignment is None and not has_recurrent:
            page_size = max([PAGE_TOKENS, *page_sizes])
            # A request always prefills its last token, so the same prompt rewinds this prefix by
            # one token. A full last page may be sealed (quantized) already, and cannot be rewound
            # then: insert the prefix one token earlier.
            end = count if count % page_size else count - 1
            if end > num_cached and (count - 1) % page_size * MIN_TAIL_DIVISOR > count:
                checkpoints.add(end)
        return sorted(checkpoints)

    def insert_prefix(
        self,
        tokens: Sequence[int],
        cache: TransformersCache,
        num_prefilled: int,
        features: Mapping[bytes, ImageFeatures] = NO_FEATURES,
    ) -> None:
        """Insert the cache of these tokens, if its model can have prefixes and did not change.

        The `features` of its images are kept with it. An error is logged, not raised: the request
        does not depend on the insert.
        """
        model_keys = self._model_keys
        if model_keys.no_prefixes_reason is not None or not tokens or cache.length != len(tokens):
            return
        try:
            if cache.spec == model_keys.spec and model_keys.refresh() == self._keys:
                prefix = CachedPrefix(tuple(tokens), cache, num_prefilled, features)
                self.memory.insert(self._keys, prefix)
        except (CacheError, MemoryError, RuntimeError, ValueError) as error:
            text = repr(error)  # a log handler may keep the error, whose traceback holds the cache
            log.warning("a prefix of %d tokens was not inserted: %s", len(tokens), text)

    @property
    def last_miss(self) -> PrefixMiss | None:
        """Where the last prompt diverged from the prefixes, or why there are none."""
        reason = self._model_keys.no_prefixes_reason
        return self._mismatch if reason is None else PrefixesUnsupported(reason)
