"""A memory and the tokens in it: what was read once is not read again.

Asked for the logits after some tokens, a reader goes back to the longest beginning that the memory
shares with them, and reads the rest; at least one token is always read, for its logits. Turns of a
conversation and drafts that were refused are the same to it. Knows neither text nor sampling.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from kvant.generation.decoder import Decoder, SequenceCache
from kvant.generation.strategy import ALWAYS, Strategy

PrefillProgress = Callable[[int, int], None]  # tokens of a prompt that are read, and all of them


class PrefixSource(Protocol):
    """What readers of one model have in common."""

    @property
    def chunk_alignment(self) -> int | None:
        """Tokens at whose multiples prompts are to be cut; None: anywhere."""

    def fork(self) -> PrefixSource:
        """The same for another reader."""

    def reachable(self, cache: Any, to: int) -> int:
        """To where a memory may go back."""

    def needs_shapes(self, memory: Any) -> bool:
        """Whether the model is to read a token, for its shapes, before `fetch`."""

    def fetch_from_store(self, tokens: Sequence[int], base_cache: Any) -> range:
        """Bring what there is elsewhere of a prompt that is to begin; the tokens that came."""

    def reject(self, tokens: Sequence[int]) -> None:
        """Drop what `fetch` brought of these tokens: the model failed with it."""

    def match_prefix(
        self, tokens: Sequence[int], base_cache: Any, num_prefilled: int
    ) -> tuple[Any, int]:
        """The memory to read tokens with, and how many of those in it were read as prompts."""

    def record_lookup(self, num_prompt_tokens: int, num_cached: int) -> None:
        """Of a prompt of so many tokens, so many were there."""

    def record_prefill_time(self, count: int, seconds: float) -> None:
        """So many tokens of a prompt were read in so long."""

    def plan_checkpoints(
        self, tokens: Sequence[int], num_cached: int, branch_points: Sequence[int]
    ) -> list[int]:
        """The lengths at which to `keep` what is read, in order."""

    def insert_prefix(self, tokens: Sequence[int], cache: Any, num_prefilled: int) -> None:
        """Let others go on from this memory of these tokens."""

    def describe_mismatch(self, tokenizer: Any) -> str | None:
        """Where the last prompt left what there is, in words."""


class NoPrefixes:
    """Nothing is in common."""

    chunk_alignment = None

    def fork(self) -> NoPrefixes:
        return self

    def reachable(self, cache: Any, to: int) -> int:
        return int(cache.reachable(to))

    def needs_shapes(self, memory: Any) -> bool:
        return False

    def fetch_from_store(self, tokens: Sequence[int], base_cache: Any) -> range:
        return range(0)

    def reject(self, tokens: Sequence[int]) -> None:
        """Nothing is brought."""

    def match_prefix(
        self, tokens: Sequence[int], base_cache: Any, num_prefilled: int
    ) -> tuple[Any, int]:
        return base_cache, num_prefilled

    def record_lookup(self, num_prompt_tokens: int, num_cached: int) -> None:
        """Nobody asks for it."""

    def record_prefill_time(self, count: int, seconds: float) -> None:
        """Nobody asks for it."""

    def plan_checkpoints(
        self, tokens: Sequence[int], num_cached: int, branch_points: Sequence[int]
    ) -> list[int]:
        return []

    def insert_prefix(self, tokens: Sequence[int], cache: Any, num_prefilled: int) -> None:
        """Nobody asks for it."""

    def describe_mismatch(self, tokenizer: Any) -> str | None:
        return None


class Prefiller:
    """One sequence, and how far the memory has come with it."""

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
        self.chunk_size = (
            chunk_size  # tokens at once: bounds the memory that reading a prompt takes
        )
        one = decoder.supports_chunked_prefill and self.prefixes.chunk_alignment is None
        self._first_chunk_size = strategy.choose_first_chunk(chunk_size) if one else chunk_size
        self.num_prompt_tokens = 0  # tokens of all prompts,
        self.num_cached_tokens = 0  # and those of them that the memory held,
        self.num_restored_tokens = 0  # and of these, those that came from a store
        self._tokens: list[int] = []  # what the memory holds, or more where a forward died
        self._num_prefilled = (
            0  # of those, so many were read in chunks: what was decoded is behind them
        )

    @property
    def tokens(self) -> list[int]:
        """Those that the memory holds."""
        return self._tokens[: self.cache.length]

    def prefill(
        self,
        tokens: Sequence[int],
        progress: PrefillProgress | None = None,
        branch_points: Sequence[int] = (),
    ) -> Tensor:
        """The logits [vocabulary] after a prompt, read in chunks; at `marks` others may differ."""
        self.num_prompt_tokens += len(tokens)
        self.align_cache(tokens)
        if not self.strategy.should_cache(len(tokens)):
            return self.decoder.compute_logits(list(tokens), None)[-1]
        if self.prefixes.needs_shapes(self.cache):  # a store may hold anything
            self._run_forward(tokens, 0, 1, num_logits=1)
            self.reset()
        came = self.prefixes.fetch_from_store(tokens, self.cache)
        self.cache, self._num_prefilled = self.prefixes.match_prefix(
            tokens, self.cache, self._num_prefilled
        )
        begin = self.cache.length
        self._tokens = list(tokens[:begin])
        self.num_cached_tokens += begin
        self.num_restored_tokens += len(range(came.start, min(came.stop, begin)))
        self.prefixes.record_lookup(len(tokens), begin)
        stops = self.prefixes.plan_checkpoints(tokens, begin, branch_points)
        try:
            logits = self._prefill_unread(tokens, progress, stops, is_prompt=True)[-1]
        except Exception:
            self._reject(tokens[: came.stop])
            raise
        if came and logits.isnan().any():  # no token will be drawn from them
            self._reject(tokens[: came.stop])
        return logits

    def insert_prefix(self) -> None:
        """Let others go on from here who begin with the same tokens."""
        self.align_cache(self.tokens, num_unread=0)  # where a forward died, that is undone first
        self.prefixes.insert_prefix(self.tokens, self.cache, self._num_prefilled)

    def compute_next_logits(self, tokens: Sequence[int], num_logits: int = 1) -> Tensor:
        """The logits [last, vocabulary] after each of the newest tokens.

        A chunk of them is read as one token after the other would be: they may be drafts.
        """
        if not self.strategy.should_cache(len(tokens)):
            return self.decoder.compute_logits(list(tokens), None, num_logits)
        held, behind = self.cache.length, tokens[: len(tokens) - num_logits]
        if num_logits == 1 and held == len(behind):
            return self._run_forward(tokens, held, len(tokens), num_logits)
        if held == 0 and behind:
            self._prefill_unread(behind)  # a strategy that begins to remember
        if self.cache.length > len(behind):
            self.align_cache(tokens, num_logits)
        with self.cache.speculation_mode():
            if self.cache.length < len(behind):
                self._prefill_unread(behind)
            if num_logits > 1:
                self.cache.checkpoint()
            return self._run_forward(tokens, self.cache.length, len(tokens), num_logits)

    def align_cache(self, tokens: Sequence[int], num_unread: int = 1) -> None:
        """Go back to what the memory shares with `tokens`, without the newest `last` of them."""
        shared = max(0, min(count_shared_prefix(self.tokens, tokens), len(tokens) - num_unread))
        self.cache.rewind(self.prefixes.reachable(self.cache, shared))
        del self._tokens[self.cache.length :]
        self._num_prefilled = min(self._num_prefilled, len(self._tokens))
        if self.prefixes.chunk_alignment is not None:  # what is read from here on is cut otherwise
            self._num_prefilled -= self._num_prefilled % self.prefixes.chunk_alignment

    def fork(self) -> Prefiller:
        """A second reader of the same tokens, independent of this one from now on."""
        self.align_cache(self.tokens, num_unread=0)  # where a forward died, that is undone first
        memory = self.cache.fork()
        twin = Prefiller(self.decoder, memory, self.strategy, self.chunk_size, self.prefixes.fork())
        twin.set_tokens(self.tokens)
        twin._num_prefilled = self._num_prefilled
        twin.num_prompt_tokens, twin.num_cached_tokens, twin.num_restored_tokens = (
            self.num_prompt_tokens,
            self.num_cached_tokens,
            self.num_restored_tokens,
        )
        return twin

    def reset(self) -> None:
        """Forget all, also where a memory cannot go back."""
        self.cache.reset()
        self._tokens, self._num_prefilled = [], 0

    def set_tokens(self, tokens: Sequence[int]) -> None:
        """Know what a memory holds that others have filled."""
        self._tokens = list(tokens)

    def _reject(self, tokens: Sequence[int]) -> None:
        """Drop what a store had of a prompt, if anything, here and for other readers."""
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
        """Everything that is unread, chunk by chunk; the logits after the last token.

        Chunks end at multiples of their size, at `stops`, where what is read is kept, and where it
        ends.
        """
        logits = None
        while (begin := self.cache.length) < len(tokens):
            chunk = self.chunk_size if begin else self._first_chunk_size
            ends = ((begin // chunk + 1) * chunk, len(tokens), *checkpoint_positions)
            stop = min(end for end in ends if end > begin)
            since = time.perf_counter()
            with self.cache.prompt_mode():
                logits = self._run_forward(tokens, begin, stop, num_logits=1)
            self.prefixes.record_prefill_time(stop - begin, time.perf_counter() - since)
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
        if begin == 0:  # now it is known how large rows are
            self.strategy.make_room(self.cache, 0)
        return logits


def count_shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    count = min(len(left), len(right))
    if list(left[:count]) == list(right[:count]):
        return count
    return next(i for i in range(count) if left[i] != right[i])
