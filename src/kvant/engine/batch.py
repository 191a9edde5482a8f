"""Sequences of one model whose caches share pages: prompts in chunks, and a token of each at once.

Those that decode lie under one cache (`kvant.merge`); others have one of their own, over the same
pools. Who comes or goes costs a merge or a selection of integers, and no copy of pages. A model
whose attention cannot read sequences of different lengths decodes them one after the other.

On a GPU a forward of the batch is replayed from a graph. There is one for some numbers of
sequences; a batch of another number is filled up with idle ones, of a few tokens that mean nothing.
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
from kvant.cache.usage import CacheUsage
from kvant.capture import ReplayBuffers
from kvant.engine.memory import MAX_IDLE_TOKENS
from kvant.errors import UnsupportedView
from kvant.generation import TransformersDecoder
from kvant.hf import Replayer, SupportLevel, TransformersCache, load_cache
from kvant.page_table import LayerGroup
from kvant.prefixes import LookupDeadline, PendingRestore, Prefixes, PrefixNamespace
from kvant.recipes import CacheSpec

log = logging.getLogger("kvant")

WEIGHTS_CHECK_INTERVAL_S = (
    1.0  # seconds: looking at all weights takes as long as a token, or longer
)


@dataclass(eq=False)
class EngineSequence:
    """A sequence: its tokens, and the cache that holds them, until it is one of the batch."""

    tokens: list[int]  # grows outside, a token before each decode
    num_prefilled: int = 0  # of them, so many were read in chunks
    cache: TransformersCache | None = field(default=None, repr=False)
    swap_file: Path | None = None  # where its pages are while they are put aside
    salt: str = ""  # it shares prefixes with those who have the same
    namespace: PrefixNamespace | None = field(
        default=None, repr=False
    )  # that of the salt, once it was needed


class Batch:
    """The memory of all sequences that one model is serving."""

    def __init__(
        self,
        decoder: TransformersDecoder,
        empty_cache: TransformersCache,
        backend: str | None = None,
    ) -> None:
        self.decoder = decoder
        # Can sequences of different lengths be decoded at once? Else each by itself.
        self.ragged = decoder.support.level >= SupportLevel.RAGGED_BATCH
        self._empty_cache = empty_cache  # never has tokens: all others share its pools
        self._empty_cache.backend = backend
        self._empty_cache.ensure_slack(
            1
        )  # the token of a forward that died behind all layers is taken back
        self._namespace: PrefixNamespace | None = None  # of those without a salt
        # Of others: a shelf is kept by the sequences with its salt, and goes with the last one.
        self._salted_namespaces: WeakValueDictionary[str, PrefixNamespace] = WeakValueDictionary()
        self._sequences: list[
            EngineSequence
        ] = []  # the sequences of the batch, in the order of its cache
        self._batch_cache: TransformersCache | None = None  # the cache of the batch
        self._replayers: dict[int, Replayer] = {}  # by the number of sequences,
        self._replay_buffers = ReplayBuffers()  # and the memory of their recordings
        self._idle_sequences: list[EngineSequence] = []  # those of the batch that nobody asked for
        self._idle_template: EngineSequence | None = None  # what they begin with

    @property
    def spec(self) -> CacheSpec:
        return self._empty_cache.spec

    def attach_prefixes(self, prefixes: Prefixes) -> None:
        """From now on, begin with what there is of a prompt, and keep what is asked for."""
        self._namespace = prefixes.open_namespace(
            self.decoder.model, self._empty_cache, WEIGHTS_CHECK_INTERVAL_S
        )
        if (home := self._namespace.pool_cache) is not None:
            home = home.fork()
            home.backend = self._empty_cache.backend
            self._empty_cache = home

    def invalidate_weights_check(self) -> None:
        """Look at the weights before anything of a prefix is believed."""
        for shelf in filter(None, (self._namespace, *self._salted_namespaces.values())):
            shelf.invalidate_weights_check()

    @property
    def has_unwritten_prefixes(self) -> bool:
        """Is something kept here that a store is yet to have?"""
        return self._namespace is not None and self._namespace.has_unwritten

    def flush_store(self, seconds: float) -> None:
        """Wait until the store has all that is kept, so long at most; for any thread."""
        if self._namespace is not None:
            self._namespace.prefixes.flush(seconds)

    def prepare_store_lookup(
        self, sequence: EngineSequence, deadline: LookupDeadline
    ) -> Callable[[], PendingRestore | None]:
        """What looks for a prompt in a store, in another thread, while somebody waits."""
        shelf = self._find_namespace(sequence)
        assert shelf is not None
        if not self._empty_cache.has_shapes:  # a store may hold anything: what comes is compared
            self.prefill(EngineSequence(sequence.tokens[:1]), 1)
        memory, tokens, own = (
            (sequence.cache or self._empty_cache).fork(),
            list(sequence.tokens),
            shelf.fork(),
        )
        held = memory.length
        deadline.allocate(lambda: memory)

        def look() -> PendingRestore | None:
            try:
                return own.look_up_store(tokens, memory, held, deadline)
            finally:
                deadline.release(memory)  # its pages may be needed before the thread forgets it

        return look

    def adopt_restore(
        self, sequence: EngineSequence, restore: PendingRestore, *, insert: bool
    ) -> int:
        """Let a prompt go on from what came of it from a store; how much of it there is now.

        `keep` it for others, too.
        """
        shelf, had = self._find_namespace(sequence), self.count_tokens(sequence)
        assert shelf is not None
        restored = restore.restored
        held = shelf.count_usable_tokens(restore.keys, restored, len(sequence.tokens) - 1)
        if held <= had:
            return had
        if sequence.cache is not None:
            cache = sequence.cache.import_sequence(restored.cache)
        else:
            whole = restored.cache
            cache = self._empty_cache.merge_with([whole]) if self._has_pools else whole.fork()
        sequence.cache = None  # before a rewind takes another page
        restored.cache.clear()
        self._share_pools(cache)
        if insert:
            shelf.insert_restored(restore._replace(restored=replace(restored, cache=cache)))
            cache = cache.fork()
        cache.rewind(held)
        # Pages that it had already may be of a reply.
        read = (
            restored.num_prefilled
            if sequence.num_prefilled == had
            else min(restored.num_prefilled, sequence.num_prefilled)
        )
        sequence.cache, sequence.num_prefilled = cache, min(read, held)
        return held

    def count_tokens(self, sequence: EngineSequence) -> int:
        """How many tokens of a sequence are in memory."""
        if sequence in self._sequences and self._batch_cache is not None:
            return self._batch_cache.states.lengths[self._sequences.index(sequence)]
        return 0 if sequence.cache is None else sequence.cache.length

    def record_prefill_time(self, count: int, seconds: float) -> None:
        """So many tokens of a prompt were read in so long."""
        if self._namespace is not None:
            self._namespace.record_prefill_time(count, seconds)

    def estimate_prefill_seconds(self, count: int) -> float:
        """How long it takes to read so many tokens, as far as is known."""
        return (
            math.inf if self._namespace is None else self._namespace.estimate_prefill_seconds(count)
        )

    def match_prefix(
        self, sequence: EngineSequence, branch_points: Sequence[int]
    ) -> tuple[int, tuple[int, ...]]:
        """How many tokens of a prompt there are, and where chunks behind them are to end."""
        shelf = self._find_namespace(sequence)
        if shelf is None:
            return 0, ()
        cache, prompt = shelf.match_prefix(sequence.tokens, self._empty_cache.fork(), 0)
        held = self.count_tokens(sequence)
        if cache.length > held:  # in our pools: whoever else shares prefixes may have others
            sequence.cache = self._empty_cache.merge_with([cache]) if self._has_pools else cache
            sequence.num_prefilled, held = prompt, cache.length
            self._share_pools(cache)
        return held, tuple(shelf.plan_checkpoints(sequence.tokens, held, branch_points))

    def record_lookup(self, num_prompt_tokens: int, num_cached: int) -> None:
        """A prompt of so many tokens is served, of which so many were there."""
        if self._namespace is not None:
            self._namespace.record_lookup(num_prompt_tokens, num_cached)

    def insert_prefix(self, sequence: EngineSequence) -> None:
        """Let others go on from what a sequence has, if it has something."""
        (cache, place), shelf = self._locate(sequence), self._find_namespace(sequence)
        if shelf is None or cache is None:
            return
        alone = cache if sequence.cache is not None else cache.extract(place)
        shelf.insert_prefix(sequence.tokens[: alone.length], alone, sequence.num_prefilled)

    def reject(self, seat: EngineSequence, count: int) -> None:
        """Drop the first tokens of a sequence from prefixes: its model failed with them."""
        if (shelf := self._find_namespace(seat)) is not None:
            shelf.reject(seat.tokens[:count])

    def evict_prefixes(
        self, nbytes: int, *, include_unwritten: bool = False, include_used: bool = False
    ) -> bool:
        """Let go of prefixes of so many bytes; did anything go?

        Of what nobody uses, and a store has, where there is one, unless it is said otherwise.
        """
        if self._namespace is None:
            return False
        return self._namespace.evict(
            nbytes, include_unwritten=include_unwritten, include_used=include_used
        )

    def measure_prefixes(self) -> CacheUsage | None:
        """What prefixes take; None: nothing is kept."""
        return None if self._namespace is None else self._namespace.measure()

    def count_shared_pages(
        self, sequence: EngineSequence, length: int, account: CacheUsage
    ) -> dict[LayerGroup, tuple[int, int]]:
        """Pages of the first tokens of a sequence that prefixes hold, too."""
        cache, place = self._locate(sequence)
        return {} if cache is None else account.count_shared_pages(cache.states, place, length)

    def describe_mismatch(self, sequence: EngineSequence, tokenizer: Any) -> str | None:
        """Where the prompt that was begun last left what is kept, in words."""
        shelf = self._find_namespace(sequence)
        return None if shelf is None else shelf.describe_mismatch(tokenizer)

    def stats(self, sequences: Sequence[EngineSequence]) -> dict[str, int]:
        """Bytes of the pages, and of what recurrent layers keep of these sequences."""
        told, states = self._empty_cache.states.measure_pools(), 0
        if (
            self._empty_cache.states.external_states
        ):  # else nobody but us holds a cache, be it for a moment
            caches = {self._batch_cache, *(seat.cache for seat in sequences)}
            held = [cache.states.external_states for cache in caches if cache is not None]
            states = sum(state.nbytes for every in held for state in every)
        return told | {"nbytes_states": states}

    def prefill(self, sequence: EngineSequence, count: int) -> Tensor:
        """The logits [vocabulary] behind the next tokens of a prompt."""
        cache = self._empty_cache.fork() if sequence.cache is None else sequence.cache
        held = cache.length
        with cache.prompt_mode():
            logits = self.decoder.compute_logits(sequence.tokens[held : held + count], cache)[-1]
        cache.states.free_retired_pages()
        sequence.cache = cache
        if sequence.num_prefilled == held:
            sequence.num_prefilled += count
        self._share_pools(cache)
        return logits

    def decode(self, sequences: Sequence[EngineSequence]) -> tuple[Tensor, dict[int, Exception]]:
        """The logits behind the newest token of each, but of those that failed: by place, why.

        A forward that dies gave no sequence a token: then each is tried by itself.
        """
        if self.ragged and len(sequences) > 1:
            try:
                return self._decode_batch(sequences), {}
            except UnsupportedView as error:
                self._disable_batching(error)
            except Exception as error:
                told = repr(error)  # whoever keeps the error keeps our caches
                log.warning("a forward of %d sequences died: %s: one by one", len(sequences), told)
        rows, failed = list[Tensor](), dict[int, Exception]()
        for place, seat in enumerate(sequences):
            try:
                rows.append(self._decode_single(seat))
            except Exception as error:
                failed[place] = error
        return torch.cat(rows) if rows else torch.empty(0), failed

    def fork(self, sequence: EngineSequence) -> EngineSequence:
        """Another sequence behind the same tokens, which shares their pages."""
        assert sequence.cache is not None
        sequence.cache.prune()  # so that they share what stays
        return replace(sequence, tokens=list(sequence.tokens), cache=sequence.cache.fork())

    def release(self, sequence: EngineSequence) -> None:
        """Let a sequence go."""
        if sequence in self._sequences:
            self._select([one for one in self._sequences if one is not sequence])
        sequence.cache = None
        if sequence.swap_file is not None:
            sequence.swap_file.unlink(missing_ok=True)
            sequence.swap_file = None

    def swap_out(self, sequence: EngineSequence, path: Path) -> None:
        """Write the pages of a sequence to a file, if it has any, and let go of them."""
        self._extract([sequence])
        if sequence.cache is not None:
            sequence.swap_file = path
            save(sequence.cache, path)
            sequence.cache = None

    def swap_in(self, sequence: EngineSequence) -> None:
        """Have the pages again that were put aside, if there were any."""
        if sequence.swap_file is not None:
            cache = load_cache(sequence.swap_file, self.decoder.model)
            sequence.swap_file.unlink()
            sequence.swap_file = None
            cache.backend = self._empty_cache.backend
            sequence.cache = self._empty_cache.merge_with([cache]) if self._has_pools else cache
            self._share_pools(sequence.cache)

    def clear(self) -> None:
        """No sequence is left: free all memory, but what prefixes hold."""
        self._sequences, self._batch_cache = [], None
        self._idle_sequences, self._idle_template = [], None
        self._replayers.clear()
        self._replay_buffers = ReplayBuffers()
        self._empty_cache.clear()

    def check(self) -> None:
        """Are all slots free, or counted as often as they are held?"""
        self._empty_cache.states.check()

    # ---- within

    @property
    def _has_pools(self) -> bool:
        """Are there pools to share? Before the first rows nobody knows how large pages are."""
        return any(
            leaf.storage is not None
            for _, leaf in self._empty_cache.states.contents.list_attention()
        )

    def _find_namespace(self, sequence: EngineSequence) -> PrefixNamespace | None:
        """What a sequence sees of prefixes."""
        if self._namespace is None or not sequence.salt:
            return self._namespace
        if sequence.namespace is None:
            found = self._salted_namespaces.get(sequence.salt)
            sequence.namespace = self._namespace.fork(sequence.salt) if found is None else found
            self._salted_namespaces[sequence.salt] = sequence.namespace
        return sequence.namespace

    def _locate(self, sequence: EngineSequence) -> tuple[TransformersCache | None, int]:
        """The cache that has a sequence, and where in it."""
        if sequence in self._sequences:
            return self._batch_cache, self._sequences.index(sequence)
        return sequence.cache, 0

    def _share_pools(self, cache: TransformersCache) -> None:
        """Let others have the pools of this one, if it is the first."""
        if not self._has_pools:
            self._empty_cache = cache.fork()
            self._empty_cache.reset()

    def _decode_batch(self, sequences: Sequence[EngineSequence]) -> Tensor:
        """One forward for all of them."""
        self._resize_idle(
            pad_batch_size(len(sequences)) - len(sequences) if self._uses_graphs else 0
        )
        cache = self._merge_batch([*sequences, *self._idle_sequences])
        for seat in self._idle_sequences:
            seat.tokens.append(0)
        try:
            logits = self._forward(self._sequences, cache)
        except BaseException:
            self._resize_idle(0)
            raise
        order = [self._sequences.index(seat) for seat in sequences]
        return logits if order == list(range(len(logits))) else logits[order]

    def _decode_single(self, sequence: EngineSequence) -> Tensor:
        self._extract([sequence])
        assert sequence.cache is not None
        return self._forward([sequence], sequence.cache)

    def _forward(self, sequences: Sequence[EngineSequence], cache: TransformersCache) -> Tensor:
        """The logits behind the newest tokens of these, of which the cache has all others."""
        replayer = self._replayers.get(len(sequences)) or self.decoder.make_replayer(
            self._replay_buffers
        )
        if replayer is not None:
            self._replayers[len(sequences)] = replayer
        tokens = [seat.tokens[-1] for seat in sequences]
        positions = [len(seat.tokens) - 1 for seat in sequences]
        with _rewind_on_error(cache):
            logits = self.decoder.compute_batch_logits(tokens, positions, cache, replayer)
        cache.states.free_retired_pages()
        return logits

    @property
    def _uses_graphs(self) -> bool:
        """Are there graphs, as far as we know?"""
        refused = any(one.refusal is not None for one in self._replayers.values())
        return self.decoder.captures_graphs and not refused

    def _resize_idle(self, count: int) -> None:
        """Let there be so many idle sequences; those that became long begin anew."""
        stay = [seat for seat in self._idle_sequences if len(seat.tokens) < MAX_IDLE_TOKENS][:count]
        if gone := [seat for seat in self._idle_sequences if seat not in stay]:
            self._select([seat for seat in self._sequences if seat not in gone])
        if count and self._idle_template is None:
            blank = EngineSequence([0])
            self.prefill(blank, 1)
            self._idle_template = blank
        self._idle_sequences = stay
        while len(self._idle_sequences) < count:
            assert self._idle_template is not None
            self._idle_sequences.append(self.fork(self._idle_template))

    def _merge_batch(self, sequences: Sequence[EngineSequence]) -> TransformersCache:
        """The cache of exactly these."""
        self._extract([seat for seat in self._sequences if seat not in sequences])
        new = [seat for seat in sequences if seat not in self._sequences]
        old = [] if self._batch_cache is None else [self._batch_cache]
        merged = merge([*old, *(seat.cache for seat in new)]) if new else old[0]
        self._sequences, self._batch_cache = [*self._sequences, *new], merged
        for seat in new:
            seat.cache = None
        return merged

    def _extract(self, sequences: Sequence[EngineSequence]) -> None:
        """Let each of these have a cache of its own, and the batch go on without them."""
        here = [seat for seat in sequences if seat in self._sequences]
        if not here:
            return
        assert self._batch_cache is not None
        for seat in here:
            seat.cache = self._batch_cache.extract(self._sequences.index(seat))
        self._select([seat for seat in self._sequences if seat not in here])

    def _select(self, sequences: list[EngineSequence]) -> None:
        """The batch goes on with these of its sequences."""
        if sequences and self._batch_cache is not None:
            self._batch_cache.batch_select_indices(
                [self._sequences.index(seat) for seat in sequences]
            )
        elif not sequences:
            self._batch_cache = None
        self._sequences = sequences

    def _disable_batching(self, error: Exception) -> None:
        """From now on, one sequence after the other."""
        self.ragged = False
        self._extract(self._sequences)
        log.info("%s: one sequence at a time: %s", type(self.decoder.model).__name__, str(error))


def pad_batch_size(num_sequences: int) -> int:
    """The next number of sequences for which there is a graph: 1, 2, 4, 8, 16, 32, 48 and so on."""
    return (
        1 << (num_sequences - 1).bit_length()
        if num_sequences <= 16
        else -(-num_sequences // 16) * 16
    )


def max_idle(max_sequences: int) -> int:
    """How many idle ones there may be beside at most so many, with the one that they begin with."""
    return 1 + max((pad_batch_size(n) - n for n in range(1, max_sequences + 1)), default=0)


@contextmanager
def _rewind_on_error(cache: TransformersCache) -> Iterator[None]:
    """A token within, or the cache as it was."""
    length = cache.length
    if cache.states.external_states:  # models change these in place
        cache.checkpoint()
    try:
        yield
    except BaseException:
        cache.rewind(length)
        raise
