"""What the loop asks of a model: logits for new tokens, and a memory that it can rewind.

The loop knows no transformer. A model of transformers, or any callable `model(ids, cache)`, becomes
a `Decoder` here.
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
from kvant.contracts import Snapshot
from kvant.hf import (
    NATIVELY,
    Capture,
    HostCache,
    Level,
    Replayer,
    Support,
    TokenForward,
    cache_for,
    captured,
    capturing,
    check_continues,
    continues,
    identity,
    support_of,
    unwrapped,
)
from kvant.native import library
from kvant.probing import resolved, trial
from kvant.recipes import AnySpec, CacheSpec
from kvant.recording import Blocks, recorded
from kvant.spec.auto import is_auto

Call = Callable[[Tensor, Any], Tensor]  # (ids [1, T], cache) -> logits [1, T, vocabulary]


@runtime_checkable
class Memory(Protocol):
    """A cache of one sequence: `kvant.Cache`, or the one of a host's model."""

    @property
    def length(self) -> int: ...
    @property
    def held(self) -> int: ...
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
    def widen(self, slack: int) -> None: ...
    def speculating(self) -> AbstractContextManager[None]: ...
    def recode(self, spec: AnySpec) -> None: ...
    def shared_snapshot(self) -> Snapshot: ...
    def restore(self, snapshot: Snapshot) -> None: ...
    @property
    def before_prune(self) -> int | None: ...
    def prompting(self) -> AbstractContextManager[None]: ...
    def reset(self) -> None: ...
    def fork(self) -> Memory: ...
    def stats(self) -> dict[str, Any]: ...


class Decoder(Protocol):
    """A model that continues one sequence."""

    @property
    def context(self) -> int | None:
        """The longest sequence that the model knows positions for."""

    @property
    def continues(self) -> bool:
        """Does a forward of several tokens go on from what the memory holds?"""

    @property
    def vocabulary(self) -> int | None:
        """How many tokens it knows."""

    @property
    def end_tokens(self) -> frozenset[int]: ...
    @property
    def identity(self) -> str | None:
        """Tells one model from another, where that can be known."""

    def memory(self, kv_cache: AnySpec | Memory, tokenizer: Any = None) -> Memory:
        """A new one by a spec, or the one that is given; what `auto` is, a text tells."""

    def logits(self, ids: list[int], memory: Memory | None, last: int = 1) -> Tensor:
        """[last, vocabulary] in float32 for the newest of `ids`, which the memory now holds.

        Without a memory `ids` are all there is, and nothing is kept.
        """


