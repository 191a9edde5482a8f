"""The cache of one sequence, and the tokens in it: prefill prompts, and decode what follows.

For the logits after some tokens, a `Prefiller` rewinds the cache to the longest prefix that it
shares with them and computes the rest. At least one token is always computed, for its logits. Turns
of a conversation and rejected drafts are handled alike.

    tokens      |------ prompt ------|---- decoded ----|
    shared      |-------------|                            prefix in the cache
    computed                  |------|                     in chunks, up to the prompt's end
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from kvant.cache.pruning import needs_second_pass
from kvant.generation.decoder import Decoder, TransformersDecoder
from kvant.generation.images import PromptImages
from kvant.generation.second_pass import SecondPass
from kvant.generation.strategy import AdaptiveStrategy, SequenceCache
from kvant.hf import TransformersCache
from kvant.prefixes import PrefixNamespace
from kvant.prefixes.tree import count_shared_prefix
from kvant.vision import NO_IMAGES, ImageLayout

PrefillProgress = Callable[[int, int], None]  # prefilled tokens of a prompt, and all of them


class Prefiller:
    """The cache of one sequence, and the tokens in it.

    _tokens    |-- prefilled in chunks --|-- decoded --|- failed forward -|
               0                   _num_prefilled   cache.length
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: SequenceCache,
        chunk_size: int = 512,
        *,
        threshold: float = 0,
        adaptive: AdaptiveStrategy | None = None,
        prefixes: PrefixNamespace | None = None,
        second_pass: SecondPass | None = None,
        tokens: Sequence[int] = (),
    ) -> None:
        """Continue the `tokens` in `cache`.

        Sequences of at most `threshold` tokens are not cached, but recomputed. `adaptive` keeps the
        cache within its budget. `prefixes` are shared with other prefillers of the model. The score
        of a prune may need a `second_pass`.
        """
        if chunk_size < 1:
            raise ValueError(f"prefill_chunk={chunk_size}: 1 or more is needed")
        self.alignment = None if prefixes is None else prefixes.chunk_alignment  # of chunks' ends
        chunk_size = self.alignment or chunk_size
        if not decoder.supports_chunked_prefill:
            chunk_size = sys.maxsize
        self.decoder = decoder
        self.cache = cache
        self.chunk_size = chunk_size  # tokens per forward: bounds the memory of prefill
        self.threshold = threshold
        self.adaptive = adaptive
        self.prefixes = prefixes
        self.second_pass = second_pass
        # One token tells an adaptive cache the size of rows.
        learns_size = adaptive is not None and decoder.supports_chunked_prefill
        self._first_chunk_size = 1 if learns_size and self.alignment is None else chunk_size
        self.num_prompt_tokens = 0  # tokens of all prompts,
        self.num_cached_tokens = 0  # of these, tokens found in the cache,
        self.num_restored_tokens = 0  # and of these, tokens restored from a store
        # Tokens in the cache, those of images as hashes; more after a failed forward.
        self._tokens = list(tokens)
        self._images: PromptImages | None = None  # of the newest prompt
        self._layout: ImageLayout = NO_IMAGES  # where they are
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
        images: PromptImages | None = None,
    ) -> Tensor:
        """Prefill a prompt in chunks; return the logits [vocabulary] after it.

        `branch_points` are lengths at which other prompts may differ from this one.
        """
        self.num_prompt_tokens += len(tokens)
        self._images, self._layout = images, NO_IMAGES if images is None else images.layout
        self.align_cache(tokens)
        if len(tokens) <= self.threshold:
            return self.decoder.compute_logits(list(tokens), None)[-1]
        restored, checkpoints = range(0), list[int]()
        if self.prefixes is not None:
            keys = self._layout.make_prefix_tokens(tokens)
            restored = self._match_prefix(self.prefixes, tokens, keys)
            points = self.prefixes.plan_checkpoints(keys, self.cache.length, branch_points)
            ends = map(self._layout.clip_length, points)
            checkpoints = [end for end in ends if end > self.cache.length]
        num_cached = self.cache.length
        self.num_cached_tokens += num_cached
        self.num_restored_tokens += len(range(restored.start, min(restored.stop, num_cached)))
        try:
            logits = self._prefill_unread(tokens, progress, checkpoints, is_prompt=True)[-1]
        except Exception:
            self._reject(self._layout.make_prefix_tokens(tokens)[: restored.stop])
            raise
        if restored and logits.isnan().any():  # corrupt rows: no token can be sampled
            self._reject(self._layout.make_prefix_tokens(tokens)[: restored.stop])
        return logits

    def _match_prefix(
        self, prefixes: PrefixNamespace, tokens: Sequence[int], keys: Sequence[int]
    ) -> range:
        """Adopt the cache with the longest prefix of a prompt; return the restored tokens."""
        cache = cast(TransformersCache, self.cache)
        if prefixes.needs_shapes(cache):  # before a store's tensors are accepted
            self.decoder.compute_logits(list(tokens[:1]), cache)
            self._drop_tokens()
        restored = prefixes.fetch_from_store(keys, cache)
        self.cache, self._num_prefilled = prefixes.match_prefix(keys, cache, self._num_prefilled)
        find = self.cache.find_exact_rewind
        self.cache.rewind(self._layout.find_resumable(self.cache.length, find))
        self._num_prefilled = min(self._num_prefilled, self.cache.length)
        self._tokens = list(keys[: self.cache.length])
        prefixes.memory.record_lookup(len(tokens), self.cache.length)
        return restored

    def insert_prefix(self) -> None:
        """Share the pages of this sequence with prompts that begin with the same tokens."""
        self.align_cache(self.tokens, num_unread=0)  # rolls back a failed forward
        if self.prefixes is not None:
            cache = cast(TransformersCache, self.cache)
            features = {} if self._images is None else self._images.features
            self.prefixes.insert_prefix(self.tokens, cache, self._num_prefilled, features)

    def settle(self, tokens: Sequence[int]) -> None:
        """Share the prefilled prefix, keep the cache of `tokens`, and make a checkpoint there."""
        self.insert_prefix()
        self.align_cache(tokens)  # also rolls back a failed forward
        self.cache.checkpoint()

    def compute_next_logits(self, tokens: Sequence[int], num_logits: int = 1) -> Tensor:
        """Return the logits [num_logits, vocabulary] after each of the newest tokens.

        Several tokens are computed as decode steps, not as a prompt: they may be drafts.
        """
        if len(tokens) <= self.threshold:
            return self.decoder.compute_logits(list(tokens), None, num_logits)
        length = self.cache.length
        if num_logits == 1 and length == len(tokens) - 1:
            self._tokens[length:] = tokens[length:]
            if self.adaptive is not None:
                self.adaptive.make_room(self.cache, 1)
            # Next: a replay (replay/replayer.py), or a forward of the model (hf/model.py).
            cache = cast(TransformersCache, self.cache)
            position = length + self._layout.position_offset
            return self.decoder.compute_batch_logits([[tokens[-1]]], [position], cache)[0]
        num_previous = len(tokens) - num_logits
        if self.cache.length > num_previous:
            self.align_cache(tokens, num_logits)
        if self.cache.length == 0 and num_previous:
            self._prefill_unread(tokens[:num_previous])  # the sequence passed the threshold
        if (begin := self.cache.length) < num_previous:  # accepted drafts after a checkpoint
            with self.cache.speculation_mode():
                self._run_forward(tokens, begin, num_previous, num_logits=1)
            self.decoder.num_unsteady_forwards += 1
        if num_logits > 1:
            self.cache.checkpoint()
        begin = self.cache.length
        self._tokens[begin:] = tokens[begin:]
        if self.adaptive is not None:
            self.adaptive.make_room(self.cache, num_logits)
        cache = cast(TransformersCache, self.cache)
        position = begin + self._layout.position_offset
        return self.decoder.compute_batch_logits([list(tokens[begin:])], [position], cache)[0]

    def align_cache(self, tokens: Sequence[int], num_unread: int = 1) -> None:
        """Rewind to the prefix shared with `tokens`, without their newest `num_unread`."""
        keys = self._layout.make_prefix_tokens(tokens)
        shared = max(0, min(count_shared_prefix(self.tokens, keys), len(tokens) - num_unread))
        # Other readers of shared pages need exact rows.
        cache, exact = self.cache, self.prefixes is not None
        find = cache.find_exact_rewind if exact else cache.reachable
        cache.rewind(self._layout.find_resumable(find(shared), find))
        del self._tokens[self.cache.length :]
        self._num_prefilled = min(self._num_prefilled, len(self._tokens))
        if self.alignment is not None:  # a later chunk starts at an aligned length
            self._num_prefilled -= self._num_prefilled % self.alignment

    def fork(self) -> Prefiller:
        """Return an independent prefiller with the same tokens."""
        self.align_cache(self.tokens, num_unread=0)  # rolls back a failed forward
        copy = Prefiller.__new__(Prefiller)
        copy.__dict__.update(self.__dict__)
        copy.cache, copy._tokens = self.cache.fork(), self.tokens
        copy.prefixes = None if self.prefixes is None else self.prefixes.fork()
        return copy

    def reset(self) -> None:
        """Drop all tokens, also if the cache cannot be rewound."""
        self._drop_tokens()
        self._images, self._layout = None, NO_IMAGES

    def _drop_tokens(self) -> None:
        self.cache.reset()
        self._tokens, self._num_prefilled = [], 0

    def _reject(self, tokens: Sequence[int]) -> None:
        """Drop a restored prefix here and in the shared prefixes; do nothing if there is none."""
        if tokens and self.prefixes is not None:
            self.prefixes.reject(tokens)
            self._drop_tokens()

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
            stop = self._layout.fit_chunk_end(begin, min(end for end in ends if end > begin))
            start = time.perf_counter()
            with self.cache.prompt_mode():
                logits = self._run_forward(tokens, begin, stop, num_logits=1)
            if self.prefixes is not None:
                self.prefixes.pools.record_prefill_time(stop - begin, time.perf_counter() - start)
            if is_prompt and self._num_prefilled == begin:
                self._num_prefilled = stop
            if stop in checkpoint_positions:
                self.insert_prefix()
            if progress is not None:
                progress(stop, len(tokens))
        assert logits is not None
        if self.second_pass is not None and needs_second_pass(self.cache.state):
            cache = cast(TransformersCache, self.cache)
            self.second_pass.start(tokens).run(self.decoder.compute_logits, cache)
        return logits

    def _run_forward(self, tokens: Sequence[int], begin: int, stop: int, num_logits: int) -> Tensor:
        self._tokens[begin:] = self._layout.make_prefix_tokens(tokens)[begin:stop]
        if self.adaptive is not None:
            self.adaptive.make_room(self.cache, stop - begin)
        ids = list(tokens[begin:stop])
        if self._images is None:
            logits = self.decoder.compute_logits(ids, self.cache, num_logits)
        else:
            self._images.encode(begin, stop)
            decoder, cache = (
                cast(TransformersDecoder, self.decoder),
                cast(TransformersCache, self.cache),
            )
            logits = self._images.run_chunk(decoder, ids, cache)[None]
        if self.adaptive is not None and begin == 0:  # the first forward tells the size of rows
            self.adaptive.make_room(self.cache, 0)
        return logits
