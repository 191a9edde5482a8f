"""Compute the logits after tokens, with a transformers model or a callable `model(ids, cache)`.

A decoder knows the model and how its forwards are replayed. It knows neither text nor sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from reprlib import repr as short
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvant.cache import Cache
from kvant.errors import SpecError
from kvant.generation.strategy import SequenceCache
from kvant.hf import (
    Support,
    SupportLevel,
    TokenForward,
    TransformersCache,
    check_text_model,
    compute_model_fingerprint,
    get_model_without_head,
    get_support,
    make_model_cache,
    supports_chunked_prefill,
    unwrap_model,
)
from kvant.probing import make_trial, resolve_auto
from kvant.recipes import AnySpec, CacheSpec
from kvant.replay import (
    CaptureFunction,
    ReplayBuffers,
    Replayer,
    get_graph_capture,
    make_replayer,
)
from kvant.spec import describe_spec
from kvant.spec.language import is_auto
from kvant.vision import ChunkInputs

LogitsFunction = Callable[[Tensor, Any], Tensor]  # (ids [1, T], cache) -> logits [1, T, vocabulary]


class TransformersDecoder:
    """Decode with a transformers model.

    Forwards of a token, and on a CPU of a token and its drafts, are replayed where possible: as a
    CUDA graph, or natively.
    """

    def __init__(self, model: PreTrainedModel, capture: CaptureFunction | None = None) -> None:
        check_text_model(model)
        self.model = model
        self._capture = capture or get_graph_capture(model)
        # Whether forwards are captured as graphs, each for a fixed number of sequences.
        self.captures_graphs = self._capture is not None
        # By cache and by tokens of a forward.
        self._replayers: WeakKeyDictionary[TransformersCache, dict[int, Replayer]] = (
            WeakKeyDictionary()
        )
        self._forward = TokenForward(model)
        # Forwards whose times tell nothing of later ones: they came before or during a capture, or
        # computed accepted drafts again.
        self.num_unsteady_forwards = 0

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
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

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
        self,
        ids: list[int],
        cache: SequenceCache | None,
        num_logits: int = 1,
        *,
        position_offset: int = 0,
    ) -> Tensor:
        """Return logits [num_logits, vocabulary] in float32 of the newest `ids`.

        The tokens are appended to the cache. Without a cache, `ids` is the whole sequence and
        nothing is stored. A `position_offset` is added to the positions of the tokens.
        """
        device, first = self.model.device, 0 if cache is None else cache.length
        if cache is not None and first:
            if len(ids) == 1:
                position = first + position_offset
                return self.compute_batch_logits([ids], [position], cast(TransformersCache, cache))[
                    0
                ]
            if not self.supports_chunked_prefill:
                rows = [
                    self.compute_logits([token], cache, position_offset=position_offset)
                    for token in ids
                ]
                return torch.cat(rows[-num_logits:])
        positions = torch.arange(first, first + len(ids), device=device)[None] + position_offset
        out = self._forward(torch.tensor([ids], device=device), positions, cache, num_logits)
        return out[0, -num_logits:].float()

    @torch.no_grad()
    def compute_image_logits(
        self, ids: list[int], cache: TransformersCache, inputs: ChunkInputs
    ) -> Tensor:
        """Return the logits [1, vocabulary] after a chunk of a prompt with images."""
        tokens = torch.tensor([ids], device=self.model.device)
        out = self._forward(tokens, inputs.positions, cache, 1, **inputs.arguments)
        return out[0, -1:].float()

    @torch.no_grad()
    def compute_batch_logits(
        self,
        tokens: list[list[int]],
        positions: list[int],
        cache: TransformersCache,
        replayer: Replayer | None = None,
    ) -> Tensor:
        """Return logits [sequences, T, vocabulary] in float32 for T tokens of each sequence.

        `positions` are those of the first ones. Tokens after the first are drafts: each reads the
        rows that it would read alone. The forward is replayed if the replayer supports it; the
        default is that of the cache.
        """
        num_new, device = len(tokens[0]), self.model.device
        if num_new > 1 and not self.supports_chunked_prefill:
            columns = [
                self.compute_batch_logits([[t] for t in ids], [p + i for p in positions], cache)
                for i, ids in enumerate(zip(*tokens, strict=True))
            ]
            return torch.cat(columns, 1)
        replayers = self._replayers.setdefault(cache, {})
        replayer = replayer or replayers.get(num_new)
        if replayer is None and (replayer := self.make_replayer(num_new=num_new)) is not None:
            replayers[num_new] = replayer
        ids = torch.tensor(tokens)
        position_ids = torch.tensor(positions)[:, None] + torch.arange(num_new)
        out = None if replayer is None else replayer.compute_logits(cache, ids, position_ids)
        self.num_unsteady_forwards += replayer is not None and replayer.is_warming_up
        if out is not None:
            return out[:, -num_new:].to(torch.float32, copy=True)
        with cache.speculation_mode():
            out = self._forward(ids.to(device), position_ids.to(device), cache, num_new)
        if replayer is not None:
            replayer.confirm_forward()
        return out[:, -num_new:].float()

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

    def make_replayer(
        self, buffers: ReplayBuffers | None = None, num_new: int = 1
    ) -> Replayer | None:
        """Make a replayer for the number of sequences that it sees first, of `num_new` tokens each.

        Replayers that never run at the same time may share `buffers`.
        """
        return make_replayer(
            self.model,
            self._forward,
            self._capture,
            compile_config=self.model.generation_config.compile_config,
            buffers=buffers,
            num_new=num_new,
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
    device = torch.device("cpu")  # of caches from files
    num_unsteady_forwards = 0

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
        self, tokens: list[list[int]], positions: list[int], cache: SequenceCache
    ) -> Tensor:
        """Return logits [1, T, vocabulary] of a token and its drafts, in one sequence."""
        with cache.speculation_mode():
            return self.compute_logits(tokens[0], cache, len(tokens[0]))[None]


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