class HostDecoder:
    """A model of transformers.

    Single tokens are replayed, where that can be: on a GPU from a graph, on a CPU from a recording.
    """

    def __init__(self, model: PreTrainedModel, capture: Capture | None = None) -> None:
        check_continues(model)
        self.model = model
        self._capture = capture or (captured if model.device.type == "cuda" else None)
        self._replayers: WeakKeyDictionary[HostCache, Replayer] = WeakKeyDictionary()
        self._forward = TokenForward(model)

    @cached_property
    def support(self) -> Support:
        """What the model supports: the first decoder of its class and configuration finds out."""
        return support_of(self.model)

    @property
    def context(self) -> int | None:
        return self._configured("max_position_embeddings")

    @property
    def vocabulary(self) -> int | None:
        return self._configured("vocab_size")

    @property
    def end_tokens(self) -> frozenset[int]:
        told = self.model.generation_config.eos_token_id
        return frozenset(told if isinstance(told, list) else [] if told is None else [told])

    @property
    def identity(self) -> str:
        return identity(self.model)

    def memory(self, kv_cache: AnySpec | Memory, tokenizer: Any = None) -> HostCache:
        if not isinstance(kv_cache, HostCache | AnySpec):
            raise TypeError(
                f"kv_cache={short(kv_cache)}: a spec, or a cache of kvant's for this "
                f"{type(self.model).__name__}, kvant.cache_for(model, spec), is needed"
            )
        self.support.require(Level.ALONE)
        if isinstance(kv_cache, HostCache):
            return kv_cache
        if is_auto(kv_cache):
            kv_cache = resolved(self.model, kv_cache, trial(self.model, tokenizer))
        cache = cache_for(self.model, kv_cache)
        assert isinstance(cache, HostCache)  # others read an encoder, and are refused
        return cache

    @property
    def continues(self) -> bool:
        return continues(self.model)

    def _configured(self, name: str) -> int | None:
        config = self.model.config.get_text_config(decoder=True)
        return cast("int | None", getattr(config, name, None))

    @torch.no_grad()
    def logits(self, ids: list[int], memory: Memory | None, last: int = 1) -> Tensor:
        device, first = self.model.device, 0 if memory is None else memory.length
        if memory is not None and first:
            if len(ids) > 1 and not self.continues:
                return torch.cat([self.logits([token], memory) for token in ids])[-last:]
            if len(ids) == 1:
                cache = cast(HostCache, memory)
                return self.rows(ids, [first], cache, self._replayer_of(cache))
        positions = torch.arange(first, first + len(ids), device=device)[None]
        out = self._forward(torch.tensor([ids], device=device), positions, memory, last)
        return out[0, -last:].float()

    @torch.no_grad()
    def rows(
        self,
        tokens: list[int],
        positions: list[int],
        memory: HostCache,
        replayer: Replayer | None = None,
    ) -> Tensor:
        """[sequences, vocabulary] in float32 behind one token of each, at its position.

        It is replayed where there is a replayer, and where that can.
        """
        if replayer is not None and (out := replayer.logits(memory, tokens)) is not None:
            return out[:, -1].to(torch.float32, copy=True)
        both = torch.tensor([tokens, positions], device=self.model.device)
        ids, places = both[:, :, None]
        out = self._forward(ids, places, memory)[:, -1].float()
        if replayer is not None:
            replayer.passed()
        return out

    @property
    def captures(self) -> bool:
        """Are forwards captured as graphs, each of which is there for one number of sequences?"""
        return self._capture is not None

    @cached_property
    def _records(self) -> bool:
        return self.model.device.type == "cpu" and library().functions is not None

    def replayer(self, blocks: Blocks | None = None) -> Replayer | None:
        """A new one, for so many sequences as it sees first.

        Those that are never asked at one time may share the memory of their recordings.
        """
        if self._capture is not None:
            capture = capturing(self._capture, self.model.generation_config.compile_config)
            return Replayer(self.model, self._forward, capture)
        if not self._records:
            return None
        return Replayer(self.model, self._forward, partial(recorded, blocks=blocks), NATIVELY)

    def _replayer_of(self, cache: HostCache) -> Replayer | None:
        if cache not in self._replayers and (new := self.replayer()) is not None:
            self._replayers[cache] = new
        return self._replayers.get(cache)


class CallDecoder:
    """Any callable that takes ids and a cache and gives logits; its cache is made by its user.

    Where a strategy keeps nothing, the cache that it gets is None.
    """

    context: int | None = None
    continues = True
    vocabulary: int | None = None
    end_tokens: frozenset[int] = frozenset()
    identity: str | None = None

    def __init__(self, call: Call) -> None:
        self.call = call

    def memory(self, kv_cache: AnySpec | Memory, tokenizer: Any = None) -> Memory:
        if isinstance(kv_cache, CacheSpec):
            return Cache(spec=kv_cache)
        if isinstance(kv_cache, Memory):
            return kv_cache
        raise TypeError(
            f"kv_cache={short(kv_cache)} for a plain callable, whose layers nobody knows: "
            "give kv_cache=kvant.Cache(num_layers, spec)"
        )

    @torch.no_grad()
    def logits(self, ids: list[int], memory: Memory | None, last: int = 1) -> Tensor:
        return self.call(torch.tensor([ids]), memory)[0, -last:].float()


def decoder_of(model: nn.Module | Call) -> Decoder:
    inside = unwrapped(model)
    if inside is not None:
        return HostDecoder(inside)
    if not callable(model):
        raise TypeError(
            f"{short(model)} is no model: a loaded one of transformers is needed, or a callable "
            "model(ids, cache) -> logits"
        )
    return CallDecoder(model)
