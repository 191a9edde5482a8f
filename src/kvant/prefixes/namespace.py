"""Open the prefixes of one model, spec and salt to one reader: a session or an engine.

A namespace identifies the model by a hash of its weights. It matches prompts, plans the lengths at
which to insert them, and restores them from a store.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from transformers import PreTrainedModel

from kvant.cache.usage import CacheUsage
from kvant.errors import CacheError
from kvant.hf import TransformersCache, supports_chunked_prefill
from kvant.prefixes.keys import PAGE_TOKENS, explain_no_fingerprint, make_root_key, salt_key
from kvant.prefixes.lookup_deadline import STORE_TIMEOUT_S, LookupDeadline
from kvant.prefixes.prefix_store import MIN_TAIL_DIVISOR, RestoredPrefix
from kvant.prefixes.threads import DaemonExecutor
from kvant.prefixes.tree import (
    CHECKPOINT_INTERVAL,
    MAX_INTERVAL_CHECKPOINTS,
    MIN_LONG_PROMPT,
    PrefixMismatch,
    find_resumable_length,
)
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, Recipe, RecurrentSpec, iterate_attention
from kvant.spec import describe_spec
from kvant.weights import is_packed

if TYPE_CHECKING:
    from kvant.prefixes.prefixes import Prefixes

log = logging.getLogger("kvant")

EXACT_CHUNK = 512  # tokens of a chunk with `exact`; exact prefixes end at multiples of it
MAX_RESTORE_TRIES = 4  # stored prefixes that are tried for a prompt, the longest first


class NamespaceKeys(NamedTuple):
    """Keys of the model, the spec and the salt."""

    tree_key: bytes = b""  # the root key with salts
    pools_key: bytes = b""  # the root key without salts
    metadata: Mapping[str, str] = {}  # for humans: model, spec


class PendingRestore(NamedTuple):
    """A restored prefix that is not adopted yet."""

    keys: NamespaceKeys
    restored: RestoredPrefix
    num_cached: int  # first tokens that were in memory already

    @property
    def restored_range(self) -> range:
        """The tokens that were not in memory."""
        return range(self.num_cached, len(self.restored.tokens))


class PrefixNamespace:
    """Prefixes of one model, spec and salt, for one reader."""

    def __init__(
        self,
        prefixes: Prefixes,
        model: PreTrainedModel,
        cache: TransformersCache,
        weights_check_interval: float = 0.0,
    ) -> None:
        """The weights are checked again after `weights_check_interval` seconds."""
        self.prefixes = prefixes
        self.salt = ""  # of the reader, in addition to that of `prefixes`
        self.mismatch: PrefixMismatch | None = None  # of the prompt that was matched last
        self.no_prefixes_reason: str | None = None  # why prefixes are not cached for this model
        self._model = ref(model)
        self._spec = cache.spec
        self._pages_suffice = pages_suffice(cache.spec)
        self._page_size = max(
            [PAGE_TOKENS, *(layer.page for layer in iterate_attention(*cache.spec.layers))]
        )
        self._has_recurrent = any(
            isinstance(part, RecurrentSpec) for part in _iterate_recipes(cache.spec)
        )
        # Where the last prompt left the cached pages, if no entry can be resumed there; else 0.
        self._branch_point = 0
        self._backend = str(cache.backend)
        if any(layer.is_opaque for layer in cache.layer_info):
            self.no_prefixes_reason = "transformers manages some of its layers"
        elif not supports_chunked_prefill(model):
            self.no_prefixes_reason = "it does not support chunked prefill"
        self._is_unsupported = self.no_prefixes_reason is not None
        self._matched_keys: NamespaceKeys | None = None
        self._weights_check_interval = weights_check_interval
        self._last_weights_check: tuple[float, NamespaceKeys | None] = (-math.inf, None)

    @property
    def _keys(self) -> NamespaceKeys:
        """The keys of the last match, even if the model changed since; before it, current ones."""
        if self._matched_keys is None:
            self._matched_keys = self._refresh_keys() or NamespaceKeys()
        return self._matched_keys

    def fork(self, salt: str | None = None) -> PrefixNamespace:
        """Return a copy for another reader; `salt` restricts it to that salt."""
        copy = PrefixNamespace.__new__(PrefixNamespace)
        copy.__dict__.update(self.__dict__)
        if salt is not None:
            copy.salt, copy._matched_keys = salt, None
            copy.invalidate_weights_check()
        return copy

    def invalidate_weights_check(self) -> None:
        """Check the weights again at the next use: the model may have been changed."""
        self._last_weights_check = (-math.inf, None)

    def needs_shapes(self, cache: TransformersCache) -> bool:
        """Return whether a token must be prefilled before blobs can be checked.

        The check compares shapes, which are unknown before the first forward.
        """
        if self.prefixes.prefix_store is None or cache.has_shapes or self._refresh_keys() is None:
            return False
        return self.pool_cache is None or not self.pool_cache.has_shapes

    def fetch_from_store(self, tokens: Sequence[int], base_cache: TransformersCache) -> range:
        """Restore what a store has of `tokens`, if that is faster than a prefill.

        Return the range of restored tokens. A store that does not answer costs `STORE_TIMEOUT_S`.
        """
        try:
            keys = None if self.prefixes.prefix_store is None else self._refresh_keys()
            if keys is None:
                return range(0)
            num_in_memory = self.prefixes._count_cached_tokens(keys.tree_key, tokens)
            num_cached = max(base_cache.length, num_in_memory)
            empty_cache = (self.pool_cache or base_cache).fork()
            empty_cache.reset()
            restore = self._look_up_with_timeout(tokens, empty_cache, num_cached)
            if restore is not None:
                self.insert_restored(restore)
                return restore.restored_range
        except Exception as error:  # the prompt can still be prefilled
            text = repr(error)  # a log handler may keep the error, whose traceback holds caches
            log.warning("a prompt was not looked up in a store: %s", text)
        return range(0)

    def _look_up_with_timeout(
        self, tokens: Sequence[int], empty_cache: TransformersCache, num_cached: int
    ) -> PendingRestore | None:
        """Run `look_up_store` in a thread of its own, for `STORE_TIMEOUT_S` at most."""
        end_time = time.monotonic() + STORE_TIMEOUT_S
        deadline = LookupDeadline(lambda: end_time - time.monotonic())
        executor = DaemonExecutor(1, "kvant-store-read")
        deadline.allocate(lambda: empty_cache)
        future = executor.submit(self.look_up_store, tokens, empty_cache, num_cached, deadline)
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

    def look_up_store(
        self,
        tokens: Sequence[int],
        base_cache: TransformersCache,
        num_cached: int,
        deadline: LookupDeadline,
    ) -> PendingRestore | None:
        """Restore tokens beyond `num_cached` from a store, into the pools of `base_cache`.

        `base_cache` is empty or has the first tokens. Return None if a prefill is expected to be
        faster, or nothing was restored.
        """
        store, model = self.prefixes.prefix_store, self._model()
        keys = None if store is None else self._refresh_keys()
        is_late = deadline.compute_seconds_left() <= 0
        if store is None or model is None or keys is None or is_late:
            return None
        hits = store.find_hits(
            keys.tree_key, tokens, base_cache.states, num_cached, pages_suffice=self._pages_suffice
        )
        for hit in islice(hits, MAX_RESTORE_TRIES):
            deadline.end_time = math.inf
            prefill_seconds = self.estimate_prefill_seconds(hit.length - num_cached)
            if deadline.compute_seconds_left() <= 0:
                return None
            if not store.restore_times.can_restore_within(hit.length, prefill_seconds):
                return None
            deadline.end_time = time.monotonic() + prefill_seconds
            restored = store.restore(hit, tokens, base_cache, model.device, deadline)
            if restored is None:
                continue
            if restored.cache.find_exact_rewind(len(tokens) - 1) > num_cached:
                return PendingRestore(keys, restored, num_cached)
            restored.cache.clear()
        return None

    def insert_restored(self, restore: PendingRestore) -> None:
        """Insert a restored prefix, for the prompt that is matched next."""
        restored = restore.restored
        self.prefixes._insert(restore.keys, restored.tokens, restored.cache, restored.num_prefilled)

    def reject(self, tokens: Sequence[int]) -> None:
        """Drop a restored prefix on which the model failed."""
        log.warning("dropping a restored prefix of %d tokens: the model failed on it", len(tokens))
        self.prefixes._reject(self._keys.tree_key, tokens)

    def count_usable_tokens(
        self, keys: NamespaceKeys, restored: RestoredPrefix, max_tokens: int
    ) -> int:
        """Return the longest usable restored length, at most `max_tokens`.

        Generation can continue from it. It is 0 if the model changed since the lookup.
        """
        if keys != self._keys:
            return 0
        return find_resumable_length(restored, max_tokens, self.chunk_alignment or 1)

    @property
    def has_unwritten(self) -> bool:
        """Whether prefixes in these pools have pending store writes."""
        return self.prefixes._has_unwritten(self._keys.pools_key)

    def record_prefill_time(self, count: int, seconds: float) -> None:
        """Record that `count` prompt tokens were prefilled in `seconds`."""
        if count >= PAGE_TOKENS:  # shorter chunks say little about long ones
            self.prefixes._record_prefill_time(self._keys.pools_key, seconds / count)

    def estimate_prefill_seconds(self, count: int) -> float:
        """Return the expected seconds of a prefill; infinity before the first measurement."""
        return self.prefixes._seconds_per_token.get(self._keys.pools_key, math.inf) * count

    def match_prefix(
        self, tokens: Sequence[int], base_cache: TransformersCache, num_prefilled: int
    ) -> tuple[TransformersCache, int]:
        """Return the cache to prefill these tokens with, and how many of its tokens were prefilled.

        It is `base_cache`, of which `num_prefilled` tokens were prefilled, or a fork of a prefix
        with more tokens.
        """
        last_keys, exact = self._matched_keys, self.prefixes.exact
        self.mismatch, self._branch_point = None, 0
        keys = self._refresh_keys()
        if keys is None:
            return base_cache, num_prefilled
        self._matched_keys = keys
        is_reusable = not exact and keys == (last_keys or keys)
        num_cached = base_cache.length if is_reusable else 0
        match = self.prefixes._match_prefix(keys.tree_key, tokens, num_cached)
        self.mismatch = match.mismatch
        served = max(match.length, num_cached)
        self._branch_point = match.num_shared if match.num_shared > served else 0
        if match.entry is not None and match.length > num_cached:
            cache = match.entry.cache.fork()
            cache.rewind(match.length)
            num_prefilled = min(match.entry.num_prefilled, match.length)
        elif num_cached:
            return base_cache, num_prefilled
        else:
            pool_cache = self.pool_cache
            cache = base_cache if pool_cache is None else pool_cache.fork()
            cache.reset()
            num_prefilled = 0
        cache.backend = base_cache.backend
        return cache, num_prefilled

    def record_lookup(self, num_prompt_tokens: int, num_cached: int) -> None:
        """Count prompt tokens, and those found in the cache."""
        self.prefixes._record_lookup(num_prompt_tokens, num_cached)

    def reachable(self, cache: TransformersCache, to: int) -> int:
        """Return the longest length <= `to` with an exact rewind: other readers need exact rows."""
        return cache.find_exact_rewind(to)

    @property
    def chunk_alignment(self) -> int | None:
        """The number of tokens at whose multiples prompt chunks must end; None: anywhere."""
        return EXACT_CHUNK if self.prefixes.exact else None

    def plan_checkpoints(
        self, tokens: Sequence[int], num_cached: int, branch_points: Sequence[int]
    ) -> list[int]:
        """Return the lengths at which to insert a prompt while it is prefilled, in order.

        `branch_points` are lengths at which other prompts may diverge. If pages suffice, a prompt
        can be resumed at every page. With a store, the end of the prompt is added if its partial
        last page is a large part of it. A new process can then restore it without the reply.
        """
        count = len(tokens)
        if self.no_prefixes_reason is not None:
            return []
        alignment = self.chunk_alignment
        has_long_tail = (count - 1) % self._page_size * MIN_TAIL_DIVISOR > count
        # A full last page could not be rewound by the token that each request prefills.
        end = count if count % self._page_size else count - 1
        has_tail_blob = self.prefixes.prefix_store is not None and has_long_tail
        can_end_anywhere = alignment is None and not self._has_recurrent
        ends = {end} if has_tail_blob and can_end_anywhere and end > num_cached else set[int]()
        if self._pages_suffice:
            return sorted(ends)
        points = {self._branch_point, (count - 1) // PAGE_TOKENS * PAGE_TOKENS, *branch_points}
        if count - num_cached > MIN_LONG_PROMPT:
            intervals = range(CHECKPOINT_INTERVAL, count, CHECKPOINT_INTERVAL)
            points |= set(intervals[-MAX_INTERVAL_CHECKPOINTS:])
        if alignment is not None:
            points = {point // alignment * alignment for point in points}
        return sorted({point for point in points if num_cached < point < count} | ends)

    def insert_prefix(
        self, tokens: Sequence[int], cache: TransformersCache, num_prefilled: int
    ) -> None:
        """Insert the cache of these tokens, if its model can have prefixes.

        An error is logged, not raised: the request has its reply already.
        """
        if self.no_prefixes_reason is not None or not tokens or cache.length != len(tokens):
            return
        try:
            if cache.spec == self._spec and self._refresh_keys() == self._keys:
                self.prefixes._insert(self._keys, tokens, cache, num_prefilled)
        except (CacheError, MemoryError, RuntimeError, ValueError) as error:
            text = repr(error)  # a log handler may keep the error, whose traceback holds the cache
            log.warning("a prefix of %d tokens was not inserted: %s", len(tokens), text)

    def describe_mismatch(self, tokenizer: Any) -> str | None:
        """Describe where the last prompt diverged from the prefixes, or why there are none."""
        if self.no_prefixes_reason is not None:
            return f"prefixes are not cached for this model: {self.no_prefixes_reason}"
        if self.mismatch is None:
            return None
        cached = tokenizer.decode(list(self.mismatch.cached_tokens))
        prompt = tokenizer.decode(list(self.mismatch.prompt_tokens))
        position = f"{self.mismatch.position:,}"
        return f"prefix lost at token {position}: {cached!r} is cached, the prompt has {prompt!r}"

    # ---- for engines

    @property
    def pool_cache(self) -> TransformersCache | None:
        """An empty cache over the pools of the prefixes; None before the first insert."""
        return self.prefixes._pool_caches.get(self._keys.pools_key)

    def measure(self) -> CacheUsage:
        """Measure the memory of all prefixes in these pools."""
        return self.prefixes._measure_pools(self._keys.pools_key)

    def evict(self, nbytes: int, *, include_unwritten: bool, include_used: bool) -> bool:
        """Evict prefixes until `nbytes` are freed or none is left; return whether any was evicted.

        Those with pending store writes are evicted only with `include_unwritten`, and those that
        requests use only with `include_used`.
        """
        return self.prefixes._evict_from(
            self._keys.pools_key,
            nbytes,
            include_unwritten=include_unwritten,
            include_used=include_used,
        )

    def _refresh_keys(self) -> NamespaceKeys | None:
        """Return the keys of the model; None if it cannot be keyed."""
        checked_at, keys = self._last_weights_check
        if time.monotonic() - checked_at >= self._weights_check_interval:
            checked_at, keys = time.monotonic(), self._make_keys()
            self._last_weights_check = checked_at, keys
        return keys

    def _make_keys(self) -> NamespaceKeys | None:
        model = self._model()
        if self._is_unsupported or model is None:
            return None
        self.no_prefixes_reason = explain_no_fingerprint(model)
        if self.no_prefixes_reason is not None:
            return None
        root_key = make_root_key(model, self._spec)
        rounding = _describe_rounding(model, self._backend) if self.prefixes.exact else ""
        salts = [self.prefixes.salt, rounding]
        salts += [self.salt] if self.salt else []
        metadata = {"model": type(model).__name__, "spec": describe_spec(self._spec)}
        return NamespaceKeys(salt_key(root_key, *salts), root_key, metadata)


def _describe_rounding(model: PreTrainedModel, backend: str) -> str:
    """Describe the settings that change only how rows are rounded: kernels and packed weights."""
    return f"{backend} {model.config._attn_implementation} {is_packed(model)}"


def _iterate_recipes(spec: CacheSpec) -> Iterator[Recipe]:
    """Yield the recipes of all layers, groups expanded."""
    for recipe in spec.layers:
        if isinstance(recipe, GroupSpec):
            yield from (part for _, part in recipe.parts)
        else:
            yield recipe


def pages_suffice(spec: CacheSpec) -> bool:
    """Return whether full pages are enough to resume a prefix.

    They are not if a layer has a window, a recurrent state, dense rows after the sealed ones, or
    sinks in open pages.
    """
    if any(isinstance(part, RecurrentSpec) for part in _iterate_recipes(spec)):
        return False
    return all(
        not (layer.retention.window or layer.paging.tail or layer.dense_until)
        and not (layer.seals and layer.retention.sinks)
        for layer in iterate_attention(*spec.layers)
    )


def find_dense_prompt_layer(spec: CacheSpec) -> LayerSpec | None:
    """Return a layer whose prefill chunks read their own rows before they are quantized."""
    layers = iterate_attention(*spec.layers)
    return next((layer for layer in layers if layer.seals and layer.prefill == "dense"), None)
