"""Run the sequences of one model over shared pools: prefill in chunks, decode in one batch.

Decoding sequences are merged under one cache (`kvant.merge`). Every other sequence has its own
cache over the same pools. When a sequence joins or leaves the batch, only page tables change; no
page is copied. If the model's attention does not support different lengths, each sequence is
decoded alone.

On a GPU, a decode replays a graph. Graphs are captured for some batch sizes; other batches are
padded with idle sequences of a few meaningless tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvant.cache import merge
from kvant.cache.files import save
from kvant.cache.usage import CacheUsage, measure_pools
from kvant.engine.memory import MAX_IDLE_TOKENS
from kvant.errors import UnsupportedView
from kvant.generation import TransformersDecoder
from kvant.hf import SupportLevel, TransformersCache, load_cache
from kvant.page_table import LayerGroup
from kvant.prefixes import LookupDeadline, PendingRestore, Prefixes, PrefixNamespace
from kvant.prefixes.memory import EvictionRules
from kvant.recipes import CacheSpec
from kvant.replay import ReplayBuffers, Replayer

log = logging.getLogger("kvant")

WEIGHTS_CHECK_INTERVAL_S = 1.0  # checking all weights takes as long as a decode, or longer


@dataclass(eq=False)
class EngineSequence:
    """A sequence: its tokens, and its cache while it is not in the batch."""

    tokens: list[int]  # the caller appends a token before each decode
    num_prefilled: int = 0  # first tokens that were prefilled, not decoded
    cache: TransformersCache | None = field(default=None, repr=False)
    swap_file: Path | None = None  # holds its pages while it is swapped out
    salt: str = ""  # prefixes are shared among equal salts
    namespace: PrefixNamespace | None = field(default=None, repr=False)  # of its salt, once needed


class Batch:
    """The caches of all sequences that one model serves."""

    def __init__(
        self,
        decoder: TransformersDecoder,
        empty_cache: TransformersCache,
        backend: str | None = None,
    ) -> None:
        self.decoder = decoder
        # Whether sequences of different lengths decode in one batch; else one by one.
        self.ragged = decoder.support.level >= SupportLevel.RAGGED_BATCH
        self._empty_cache = empty_cache  # never has tokens; all others share its pools
        self._empty_cache.backend = backend
        self._empty_cache.ensure_slack(1)  # a failed forward is rewound by one token
        self._namespace: PrefixNamespace | None = None  # of requests without a salt
        # The sequences of a salt own its namespace; it ends with the last one.
        self._salted_namespaces: WeakValueDictionary[str, PrefixNamespace] = WeakValueDictionary()
        self._sequences: list[EngineSequence] = []  # the batch, in the order of its cache
        self._batch_cache: TransformersCache | None = None
        self._replayers: dict[int, Replayer] = {}  # by batch size
        self._replay_buffers = ReplayBuffers()  # shared by the replayers
        self._idle_sequences: list[EngineSequence] = []  # padding of the batch
        self._idle_template: EngineSequence | None = None  # forked for each idle sequence

    @property
    def spec(self) -> CacheSpec:
        return self._empty_cache.spec

    def attach_prefixes(self, prefixes: Prefixes) -> None:
        """Match prompts with `prefixes` and insert into them from now on."""
        self._namespace = prefixes.open_namespace(
            self.decoder.model, self._empty_cache, WEIGHTS_CHECK_INTERVAL_S
        )
        if (pool_cache := self._namespace.pools.cache) is not None:
            pool_cache = pool_cache.fork()
            pool_cache.backend = self._empty_cache.backend
            self._empty_cache = pool_cache

    def invalidate_weights_check(self) -> None:
        """Check the weights again before the next use of a prefix."""
        for namespace in filter(None, (self._namespace, *self._salted_namespaces.values())):
            namespace.invalidate_weights_check()

    @property
    def has_unwritten_prefixes(self) -> bool:
        """Whether prefixes have pending store writes."""
        return self._namespace is not None and self._namespace.pools.has_unwritten

    def flush_store(self, seconds: float) -> None:
        """Wait `seconds` at most for pending store writes; for any thread."""
        if self._namespace is not None and self._namespace.memory.prefix_store is not None:
            self._namespace.memory.prefix_store.flush(seconds)

    def prepare_store_lookup(
        self, sequence: EngineSequence, deadline: LookupDeadline
    ) -> Callable[[], PendingRestore | None]:
        """Return a function that looks up a prompt in a store, to be called in another thread."""
        namespace = self._find_namespace(sequence)
        lookup = None if namespace is None else namespace.open_store_lookup()
        assert lookup is not None
        # Stores are untrusted: the shapes of blobs are compared with those of a one-token forward.
        if not self._empty_cache.has_shapes:
            self.prefill(EngineSequence(sequence.tokens[:1]), 1)
        base_cache = (sequence.cache or self._empty_cache).fork()
        tokens, num_cached = list(sequence.tokens), base_cache.length
        deadline.allocate(lambda: base_cache)

        def look_up() -> PendingRestore | None:
            try:
                return lookup.run(tokens, base_cache, num_cached, deadline)
            finally:
                deadline.release(base_cache)  # at once: its pages may be needed

        return look_up

    def adopt_restore(
        self, sequence: EngineSequence, restore: PendingRestore, *, insert: bool
    ) -> int:
        """Continue a prompt from restored tokens; return how many tokens are in memory now.

        With `insert`, other requests may use them, too.
        """
        namespace, num_before = self._find_namespace(sequence), self.count_tokens(sequence)
        assert namespace is not None
        restored = restore.restored
        length = namespace.count_usable_tokens(restore, len(sequence.tokens) - 1)
        if length <= num_before:
            return num_before
        if sequence.cache is not None:
            cache = sequence.cache.import_sequence(restored.cache)
        else:
            imported = restored.cache
            cache = self._empty_cache.merge_with([imported]) if self._has_pools else imported.fork()
        sequence.cache = None  # frees pages before the rewind below may need one
        restored.cache.clear()
        self._share_pools(cache)
        if insert:
            namespace.insert_restored(restore._replace(restored=replace(restored, cache=cache)))
            cache = cache.fork()
        cache.rewind(length)
        num_prefilled = restored.num_prefilled
        if sequence.num_prefilled != num_before:  # some of those tokens were decoded
            num_prefilled = min(num_prefilled, sequence.num_prefilled)
        sequence.cache, sequence.num_prefilled = cache, min(num_prefilled, length)
        return length

    def count_tokens(self, sequence: EngineSequence) -> int:
        """Return how many tokens of a sequence are cached."""
        if sequence in self._sequences and self._batch_cache is not None:
            return self._batch_cache.states.lengths[self._sequences.index(sequence)]
        return 0 if sequence.cache is None else sequence.cache.length

    def record_prefill_time(self, count: int, seconds: float) -> None:
        """Record that `count` prompt tokens were prefilled in `seconds`."""
        if self._namespace is not None:
            self._namespace.pools.record_prefill_time(count, seconds)

    def estimate_prefill_seconds(self, count: int) -> float:
        """Return the expected seconds of a prefill; infinity before the first measurement."""
        if self._namespace is None:
            return math.inf
        return self._namespace.pools.estimate_prefill_seconds(count)

    def match_prefix(
        self, sequence: EngineSequence, branch_points: Sequence[int]
    ) -> tuple[int, tuple[int, ...]]:
        """Return how many tokens of a prompt are cached, and where later chunks must end."""
        namespace = self._find_namespace(sequence)
        if namespace is None:
            return 0, ()
        cache, num_prefilled = namespace.match_prefix(sequence.tokens, self._empty_cache.fork(), 0)
        length = self.count_tokens(sequence)
        if cache.length > length:  # it may be in other pools than ours
            sequence.cache = self._empty_cache.merge_with([cache]) if self._has_pools else cache
            sequence.num_prefilled, length = num_prefilled, cache.length
            self._share_pools(cache)
        checkpoints = namespace.plan_checkpoints(sequence.tokens, length, branch_points)
        return length, tuple(checkpoints)

    def record_lookup(self, num_prompt_tokens: int, num_cached: int) -> None:
        """Count prompt tokens, and those found in the cache."""
        if self._namespace is not None:
            self._namespace.memory.record_lookup(num_prompt_tokens, num_cached)

    def insert_prefix(self, sequence: EngineSequence) -> None:
        """Insert the tokens of a sequence into the prefixes, if it has any."""
        (cache, index), namespace = self._locate(sequence), self._find_namespace(sequence)
        if namespace is None or cache is None:
            return
        single = cache if sequence.cache is not None else cache.extract(index)
        namespace.insert_prefix(sequence.tokens[: single.length], single, sequence.num_prefilled)

    def reject(self, sequence: EngineSequence, count: int) -> None:
        """Drop the first `count` tokens of a sequence from prefixes: the model failed on them."""
        if (namespace := self._find_namespace(sequence)) is not None:
            namespace.reject(sequence.tokens[:count])

    def evict_prefixes(
        self, nbytes: int, *, include_unwritten: bool = False, include_used: bool = False
    ) -> bool:
        """Evict prefixes until `nbytes` are freed or none is left; return whether any was evicted.

        Prefixes in use, and those with pending store writes, are evicted only if included.
        """
        if self._namespace is None:
            return False
        rules = EvictionRules(include_unwritten, include_used)
        namespace = self._namespace
        return namespace.memory.evict(nbytes, namespace.pools, rules).num_entries > 0

    def measure_prefixes(self) -> CacheUsage | None:
        """Measure the memory of prefixes; None if prefixes are off."""
        return None if self._namespace is None else self._namespace.pools.measure()

    def count_shared_pages(
        self, sequence: EngineSequence, length: int, usage: CacheUsage
    ) -> dict[LayerGroup, tuple[int, int]]:
        """Count the (open, sealed) pages of the first `length` tokens that prefixes also hold."""
        cache, index = self._locate(sequence)
        return {} if cache is None else usage.count_shared_pages(cache.states, index, length)

    def describe_mismatch(self, sequence: EngineSequence, tokenizer: Any) -> str | None:
        """Describe where the last matched prompt diverged from the prefixes."""
        namespace = self._find_namespace(sequence)
        return None if namespace is None else namespace.describe_mismatch(tokenizer)

    def stats(self, sequences: Sequence[EngineSequence]) -> dict[str, int]:
        """Return the bytes of the pools, and of the recurrent states of `sequences`."""
        pools, nbytes_states = measure_pools(self._empty_cache.states), 0
        # Without such states, make no references to caches: they would delay freeing.
        if self._empty_cache.states.holder.external_states:
            caches = {self._batch_cache, *(sequence.cache for sequence in sequences)}
            nbytes_states = sum(
                state.nbytes
                for cache in caches
                if cache is not None
                for state in cache.states.holder.external_states.values()
            )
        return pools | {"nbytes_states": nbytes_states}

    def prefill(self, sequence: EngineSequence, count: int) -> Tensor:
        """Prefill `count` tokens of a prompt; return the logits [vocabulary] of the last one."""
        cache = self._empty_cache.fork() if sequence.cache is None else sequence.cache
        begin = cache.length
        with cache.prompt_mode():
            logits = self.decoder.compute_logits(sequence.tokens[begin : begin + count], cache)[-1]
        cache.states.holder.free_retired_pages()
        sequence.cache = cache
        if sequence.num_prefilled == begin:
            sequence.num_prefilled += count
        self._share_pools(cache)
        return logits

    def decode(self, sequences: Sequence[EngineSequence]) -> tuple[Tensor, dict[int, Exception]]:
        """Return the logits of the newest tokens, and errors by index of `sequences`.

        Failed sequences have no row. If the whole batch fails, no sequence has changed, and each is
        tried alone.
        """
        if self.ragged and len(sequences) > 1:
            try:
                return self._decode_batch(sequences), {}
            except UnsupportedView as error:
                self._disable_batching(error)
            except Exception as error:
                text = repr(error)  # a log handler may store the error, and with it our caches
                log.warning("batch of %d sequences failed: %s: one by one", len(sequences), text)
        rows, errors = list[Tensor](), dict[int, Exception]()
        for index, sequence in enumerate(sequences):
            try:
                rows.append(self._decode_single(sequence))
            except Exception as error:
                errors[index] = error
        return torch.cat(rows) if rows else torch.empty(0), errors

    def fork(self, sequence: EngineSequence) -> EngineSequence:
        """Return a copy of a sequence that shares its pages."""
        assert sequence.cache is not None
        sequence.cache.prune()  # before the fork, so that both share the kept rows
        return replace(sequence, tokens=list(sequence.tokens), cache=sequence.cache.fork())

    def release(self, sequence: EngineSequence) -> None:
        """Free the pages and the swap file of a sequence."""
        if sequence in self._sequences:
            self._select([other for other in self._sequences if other is not sequence])
        sequence.cache = None
        if sequence.swap_file is not None:
            sequence.swap_file.unlink(missing_ok=True)
            sequence.swap_file = None

    def swap_out(self, sequence: EngineSequence, path: Path) -> None:
        """Write the pages of a sequence to a file, if it has any, and free them."""
        self._extract([sequence])
        if sequence.cache is not None:
            sequence.swap_file = path
            save(sequence.cache, path)
            sequence.cache = None

    def swap_in(self, sequence: EngineSequence) -> None:
        """Read the pages of a swapped-out sequence back, if it had any."""
        if sequence.swap_file is not None:
            cache = load_cache(sequence.swap_file, self.decoder.model)
            sequence.swap_file.unlink()
            sequence.swap_file = None
            cache.backend = self._empty_cache.backend
            sequence.cache = self._empty_cache.merge_with([cache]) if self._has_pools else cache
            self._share_pools(sequence.cache)

    def clear(self) -> None:
        """Free all memory but that of prefixes; no sequence is left."""
        self._sequences, self._batch_cache = [], None
        self._idle_sequences, self._idle_template = [], None
        self._replayers.clear()
        self._replay_buffers = ReplayBuffers()
        self._empty_cache.clear()

    def check(self) -> None:
        """Check that the reference counts of all slots are right."""
        self._empty_cache.states.check()

    # ---- internals

    @property
    def _has_pools(self) -> bool:
        """Whether pools exist; page sizes are known only once rows were stored."""
        return bool(self._empty_cache.states.state.storages)

    def _find_namespace(self, sequence: EngineSequence) -> PrefixNamespace | None:
        """Return the namespace of a sequence's salt; None if prefixes are off."""
        if self._namespace is None or not sequence.salt:
            return self._namespace
        if sequence.namespace is None:
            namespace = self._salted_namespaces.get(sequence.salt)
            if namespace is None:
                namespace = self._namespace.fork(sequence.salt)
            sequence.namespace = namespace
            self._salted_namespaces[sequence.salt] = sequence.namespace
        return sequence.namespace

    def _locate(self, sequence: EngineSequence) -> tuple[TransformersCache | None, int]:
        """Return the cache of a sequence and its index there."""
        if sequence in self._sequences:
            return self._batch_cache, self._sequences.index(sequence)
        return sequence.cache, 0

    def _share_pools(self, cache: TransformersCache) -> None:
        """Use the pools of `cache` for all sequences, if there are none yet."""
        if not self._has_pools:
            self._empty_cache = cache.fork()
            self._empty_cache.reset()

    def _decode_batch(self, sequences: Sequence[EngineSequence]) -> Tensor:
        """Decode all sequences in one forward."""
        size = len(sequences)
        self._resize_idle(pad_batch_size(size) - size if self._uses_graphs else 0)
        cache = self._merge_batch([*sequences, *self._idle_sequences])
        for idle in self._idle_sequences:
            idle.tokens.append(0)
        try:
            logits = self._forward(self._sequences, cache)
        except BaseException:
            self._resize_idle(0)
            raise
        order = [self._sequences.index(sequence) for sequence in sequences]
        return logits if order == list(range(len(logits))) else logits[order]

    def _decode_single(self, sequence: EngineSequence) -> Tensor:
        self._extract([sequence])
        assert sequence.cache is not None
        return self._forward([sequence], sequence.cache)

    def _forward(self, sequences: Sequence[EngineSequence], cache: TransformersCache) -> Tensor:
        """Run the newest token of each sequence; the cache has all tokens before it."""
        replayer = self._replayers.get(len(sequences)) or self.decoder.make_replayer(
            self._replay_buffers
        )
        if replayer is not None:
            self._replayers[len(sequences)] = replayer
        tokens = [sequence.tokens[-1] for sequence in sequences]
        positions = [len(sequence.tokens) - 1 for sequence in sequences]
        with _rewind_on_error(cache):
            logits = self.decoder.compute_batch_logits(tokens, positions, cache, replayer)
        cache.states.holder.free_retired_pages()
        return logits

    @property
    def _uses_graphs(self) -> bool:
        """Whether decodes replay graphs: no capture was refused so far."""
        refused = any(r.refusal is not None for r in self._replayers.values())
        return self.decoder.captures_graphs and not refused

    def _resize_idle(self, count: int) -> None:
        """Set the number of idle sequences; drop those that became long."""
        short = [idle for idle in self._idle_sequences if len(idle.tokens) < MAX_IDLE_TOKENS]
        remaining = short[:count]
        if dropped := [idle for idle in self._idle_sequences if idle not in remaining]:
            self._select([sequence for sequence in self._sequences if sequence not in dropped])
        if count and self._idle_template is None:
            template = EngineSequence([0])
            self.prefill(template, 1)
            self._idle_template = template
        self._idle_sequences = remaining
        while len(self._idle_sequences) < count:
            assert self._idle_template is not None
            self._idle_sequences.append(self.fork(self._idle_template))

    def _merge_batch(self, sequences: Sequence[EngineSequence]) -> TransformersCache:
        """Return a cache of exactly these sequences: extract the others, merge the new ones."""
        self._extract([member for member in self._sequences if member not in sequences])
        new = [sequence for sequence in sequences if sequence not in self._sequences]
        current = [] if self._batch_cache is None else [self._batch_cache]
        merged = merge([*current, *(sequence.cache for sequence in new)]) if new else current[0]
        self._sequences, self._batch_cache = [*self._sequences, *new], merged
        for sequence in new:
            sequence.cache = None
        return merged

    def _extract(self, sequences: Sequence[EngineSequence]) -> None:
        """Move sequences out of the batch, each to its own cache."""
        members = [sequence for sequence in sequences if sequence in self._sequences]
        if not members:
            return
        assert self._batch_cache is not None
        for member in members:
            member.cache = self._batch_cache.extract(self._sequences.index(member))
        self._select([other for other in self._sequences if other not in members])

    def _select(self, sequences: list[EngineSequence]) -> None:
        """Reduce the batch to `sequences`."""
        if sequences and self._batch_cache is not None:
            indices = [self._sequences.index(sequence) for sequence in sequences]
            self._batch_cache.batch_select_indices(indices)
        elif not sequences:
            self._batch_cache = None
        self._sequences = sequences

    def _disable_batching(self, error: Exception) -> None:
        """Decode one sequence at a time from now on."""
        self.ragged = False
        self._extract(self._sequences)
        log.info(
            "%s: decoding one sequence at a time: %s", type(self.decoder.model).__name__, str(error)
        )


def pad_batch_size(num_sequences: int) -> int:
    """Round up to a batch size with a graph: 1, 2, 4, 8, 16, 32, 48 and so on."""
    return (
        1 << (num_sequences - 1).bit_length()
        if num_sequences <= 16
        else -(-num_sequences // 16) * 16
    )


def max_idle(max_sequences: int) -> int:
    """Return the most idle sequences that up to `max_sequences` need, plus their template."""
    return 1 + max((pad_batch_size(n) - n for n in range(1, max_sequences + 1)), default=0)


@contextmanager
def _rewind_on_error(cache: TransformersCache) -> Iterator[None]:
    """Rewind the cache to its length if the forward fails."""
    length = cache.length
    if cache.states.holder.external_states.values():  # models update them in place
        cache.checkpoint()
    try:
        yield
    except BaseException:
        cache.rewind(length)
        raise
