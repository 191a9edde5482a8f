"""Prefill: bring a cache to the tokens of a prompt, and compute only what it lacks.

For the logits after some tokens, a prefiller rewinds its cache to the longest prefix that it shares
with them and computes the rest. At least one token is always computed, for its logits. Turns of a
conversation and rejected drafts are handled alike. This module knows neither text nor sampling.

    tokens      |------ prompt ------|---- decoded ----|
    shared      |-------------|                            prefix in the cache
    computed                  |------|                     in chunks, up to the prompt's end
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from kvant.generation.decoder import Decoder, SequenceCache
from kvant.generation.strategy import ALWAYS, Strategy

PrefillProgress = Callable[[int, int], None]  # prefilled tokens of a prompt, and all of them


class PrefixSource(Protocol):
    """Prefixes that the prefillers of one model share."""

    @property
    def chunk_alignment(self) -> int | None:
        """Multiple at which chunks of prompts must end; None if they may end anywhere."""

    def fork(self) -> PrefixSource:
        """Return a source for another prefiller."""

    def reachable(self, cache: Any, to: int) -> int:
        """Return the longest length <= `to` that the cache can be rewound to."""

    def needs_shapes(self, cache: Any) -> bool:
        """Return whether the model must run one token, for shapes, before `fetch_from_store`."""

    def fetch_from_store(self, tokens: Sequence[int], base_cache: Any) -> range:
        """Fetch a prompt's prefix from the store; return the range of restored tokens."""

    def reject(self, tokens: Sequence[int]) -> None:
        """Drop the restored prefix of `tokens`, with which the model failed."""

    def match_prefix(
        self, tokens: Sequence[int], base_cache: Any, num_prefilled: int
    ) -> tuple[Any, int]:
        """Return the cache with the longest prefix of `tokens`, and its prefilled tokens."""

    def record_lookup(self, num_prompt_tokens: int, num_cached: int) -> None:
        """Count prompt tokens, and those found in the cache."""

    def record_prefill_time(self, count: int, seconds: float) -> None:
        """Record the seconds that `count` tokens of a prompt took to prefill."""

    def plan_checkpoints(
        self, tokens: Sequence[int], num_cached: int, branch_points: Sequence[int]
    ) -> list[int]:
        """Return the lengths, ascending, at which to call `insert_prefix` during prefill."""

    def insert_prefix(self, tokens: Sequence[int], cache: Any, num_prefilled: int) -> None:
        """Share the pages of this cache, which holds `tokens`."""

    def describe_mismatch(self, tokenizer: Any) -> str | None:
        """Describe where the last prompt differed from the stored prefixes."""


class NoPrefixes:
    """No prefixes are shared."""

    chunk_alignment = None

    def fork(self) -> NoPrefixes:
        return self

    def reachable(self, cache: Any, to: int) -> int:
        return int(cache.reachable(to))

    def needs_shapes(self, cache: Any) -> bool:
        return False

    def fetch_from_store(self, tokens: Sequence[int], base_cache: Any) -> range:
        return range(0)

    def reject(self, tokens: Sequence[int]) -> None:
        """Do nothing: no prefix was restored."""

    def match_prefix(
        self, tokens: Sequence[int], base_cache: Any, num_prefilled: int
    ) -> tuple[Any, int]:
        return base_cache, num_prefilled

    def record_lookup(self, num_prompt_tokens: int, num_cached: int) -> None:
        """Do nothing: hits are not counted."""

    def record_prefill_time(self, count: int, seconds: float) -> None:
        """Do nothing: no store needs the time."""

    def plan_checkpoints(
        self, tokens: Sequence[int], num_cached: int, branch_points: Sequence[int]
    ) -> list[int]:
        return []

    def insert_prefix(self, tokens: Sequence[int], cache: Any, num_prefilled: int) -> None:
        """Do nothing: no prefix is shared."""

    def describe_mismatch(self, tokenizer: Any) -> str | None:
        return None


