"""Decoders: compute the logits of new tokens over a cache that can be rewound.

The generation loop needs no transformers API. This module wraps a transformers model, or any
callable `model(ids, cache)`, as a `Decoder`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property, partial
from reprlib import repr as short
from typing import Any, Protocol, cast, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvant.cache import Cache
from kvant.capture import ReplayBuffers, capture_forward
from kvant.contracts import Snapshot
from kvant.hf import (
    NATIVE_REPLAY,
    CaptureFunction,
    Replayer,
    Support,
    SupportLevel,
    TokenForward,
    TransformersCache,
    cache_for,
    capture_graph,
    check_text_model,
    compute_model_fingerprint,
    get_support,
    make_capture_function,
    supports_chunked_prefill,
    unwrap_model,
)
from kvant.native import get_library
from kvant.probing import make_trial, resolve_auto
from kvant.recipes import AnySpec, CacheSpec
from kvant.spec.auto import is_auto

LogitsFunction = Callable[[Tensor, Any], Tensor]  # (ids [1, T], cache) -> logits [1, T, vocabulary]


@runtime_checkable
class SequenceCache(Protocol):
    """A cache of one sequence: `kvant.Cache`, or the cache of a transformers model."""

    @property
    def length(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def capacity(self) -> int | None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def spec(self) -> CacheSpec: ...

    backend: str | None

    def nbytes_after(self, coming: int, spec: AnySpec | None = None) -> int: ...
    def reachable(self, to: int) -> int: ...
    def rewind(self, to: int) -> None: ...
    def checkpoint(self) -> None: ...
    def ensure_slack(self, slack: int) -> None: ...
    def speculation_mode(self) -> AbstractContextManager[None]: ...
    def recode(self, spec: AnySpec) -> None: ...
    def shared_snapshot(self) -> Snapshot: ...
    def restore(self, snapshot: Snapshot) -> None: ...
    @property
    def tokens_until_prune(self) -> int | None: ...
    def prompt_mode(self) -> AbstractContextManager[None]: ...
    def reset(self) -> None: ...
    def fork(self) -> SequenceCache: ...
    def stats(self) -> dict[str, Any]: ...


class Decoder(Protocol):
    """A model that continues one sequence."""

    @property
    def max_context(self) -> int | None:
        """Longest sequence that the model has positions for."""

    @property
    def supports_chunked_prefill(self) -> bool:
        """Whether a forward of several tokens can continue a non-empty cache."""

    @property
    def vocab_size(self) -> int | None:
        """Number of tokens in the vocabulary."""

    @property
    def end_tokens(self) -> frozenset[int]: ...
    @property
    def fingerprint(self) -> str | None:
        """Hash that identifies the model's weights, or None if they are unknown."""

    def make_cache(self, kv_cache: AnySpec | SequenceCache, tokenizer: Any = None) -> SequenceCache:
        """Make a cache from a spec, or accept an empty cache; `auto` is tried on a text."""

    def compute_logits(
        self, ids: list[int], cache: SequenceCache | None, num_logits: int = 1
    ) -> Tensor:
        """Return logits [num_logits, vocabulary] in float32 of the newest `ids`.

        The tokens are appended to the cache. Without a cache, `ids` is the whole sequence and
        nothing is stored.
        """


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
        return self._get_config_value("max_position_embeddings")

    @property
    def vocab_size(self) -> int | None:
        return self._get_config_value("vocab_size")

    @property
    def end_tokens(self) -> frozenset[int]:
        end_token = self.model.generation_config.eos_token_id
        return frozenset(
            end_token if isinstance(end_token, list) else [] if end_token is None else [end_token]
        )

    @property
    def fingerprint(self) -> str:
        return compute_model_fingerprint(self.model)

    def make_cache(
        self, kv_cache: AnySpec | SequenceCache, tokenizer: Any = None
    ) -> TransformersCache:
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
        cache = cache_for(self.model, kv_cache)
        assert isinstance(cache, TransformersCache)  # encoder-decoders were refused above
        return cache

    @property
    def supports_chunked_prefill(self) -> bool:
        return supports_chunked_prefill(self.model)

    def _get_config_value(self, name: str) -> int | None:
        config = self.model.config.get_text_config(decoder=True)
        return cast("int | None", getattr(config, name, None))

    @torch.no_grad()
    def compute_logits(
        self, ids: list[int], cache: SequenceCache | None, num_logits: int = 1
    ) -> Tensor:
        device, first = self.model.device, 0 if cache is None else cache.length
        if cache is not None and first:
            if len(ids) > 1 and not self.supports_chunked_prefill:
                return torch.cat([self.compute_logits([token], cache) for token in ids])[
                    -num_logits:
                ]
            if len(ids) == 1:
                cache = cast(TransformersCache, cache)
                return self.compute_batch_logits(ids, [first], cache, self._get_replayer(cache))
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

        The forward is replayed if there is a replayer that supports it.
        """
        if replayer is not None and (out := replayer.compute_logits(cache, tokens)) is not None:
            return out[:, -1].to(torch.float32, copy=True)
        ids, position_ids = torch.tensor([tokens, positions], device=self.model.device)[:, :, None]
        out = self._forward(ids, position_ids, cache)[:, -1].float()
        if replayer is not None:
            replayer.confirm_forward()
        return out

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

    def _get_replayer(self, cache: TransformersCache) -> Replayer | None:
        if cache not in self._replayers and (new := self.make_replayer()) is not None:
            self._replayers[cache] = new
        return self._replayers.get(cache)


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
        if isinstance(kv_cache, CacheSpec):
            return Cache(spec=kv_cache)
        if isinstance(kv_cache, SequenceCache):
            return kv_cache
        raise TypeError(
            f"kv_cache={short(kv_cache)} for a plain callable, whose number of layers is unknown: "
            "give kv_cache=kvant.Cache(num_layers, spec)"
        )

    @torch.no_grad()
    def compute_logits(
        self, ids: list[int], cache: SequenceCache | None, num_logits: int = 1
    ) -> Tensor:
        return self.function(torch.tensor([ids]), cache)[0, -num_logits:].float()


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
