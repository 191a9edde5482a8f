"""Compute the logits after the tokens of one sequence, over a cache that can be rewound.

A decoder wraps a transformers model, or any callable `model(ids, cache)`. A `Prefiller` has a
decoder, a cache and the tokens in it. For the logits after some tokens, it rewinds the cache to the
longest prefix that it shares with them and computes the rest. At least one token is always
computed, for its logits. Turns of a conversation and rejected drafts are handled alike. This module
knows neither text nor sampling.

    tokens      |------ prompt ------|---- decoded ----|
    shared      |-------------|                            prefix in the cache
    computed                  |------|                     in chunks, up to the prompt's end
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from reprlib import repr as short
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvant.cache import Cache
from kvant.cache.pruning import needs_second_pass
from kvant.errors import SpecError
from kvant.generation.second_pass import SecondPass
from kvant.generation.strategy import AdaptiveStrategy, SequenceCache
from kvant.hf import (
    Support,
    SupportLevel,
    TokenForward,
    TransformersCache,
    check_text_model,
    compute_model_fingerprint,
    get_model_without_head,
    get_support,
    is_bidirectional,
    make_model_cache,
    supports_chunked_prefill,
    unwrap_model,
)
from kvant.native import get_library
from kvant.prefixes import PrefixNamespace
from kvant.prefixes.tree import count_shared_prefix
from kvant.probing import make_trial, resolve_auto
from kvant.recipes import AnySpec, CacheSpec
from kvant.replay import (
    NATIVE_REPLAY,
    CaptureFunction,
    ReplayBuffers,
    Replayer,
    capture_forward,
    capture_graph,
    make_capture_function,
)
from kvant.spec import describe_spec
from kvant.spec.language import is_auto

LogitsFunction = Callable[[Tensor, Any], Tensor]  # (ids [1, T], cache) -> logits [1, T, vocabulary]
PrefillProgress = Callable[[int, int], None]  # prefilled tokens of a prompt, and all of them


class TransformersDecoder:
    """Decode with a transformers model.

    Single-token forwards are replayed where possible: as a CUDA graph, or natively on the CPU.
    """

    def __init__(self, model: PreTrainedModel, capture: CaptureFunction | None = None) -> None:
        check_text_model(model)
        self.model = model
        self._capture = capture or (capture_graph if model.device.type == "cuda" else None)
        self._replayers: WeakKeyDictionary[TransformersCache, Replayer] = WeakKeyDictionary()
        self._forward = TokenForward(model)

    @cached_property
    def support(self) -> Support:
        """Support level of the model, computed once for each class and configuration."""
        return get_support(self.model)

    @property
    def max_context(self) -> int | None:
        """Longest sequence that the model has positions for."""
        return getattr(self._text_config, "max_position_embeddings", None)

    @property
    def vocab_size(self) -> int | None:
        return getattr(self._text_config, "vocab_size", None)

    @property
    def _text_config(self) -> PreTrainedConfig:
        return self.model.config.get_text_config(decoder=True)

    @property
    def end_tokens(self) -> frozenset[int]:
        end_token = self.model.generation_config.eos_token_id
        return frozenset(
            end_token if isinstance(end_token, list) else [] if end_token is None else [end_token]
        )

    @property
    def hidden_width(self) -> int:
        """Number of channels of a hidden state after the model's last norm."""
        return int(self.model.get_output_embeddings().weight.shape[-1])

    @property
    def is_bidirectional(self) -> bool:
        """Whether attention is bidirectional, which no KV cache supports."""
        return is_bidirectional(self._text_config)

    @property
    def fingerprint(self) -> str:
        """Hash that identifies the model's weights."""
        return compute_model_fingerprint(self.model)

    def make_cache(
        self, kv_cache: AnySpec | SequenceCache, tokenizer: Any = None
    ) -> TransformersCache:
        """Make a cache from a spec, or accept an empty cache; `auto` is tried on a text."""
        if not isinstance(kv_cache, TransformersCache | AnySpec):
            raise TypeError(
                f"kv_cache={short(kv_cache)}: a spec, or a cache of kvant's for this "
                f"{type(self.model).__name__}, kvant.cache_for(model, spec), is needed"
            )
        self.support.require_level(SupportLevel.ONE_SEQUENCE)
        if isinstance(kv_cache, TransformersCache):
            return kv_cache
        if is_auto(kv_cache):
            kv_cache = resolve_auto(self.model, kv_cache, make_trial(self.model, tokenizer))
        cache = make_model_cache(self.model, kv_cache)
        assert isinstance(cache, TransformersCache)  # encoder-decoders were refused above
        return cache

    @property
    def supports_chunked_prefill(self) -> bool:
        """Whether a forward of several tokens can continue a non-empty cache."""
        return supports_chunked_prefill(self.model)

    @torch.no_grad()
    def compute_logits(
        self, ids: list[int], cache: SequenceCache | None, num_logits: int = 1
    ) -> Tensor:
        """Return logits [num_logits, vocabulary] in float32 of the newest `ids`.

        The tokens are appended to the cache. Without a cache, `ids` is the whole sequence and
        nothing is stored.
        """
        device, first = self.model.device, 0 if cache is None else cache.length
        if cache is not None and first:
            if len(ids) == 1:
                return self.compute_batch_logits(ids, [first], cast(TransformersCache, cache))
            if not self.supports_chunked_prefill:
                rows = [self.compute_logits([token], cache) for token in ids]
                return torch.cat(rows[-num_logits:])
        positions = torch.arange(first, first + len(ids), device=device)[None]
        out = self._forward(torch.tensor([ids], device=device), positions, cache, num_logits)
        return out[0, -num_logits:].float()

    @torch.no_grad()
    def compute_batch_logits(
        self,
        tokens: list[int],
        positions: list[int],
        cache: TransformersCache,
        replayer: Replayer | None = None,
    ) -> Tensor:
        """Return logits [sequences, vocabulary] in float32 for one token of each sequence.

        The forward is replayed if the replayer supports it; the default is that of the cache.
        """
        replayer = replayer or self._replayers.get(cache)
        if replayer is None and (replayer := self.make_replayer()) is not None:
            self._replayers[cache] = replayer
        if replayer is not None and (out := replayer.compute_logits(cache, tokens)) is not None:
            return out[:, -1].to(torch.float32, copy=True)
        ids, position_ids = torch.tensor([tokens, positions], device=self.model.device)[:, :, None]
        out = self._forward(ids, position_ids, cache)[:, -1].float()
        if replayer is not None:
            replayer.confirm_forward()
        return out

    @torch.no_grad()
    def compute_hidden_states(self, ids: list[int], cache: TransformersCache) -> Tensor:
        """Return the hidden states [tokens, width] of `ids` after the model's last norm.

        The tokens are appended to the cache.
        """
        device, first = self.model.device, cache.length
        positions = torch.arange(first, first + len(ids), device=device)[None]
        out = self._headless_forward.run(torch.tensor([ids], device=device), positions, cache)
        hidden_states: Tensor = out.last_hidden_state[0]
        return hidden_states

    @cached_property
    def _headless_forward(self) -> TokenForward:
        return TokenForward(get_model_without_head(self.model))

    @property
    def captures_graphs(self) -> bool:
        """Whether forwards are captured as graphs, each for a fixed number of sequences."""
        return self._capture is not None

    @cached_property
    def _captures_on_cpu(self) -> bool:
        return self.model.device.type == "cpu" and get_library().functions is not None

    def make_replayer(self, buffers: ReplayBuffers | None = None) -> Replayer | None:
        """Make a replayer for the number of sequences that it sees first.

        Replayers that never run at the same time may share `buffers`.
        """
        if self._capture is not None:
            capture = make_capture_function(
                self._capture, self.model.generation_config.compile_config
            )
            return Replayer(self.model, self._forward, capture)
        if not self._captures_on_cpu:
            return None
        return Replayer(
            self.model, self._forward, partial(capture_forward, buffers=buffers), NATIVE_REPLAY
        )