class Prefiller:
    """The cache of one sequence, and the tokens in it.

    _tokens    |-- prefilled in chunks --|-- decoded --|- failed forward -|
               0                   _num_prefilled   cache.length
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: SequenceCache,
        strategy: Strategy = ALWAYS,
        chunk_size: int = 512,
        prefixes: PrefixSource | None = None,
    ) -> None:
        if chunk_size < 1:
            raise ValueError(f"prefill_chunk={chunk_size}: 1 or more is needed")
        self.prefixes = NoPrefixes() if prefixes is None else prefixes
        chunk_size = self.prefixes.chunk_alignment or chunk_size
        if not decoder.supports_chunked_prefill:
            chunk_size = sys.maxsize
        self.decoder = decoder
        self.cache = cache
        self.strategy = strategy
        self.chunk_size = chunk_size  # tokens per forward: bounds the memory of prefill
        free = decoder.supports_chunked_prefill and self.prefixes.chunk_alignment is None
        self._first_chunk_size = strategy.choose_first_chunk(chunk_size) if free else chunk_size
        self.num_prompt_tokens = 0  # tokens of all prompts,
        self.num_cached_tokens = 0  # of these, tokens found in the cache,
        self.num_restored_tokens = 0  # and of these, tokens restored from a store
        self._tokens: list[int] = []  # tokens in the cache; more after a failed forward
        self._num_prefilled = 0  # tokens prefilled in chunks; decoded tokens follow them

    @property
    def tokens(self) -> list[int]:
        """The tokens in the cache."""
        return self._tokens[: self.cache.length]

    def prefill(
        self,
        tokens: Sequence[int],
        progress: PrefillProgress | None = None,
        branch_points: Sequence[int] = (),
    ) -> Tensor:
        """Prefill a prompt in chunks; return the logits [vocabulary] after it.

        `branch_points` are lengths at which other prompts may differ from this one.
        """
        self.num_prompt_tokens += len(tokens)
        self.align_cache(tokens)
        if not self.strategy.should_cache(len(tokens)):
            return self.decoder.compute_logits(list(tokens), None)[-1]
        if self.prefixes.needs_shapes(self.cache):  # before a store's tensors are accepted
            self._run_forward(tokens, 0, 1, num_logits=1)
            self.reset()
        restored = self.prefixes.fetch_from_store(tokens, self.cache)
        self.cache, self._num_prefilled = self.prefixes.match_prefix(
            tokens, self.cache, self._num_prefilled
        )
        num_cached = self.cache.length
        self._tokens = list(tokens[:num_cached])
        self.num_cached_tokens += num_cached
        self.num_restored_tokens += len(range(restored.start, min(restored.stop, num_cached)))
        self.prefixes.record_lookup(len(tokens), num_cached)
        checkpoints = self.prefixes.plan_checkpoints(tokens, num_cached, branch_points)
        try:
            logits = self._prefill_unread(tokens, progress, checkpoints, is_prompt=True)[-1]
        except Exception:
            self._reject(tokens[: restored.stop])
            raise
        if restored and logits.isnan().any():  # corrupt rows: no token can be sampled
            self._reject(tokens[: restored.stop])
        return logits

    def insert_prefix(self) -> None:
        """Share the pages of this sequence with prompts that begin with the same tokens."""
        self.align_cache(self.tokens, num_unread=0)  # rolls back a failed forward
        self.prefixes.insert_prefix(self.tokens, self.cache, self._num_prefilled)

    def compute_next_logits(self, tokens: Sequence[int], num_logits: int = 1) -> Tensor:
        """Return the logits [num_logits, vocabulary] after each of the newest tokens.

        Several tokens are computed as decode steps, not as a prompt: they may be drafts.
        """
        if not self.strategy.should_cache(len(tokens)):
            return self.decoder.compute_logits(list(tokens), None, num_logits)
        length, previous_tokens = self.cache.length, tokens[: len(tokens) - num_logits]
        if num_logits == 1 and length == len(previous_tokens):
            return self._run_forward(tokens, length, len(tokens), num_logits)
        if length == 0 and previous_tokens:
            self._prefill_unread(previous_tokens)  # the strategy begins to cache here
        if self.cache.length > len(previous_tokens):
            self.align_cache(tokens, num_logits)
        with self.cache.speculation_mode():
            if self.cache.length < len(previous_tokens):
                self._prefill_unread(previous_tokens)
            if num_logits > 1:
                self.cache.checkpoint()
            return self._run_forward(tokens, self.cache.length, len(tokens), num_logits)

    def align_cache(self, tokens: Sequence[int], num_unread: int = 1) -> None:
        """Rewind to the prefix shared with `tokens`, without their newest `num_unread`."""
        shared = max(0, min(count_shared_prefix(self.tokens, tokens), len(tokens) - num_unread))
        self.cache.rewind(self.prefixes.reachable(self.cache, shared))
        del self._tokens[self.cache.length :]
        self._num_prefilled = min(self._num_prefilled, len(self._tokens))
        if self.prefixes.chunk_alignment is not None:  # a later chunk starts at an aligned length
            self._num_prefilled -= self._num_prefilled % self.prefixes.chunk_alignment

    def fork(self) -> Prefiller:
        """Return an independent prefiller with the same tokens."""
        self.align_cache(self.tokens, num_unread=0)  # rolls back a failed forward
        cache = self.cache.fork()
        copy = Prefiller(self.decoder, cache, self.strategy, self.chunk_size, self.prefixes.fork())
        copy.set_tokens(self.tokens)
        copy._num_prefilled = self._num_prefilled
        copy.num_prompt_tokens, copy.num_cached_tokens, copy.num_restored_tokens = (
            self.num_prompt_tokens,
            self.num_cached_tokens,
            self.num_restored_tokens,
        )
        return copy

    def reset(self) -> None:
        """Drop all tokens, also if the cache cannot be rewound."""
        self.cache.reset()
        self._tokens, self._num_prefilled = [], 0

    def set_tokens(self, tokens: Sequence[int]) -> None:
        """Set the tokens of a cache that was filled elsewhere."""
        self._tokens = list(tokens)

    def _reject(self, tokens: Sequence[int]) -> None:
        """Drop a restored prefix here and in the shared prefixes; do nothing if there is none."""
        if tokens:
            self.prefixes.reject(tokens)
            self.reset()

    def _prefill_unread(
        self,
        tokens: Sequence[int],
        progress: PrefillProgress | None = None,
        checkpoint_positions: Sequence[int] = (),
        *,
        is_prompt: bool = False,
    ) -> Tensor:
        """Prefill the tokens that the cache lacks; return the logits after the last one.

        Chunks end at multiples of the chunk size, at `checkpoint_positions`, where the prefix is
        inserted, and at the last token.
        """
        logits = None
        while (begin := self.cache.length) < len(tokens):
            chunk = self.chunk_size if begin else self._first_chunk_size
            ends = ((begin // chunk + 1) * chunk, len(tokens), *checkpoint_positions)
            stop = min(end for end in ends if end > begin)
            start = time.perf_counter()
            with self.cache.prompt_mode():
                logits = self._run_forward(tokens, begin, stop, num_logits=1)
            self.prefixes.record_prefill_time(stop - begin, time.perf_counter() - start)
            if is_prompt and self._num_prefilled == begin:
                self._num_prefilled = stop
            if stop in checkpoint_positions:
                self.insert_prefix()
            if progress is not None:
                progress(stop, len(tokens))
        assert logits is not None
        return logits

    def _run_forward(self, tokens: Sequence[int], begin: int, stop: int, num_logits: int) -> Tensor:
        self._tokens[begin:] = tokens[begin:stop]
        self.strategy.make_room(self.cache, stop - begin)
        logits = self.decoder.compute_logits(list(tokens[begin:stop]), self.cache, num_logits)
        if begin == 0:  # the first forward tells the size of rows
            self.strategy.make_room(self.cache, 0)
        return logits


def count_shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    count = min(len(left), len(right))
    if list(left[:count]) == list(right[:count]):
        return count
    return next(i for i in range(count) if left[i] != right[i])
