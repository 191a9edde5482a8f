"""What a reader of one model by one spec sees of prefixes: it begins there, and lets others."""

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
from kvant.prefixes.threads import Daemons
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

EXACT_CHUNK = (
    512  # tokens that are read at once, and at whose multiples prefixes end that are exact
)
MAX_RESTORE_TRIES = 4  # prefixes of a store that are tried for a prompt, the longest first


class NamespaceKeys(NamedTuple):
    """Who computes rows, and how they are stored."""

    tree_key: bytes = b""  # the key before the first page, for one salt
    pools_key: bytes = b""  # the same for any
    metadata: Mapping[str, str] = {}  # for people


class PendingRestore(NamedTuple):
    """What a store had of a prompt."""

    keys: NamespaceKeys
    restored: RestoredPrefix
    num_cached: int  # so many of its tokens were in memory

    @property
    def restored_range(self) -> range:
        """The tokens that were not in memory."""
        return range(self.num_cached, len(self.restored.tokens))


class PrefixNamespace:
    """Prefixes of one model by one spec, for one reader."""

    def __init__(
        self,
        prefixes: Prefixes,
        model: PreTrainedModel,
        cache: TransformersCache,
        weights_check_interval: float = 0.0,
    ) -> None:
        """It looks at the model anew where it last did so `believed` seconds ago, or before."""
        self.prefixes = prefixes
        self.salt = ""  # of its reader, beside that of the owner
        self.mismatch: PrefixMismatch | None = None  # where the last prompt left what is kept
        self.refusal: str | None = None  # why nothing is kept of it, or was found
        self._model = ref(model)
        self._spec = cache.spec
        self._pages_suffice = pages_suffice(cache.spec)
        self._page_size = max(
            [PAGE_TOKENS, *(layer.page for layer in iterate_attention(*cache.spec.layers))]
        )
        self._has_recurrent = any(
            isinstance(part, RecurrentSpec) for part in _iterate_recipes(cache.spec)
        )
        self._branch_point = 0  # up to which the last prompt shared pages that served it nothing
        self._backend = str(cache.backend)
        if any(layer.is_opaque for layer in cache.layer_info):
            self.refusal = "transformers keeps some of its layers"
        elif not supports_chunked_prefill(model):
            self.refusal = "it does not go on from several tokens at once"
        self._is_unsupported = self.refusal is not None
        self._current_keys: NamespaceKeys | None = None
        self._weights_check_interval = weights_check_interval
        self._last_weights_check: tuple[float, NamespaceKeys | None] = (
            -math.inf,
            None,
        )  # when, and what was found

    @property
    def _keys(self) -> NamespaceKeys:
        """Who computed rows when the last prompt began; before the first, who does now."""
        if self._current_keys is None:
            self._current_keys = self._refresh_keys() or NamespaceKeys()
        return self._current_keys

    def fork(self, salt: str | None = None) -> PrefixNamespace:
        """The same for another reader, or for one who shares with those of a salt alone."""
        twin = PrefixNamespace.__new__(PrefixNamespace)
        twin.__dict__.update(self.__dict__)
        if salt is not None:
            twin.salt, twin._current_keys = salt, None
            twin.invalidate_weights_check()
        return twin

    def invalidate_weights_check(self) -> None:
        """Believe nothing of the model any more: it may have been changed."""
        self._last_weights_check = (-math.inf, None)

    def needs_shapes(self, memory: TransformersCache) -> bool:
        """Whether a token is to be read before `fetch` can compare what a store has."""
        if self.prefixes.prefix_store is None or memory.has_shapes or self._refresh_keys() is None:
            return False
        return self.pool_cache is None or not self.pool_cache.has_shapes

    def fetch_from_store(self, tokens: Sequence[int], base_cache: TransformersCache) -> range:
        """Bring what a store has of these tokens, if that is sooner than to read them.

        The tokens that came. A store that does not answer is waited for `STORE_TIMEOUT_S` at most.
        """
        try:
            names = None if self.prefixes.prefix_store is None else self._refresh_keys()
            if names is None:
                return range(0)
            held = max(
                base_cache.length, self.prefixes._count_cached_tokens(names.tree_key, tokens)
            )
            empty = (self.pool_cache or base_cache).fork()
            empty.reset()
            coming = self._seek_in_time(tokens, empty, held)
            if coming is not None:
                self.insert_restored(coming)
                return coming.restored_range
        except Exception as error:  # they can still be read
            told = repr(error)  # whoever keeps the error keeps caches
            log.warning("a store was not looked into: %s", told)
        return range(0)

    def _seek_in_time(
        self, tokens: Sequence[int], empty: TransformersCache, held: int
    ) -> PendingRestore | None:
        """Run `seek` in a thread of its own, for `STORE_TIMEOUT_S` at most."""
        until = time.monotonic() + STORE_TIMEOUT_S
        waiting, threads = (
            LookupDeadline(lambda: until - time.monotonic()),
            Daemons(1, "kvant-fetch"),
        )
        waiting.allocate(lambda: empty)
        coming = threads.submit(self.look_up_store, tokens, empty, held, waiting)
        threads.end()
        try:
            found = coming.result(STORE_TIMEOUT_S)
        except TimeoutError:
            log.warning("a store does not answer: a prompt of %d tokens is read", len(tokens))
            waiting.cancel()
            return None
        except BaseException:  # an interrupt, too
            waiting.cancel()
            raise
        waiting.release(empty)
        return found

    def look_up_store(
        self,
        tokens: Sequence[int],
        base_cache: TransformersCache,
        num_cached: int,
        deadline: LookupDeadline,
    ) -> PendingRestore | None:
        """What a store has of these tokens beyond those that are `held`, in the pools of a memory.

        That is empty, or has the first of them.
        """
        archive, model = self.prefixes.prefix_store, self._model()
        names = None if archive is None else self._refresh_keys()
        if (
            archive is None
            or model is None
            or names is None
            or deadline.compute_seconds_left() <= 0
        ):
            return None
        find = archive.find_hits(
            names.tree_key, tokens, base_cache.states, num_cached, pages_suffice=self._pages_suffice
        )
        for found in islice(find, MAX_RESTORE_TRIES):
            deadline.end_time, reading = (
                math.inf,
                self.estimate_prefill_seconds(found.length - num_cached),
            )
            if deadline.compute_seconds_left() <= 0 or not archive.restore_times.can_restore_within(
                found.length, reading
            ):
                return None
            deadline.end_time = time.monotonic() + reading
            restored = archive.restore(found, tokens, base_cache, model.device, deadline)
            if restored is None:
                continue
            if restored.cache.find_exact_rewind(len(tokens) - 1) > num_cached:
                return PendingRestore(names, restored, num_cached)
            restored.cache.clear()
        return None

    def insert_restored(self, restore: PendingRestore) -> None:
        """Keep what came from a store, for the prompt that is to begin."""
        restored = restore.restored
        self.prefixes._insert(restore.keys, restored.tokens, restored.cache, restored.num_prefilled)

    def reject(self, tokens: Sequence[int]) -> None:
        """Drop a prefix of a store with which the model failed."""
        log.warning("a prefix of %d tokens from a store is dropped: its model failed", len(tokens))
        self.prefixes._reject(self._keys.tree_key, tokens)

    def count_usable_tokens(
        self, keys: NamespaceKeys, restored: RestoredPrefix, max_tokens: int
    ) -> int:
        """So many tokens, not more than `most`, can be gone on from of what came from a store.

        None where they are another model's by now.
        """
        return (
            find_resumable_length(restored, max_tokens, self.chunk_alignment or 1)
            if keys == self._keys
            else 0
        )

    @property
    def has_unwritten(self) -> bool:
        """Is something kept in these pools that the store is yet to have?"""
        return self.prefixes._has_unwritten(self._keys.pools_key)

    def record_prefill_time(self, count: int, seconds: float) -> None:
        """So many tokens of a prompt were read in so long."""
        if count >= PAGE_TOKENS:  # fewer tell nothing of many
            self.prefixes._record_prefill_time(self._keys.pools_key, seconds / count)

    def estimate_prefill_seconds(self, count: int) -> float:
        """How long it takes to read so many tokens of a prompt; for ever, before that is known."""
        return self.prefixes._seconds_per_token.get(self._keys.pools_key, math.inf) * count

    def match_prefix(
        self, tokens: Sequence[int], base_cache: TransformersCache, num_prefilled: int
    ) -> tuple[TransformersCache, int]:
        """The memory to read these tokens with: the one given, or one that holds more of them.

        `prompt` of the tokens that it holds were read as prompts; so many are of what is returned.
        """
        before, exact = self._current_keys, self.prefixes.exact
        self.mismatch, self._branch_point = None, 0
        names = self._refresh_keys()
        if names is None:
            return base_cache, num_prefilled
        self._current_keys = names
        held = 0 if exact or names != (before or names) else base_cache.length
        match = self.prefixes._match_prefix(names.tree_key, tokens, held)
        self.mismatch = match.mismatch
        self._branch_point = match.num_shared if match.num_shared > max(match.length, held) else 0
        if match.entry is not None and match.length > held:
            found = match.entry.cache.fork()
            found.rewind(match.length)
            num_prefilled = min(match.entry.num_prefilled, match.length)
        elif held:
            return base_cache, num_prefilled
        else:
            home = self.pool_cache
            found, num_prefilled = base_cache if home is None else home.fork(), 0
            found.reset()
        found.backend = base_cache.backend
        return found, num_prefilled

    def record_lookup(self, num_prompt_tokens: int, num_cached: int) -> None:
        """Of a prompt of so many tokens, so many were there."""
        self.prefixes._record_lookup(num_prompt_tokens, num_cached)

    def reachable(self, cache: TransformersCache, to: int) -> int:
        """To where a memory may go back: others are to find in it what they would compute."""
        return cache.find_exact_rewind(to)

    @property
    def chunk_alignment(self) -> int | None:
        """Tokens at whose multiples prompts are to be cut; None: anywhere."""
        return EXACT_CHUNK if self.prefixes.exact else None

    def plan_checkpoints(
        self, tokens: Sequence[int], num_cached: int, branch_points: Sequence[int]
    ) -> list[int]:
        """The lengths at which to `keep` a prompt of these tokens as it is read, in order.

        `marks` are those at which others may begin to differ. Where pages are all that going on
        needs, no length is special. For a store the end of a short prompt is, too: who begins
        anew with it finds no page of the reply.
        """
        count = len(tokens)
        if self.refusal is not None:
            return []
        short = (
            self.prefixes.prefix_store is not None
            and (count - 1) % self._page_size * MIN_TAIL_DIVISOR > count
        )
        last = count if count % self._page_size else count - 1  # nobody goes back into a whole page
        ends = (
            short and self.chunk_alignment is None and not self._has_recurrent and last > num_cached
        )
        end = {last} if ends else set[int]()
        if self._pages_suffice:
            return sorted(end)
        found = {self._branch_point, (count - 1) // PAGE_TOKENS * PAGE_TOKENS, *branch_points}
        if count - num_cached > MIN_LONG_PROMPT:
            found |= set(
                range(CHECKPOINT_INTERVAL, count, CHECKPOINT_INTERVAL)[-MAX_INTERVAL_CHECKPOINTS:]
            )
        if self.chunk_alignment is not None:
            found = {stop // self.chunk_alignment * self.chunk_alignment for stop in found}
        return sorted({stop for stop in found if num_cached < stop < count} | end)

    def insert_prefix(
        self, tokens: Sequence[int], cache: TransformersCache, num_prefilled: int
    ) -> None:
        """Keep the memory of these tokens, if it is one that prefixes are of.

        Whoever was answered has the answer: where there is no memory to keep it, it is not kept.
        """
        if self.refusal is not None or not tokens or cache.length != len(tokens):
            return
        try:
            if cache.spec == self._spec and self._refresh_keys() == self._keys:
                self.prefixes._insert(self._keys, tokens, cache, num_prefilled)
        except (CacheError, MemoryError, RuntimeError, ValueError) as error:
            told = repr(error)  # whoever keeps the error keeps the memory
            log.warning("a prefix of %d tokens was not kept: %s", len(tokens), told)

    def describe_mismatch(self, tokenizer: Any) -> str | None:
        """Where the last prompt left what is kept, or why nothing is, in words."""
        if self.refusal is not None:
            return f"nothing is kept of this model: {self.refusal}"
        if self.mismatch is None:
            return None
        was, now = (
            tokenizer.decode(list(ids))
            for ids in (self.mismatch.cached_tokens, self.mismatch.prompt_tokens)
        )
        position = f"{self.mismatch.position:,}"
        return f"prefix lost at token {position}: {was!r} was there, {now!r} was asked for"

    # ---- what an engine asks besides

    @property
    def pool_cache(self) -> TransformersCache | None:
        """An empty cache over the pools in which prefixes lie, once there are any."""
        return self.prefixes._pool_caches.get(self._keys.pools_key)

    def measure(self) -> CacheUsage:
        """What all that is kept in these pools takes."""
        return self.prefixes._measure_pools(self._keys.pools_key)

    def evict(self, nbytes: int, *, include_unwritten: bool, include_used: bool) -> bool:
        """Free so many bytes in these pools, or all; did anything go?

        What a store is yet to have stays, unless it may be `unwritten`, and what somebody uses,
        unless it may be `used`.
        """
        return self.prefixes._evict_from(
            self._keys.pools_key,
            nbytes,
            include_unwritten=include_unwritten,
            include_used=include_used,
        )

    def _refresh_keys(self) -> NamespaceKeys | None:
        """Name the model as it is now, if it can be named."""
        since, found = self._last_weights_check
        if time.monotonic() - since >= self._weights_check_interval:
            since, found = time.monotonic(), self._make_keys()
            self._last_weights_check = since, found
        return found

    def _make_keys(self) -> NamespaceKeys | None:
        model = self._model()
        if self._is_unsupported or model is None:
            return None
        self.refusal = explain_no_fingerprint(model)
        if self.refusal is not None:
            return None
        home = make_root_key(model, self._spec)
        own = [
            self.prefixes.salt,
            _describe_rounding(model, self._backend) if self.prefixes.exact else "",
        ]
        own += [self.salt] if self.salt else []
        about = {"model": type(model).__name__, "spec": describe_spec(self._spec)}
        return NamespaceKeys(salt_key(home, *own), home, about)


def _describe_rounding(model: PreTrainedModel, backend: str) -> str:
    """What rounds otherwise, beside what computes other rows."""
    return f"{backend} {model.config._attn_implementation} {is_packed(model)}"


def _iterate_recipes(spec: CacheSpec) -> Iterator[Recipe]:
    """The recipes of all memories."""
    for recipe in spec.layers:
        if isinstance(recipe, GroupSpec):
            yield from (part for _, part in recipe.parts)
        else:
            yield recipe


def pages_suffice(spec: CacheSpec) -> bool:
    """Is a page boundary all that going on needs? No window, state, dense tail or open sinks."""
    if any(isinstance(part, RecurrentSpec) for part in _iterate_recipes(spec)):
        return False
    return all(
        not (layer.retention.window or layer.paging.tail or layer.dense_until)
        and not (layer.seals and layer.retention.sinks)
        for layer in iterate_attention(*spec.layers)
    )


def find_dense_prompt_layer(spec: CacheSpec) -> LayerSpec | None:
    """A layer whose prompt chunks see their own rows otherwise than later ones do."""
    layers = iterate_attention(*spec.layers)
    return next((layer for layer in layers if layer.seals and layer.prefill == "dense"), None)