class CallableDecoder:
    """Decode with a callable that maps ids and a cache to logits; its user makes the cache.

    If the strategy stores nothing, the cache is None.
    """

    max_context: int | None = None
    supports_chunked_prefill = True
    vocab_size: int | None = None
    end_tokens: frozenset[int] = frozenset()
    fingerprint: str | None = None

    def __init__(self, function: LogitsFunction) -> None:
        self.function = function

    def make_cache(self, kv_cache: AnySpec | SequenceCache, tokenizer: Any = None) -> SequenceCache:
        if isinstance(kv_cache, CacheSpec | SequenceCache):
            cache = Cache.from_spec(kv_cache) if isinstance(kv_cache, CacheSpec) else kv_cache
            if cache.spec.repeats_prompt:
                raise SpecError(
                    f"{describe_spec(cache.spec)} for a plain callable: the score needs a second "
                    "pass, which a transformers model can run; or use prune=keydiff:25%"
                )
            return cache
        raise TypeError(
            f"kv_cache={short(kv_cache)} for a plain callable, whose number of layers is unknown: "
            "give kv_cache=kvant.Cache(num_layers, spec)"
        )

    @torch.no_grad()
    def compute_logits(
        self, ids: list[int], cache: SequenceCache | None, num_logits: int = 1
    ) -> Tensor:
        return self.function(torch.tensor([ids]), cache)[0, -num_logits:].float()

    def compute_batch_logits(
        self, tokens: list[int], positions: list[int], cache: SequenceCache
    ) -> Tensor:
        """Return logits [1, vocabulary] of the one sequence that a callable supports."""
        return self.compute_logits(tokens, cache)


Decoder = TransformersDecoder | CallableDecoder


def make_decoder(model: nn.Module | LogitsFunction) -> Decoder:
    transformers_model = unwrap_model(model)
    if transformers_model is not None:
        return TransformersDecoder(transformers_model)
    if not callable(model):
        raise TypeError(
            f"{short(model)} is not a model: give a loaded transformers model, or a callable "
            "model(ids, cache) -> logits"
        )
    return CallableDecoder(model)


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
        self._alignment = None if prefixes is None else prefixes.chunk_alignment  # of chunks' ends
        chunk_size = self._alignment or chunk_size
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
        self._first_chunk_size = 1 if learns_size and self._alignment is None else chunk_size
        self.num_prompt_tokens = 0  # tokens of all prompts,
        self.num_cached_tokens = 0  # of these, tokens found in the cache,
        self.num_restored_tokens = 0  # and of these, tokens restored from a store
        self._tokens = list(tokens)  # tokens in the cache; more after a failed forward
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
        if len(tokens) <= self.threshold:
            return self.decoder.compute_logits(list(tokens), None)[-1]
        restored, checkpoints = range(0), list[int]()
        if self.prefixes is not None:
            restored = self._match_prefix(self.prefixes, tokens)
            checkpoints = self.prefixes.plan_checkpoints(tokens, self.cache.length, branch_points)
        num_cached = self.cache.length
        self.num_cached_tokens += num_cached
        self.num_restored_tokens += len(range(restored.start, min(restored.stop, num_cached)))
        try:
            logits = self._prefill_unread(tokens, progress, checkpoints, is_prompt=True)[-1]
        except Exception:
            self._reject(tokens[: restored.stop])
            raise
        if restored and logits.isnan().any():  # corrupt rows: no token can be sampled
            self._reject(tokens[: restored.stop])
        return logits

    def _match_prefix(self, prefixes: PrefixNamespace, tokens: Sequence[int]) -> range:
        """Adopt the cache with the longest prefix of a prompt; return the restored tokens."""
        cache = cast(TransformersCache, self.cache)
        if prefixes.needs_shapes(cache):  # before a store's tensors are accepted
            self._run_forward(tokens, 0, 1, num_logits=1)
            self.reset()
        restored = prefixes.fetch_from_store(tokens, cache)
        self.cache, self._num_prefilled = prefixes.match_prefix(tokens, cache, self._num_prefilled)
        self._tokens = list(tokens[: self.cache.length])
        prefixes.memory.record_lookup(len(tokens), self.cache.length)
        return restored

    def insert_prefix(self) -> None:
        """Share the pages of this sequence with prompts that begin with the same tokens."""
        self.align_cache(self.tokens, num_unread=0)  # rolls back a failed forward
        if self.prefixes is not None:
            cache = cast(TransformersCache, self.cache)
            self.prefixes.insert_prefix(self.tokens, cache, self._num_prefilled)

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
            return self.decoder.compute_batch_logits([tokens[-1]], [length], cache)
        num_previous = len(tokens) - num_logits
        if self.cache.length > num_previous:
            self.align_cache(tokens, num_logits)
        if self.cache.length == 0 and num_previous:
            self._prefill_unread(tokens[:num_previous])  # the sequence passed the threshold
        with self.cache.speculation_mode():
            if (begin := self.cache.length) < num_previous:  # accepted drafts after a checkpoint
                self._run_forward(tokens, begin, num_previous, num_logits=1)
            if num_logits > 1:
                self.cache.checkpoint()
            return self._run_forward(tokens, self.cache.length, len(tokens), num_logits)

    def align_cache(self, tokens: Sequence[int], num_unread: int = 1) -> None:
        """Rewind to the prefix shared with `tokens`, without their newest `num_unread`."""
        shared = max(0, min(count_shared_prefix(self.tokens, tokens), len(tokens) - num_unread))
        # Other readers of shared pages need exact rows.
        cache, exact = self.cache, self.prefixes is not None
        cache.rewind(cache.find_exact_rewind(shared) if exact else cache.reachable(shared))
        del self._tokens[self.cache.length :]
        self._num_prefilled = min(self._num_prefilled, len(self._tokens))
        if self._alignment is not None:  # a later chunk starts at an aligned length
            self._num_prefilled -= self._num_prefilled % self._alignment

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
        self.cache.reset()
        self._tokens, self._num_prefilled = [], 0

    def _reject(self, tokens: Sequence[int]) -> None:
        """Drop a restored prefix here and in the shared prefixes; do nothing if there is none."""
        if tokens and self.prefixes is not None:
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
        self._tokens[begin:] = tokens[begin:stop]
        if self.adaptive is not None:
            self.adaptive.make_room(self.cache, stop - begin)
        logits = self.decoder.compute_logits(list(tokens[begin:stop]), self.cache, num_logits)
        if self.adaptive is not None and begin == 0:  # the first forward tells the size of rows
            self.adaptive.make_room(self.cache, 0)
        return logits
