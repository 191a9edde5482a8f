"""A cache of ours in a host's hands: every verb under the host's name, on all layers or on none."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvant.cache import Cache
from kvant.contracts import Snapshot
from kvant.errors import CacheError
from kvant.hf.assembly import foreign, host_layer, memories, widened
from kvant.hf.detect import HostLayer
from kvant.hf.explanation import Explanation
from kvant.hf.layers import AttentionLayer, Context
from kvant.hf.notes import Notes
from kvant.hf.recurrence import Recurrence
from kvant.recipes import CacheSpec

RECORDED = 64  # rows: how far a speculation may go back exactly


class HostCache(TransformersCache):
    """The memory of one batch of sequences, for a model of the host's.

    `states` is the cache as the rest of kvant knows it. Layers that only the host understands are
    of its own classes; they go along where they can, and what they cannot do is refused.
    """

    def __init__(
        self,
        layers: Sequence[HostLayer],
        spec: CacheSpec,
        *,
        padding: Sequence[int] | None = None,
        cross: bool = False,
    ) -> None:
        states = Cache(spec=spec, states=memories(layers, spec))
        told = None if padding is None else tuple(padding)
        self._hold(tuple(layers), Context(states, told, cross=cross), {})

    def _hold(self, host: tuple[HostLayer, ...], context: Context, own: dict[int, Any]) -> None:
        """`own` are the layers of the host's classes that exist already."""
        self.host = host
        self.context = context
        self._turn = False
        layers = [host_layer(context, i, one, own.get(i)) for i, one in enumerate(host)]
        super().__init__(layers=layers)
        followers = context.states.followers
        self._attending = [index for index, one in enumerate(host) if one.attends]
        self._first = next((index for index, one in enumerate(host) if one.recurs), -1)
        self._recurrences = tuple(one for one in followers if isinstance(one, Recurrence))

    @property
    def states(self) -> Cache:
        return self.context.states

    @property
    def spec(self) -> CacheSpec:
        return self.states.spec

    # ---- what a model calls

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        if layer_idx >= len(self.layers):
            raise CacheError(
                f"rows for layer {layer_idx} of a cache for {len(self.layers)}: it was made for "
                "another model, or its configuration does not tell all layers"
            )
        updated: tuple[Tensor, Tensor] = self.layers[layer_idx].update(
            key_states, value_states, *args, **kwargs
        )
        for follower in self._recurrences:
            follower.check()
        return updated

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        if (layer_idx, state_idx) == (self._first, 0):
            if not self._attending:
                self._count(1)  # if there are more, `update_conv_state` will say so
            elif layer_idx < self._attending[-1]:
                for follower in self._recurrences:
                    follower.touch()
        state: Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        if (layer_idx, state_idx) == (self._first, 0) and not self._attending:
            self._count(conv_states.shape[-1] - 1)
        state: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen; a forward that has not reached all layers does not count."""
        if self.states.layers:
            return self.states.length
        length: int = super().get_seq_length(layer_idx)
        return length

    @property
    def is_linear(self) -> list[bool]:
        """Layers without keys and values."""
        return [
            isinstance(layer, LinearAttentionCacheLayerMixin)
            and not isinstance(layer, CacheLayerMixin)
            for layer in self.layers
        ]

    # ---- the verbs

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens; the host counts them as a negative number."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): a negative number, of the tokens to remove, is needed"
            )
        self._move()
        self.states.trim(-tokens_to_remove)
        for layer in self._foreign():
            layer.crop(tokens_to_remove)

    def rewind(self, to: int) -> None:
        """Go back to length `to`; every layer, or an error and none."""
        self._only_ours("rewind")
        self._move()
        self.states.rewind(to)

    def checkpoint(self) -> None:
        """Make the present length one that recurrent layers can come back to."""
        self.states.checkpoint()

    def reset(self) -> None:
        self._move()
        self.context.begun = False
        self.states.reset()
        for layer in self._foreign():
            layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)
        for layer in self._foreign():
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)
        for layer in self._foreign():
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(torch.arange(self.states.batch).repeat_interleave(repeats))
        for layer in self._foreign():
            layer.batch_repeat_interleave(repeats)

    def activate_past_recording(self) -> None:
        """Speculation begins: go back exactly, and read a chunk as single tokens would be."""
        super().activate_past_recording()
        if self.context.recording:
            return
        self.context.recording = True
        if self.states.length:
            self.states.checkpoint()
        self._widen(RECORDED)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Let a layer wait in the memory of the processor; small ones stay, unless asked."""
        if not (only_non_sliding and self.is_sliding[layer_idx]):
            self._move()
            self.layers[layer_idx].offload()

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Bring a layer back to where its rows are made."""
        if not (only_non_sliding and self.is_sliding[layer_idx]):
            self._move()
            self.layers[layer_idx].prefetch()

    def fork(self) -> HostCache:
        """A second cache with the same tokens, independent of this one from now on."""
        context, states = self.context, self.states.fork()
        notes = copy.deepcopy(context.notes)
        own = {i: copy.deepcopy(layer) for i, layer in enumerate(self.layers) if foreign(layer)}
        twin = HostCache.__new__(HostCache)
        twin._hold(self.host, replace(context, states=states, notes=notes), own)
        for old, new in zip(self.layers, twin.layers, strict=True):
            if isinstance(old, AttentionLayer) and old.is_initialized:
                new.dtype, new.device, new.is_initialized = old.dtype, old.device, True
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> HostCache:
        return self.fork()

    def snapshot(self) -> Snapshot:
        self._only_ours("snapshot")
        return self.states.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self._only_ours("restore")
        self._move()
        self.states.restore(snapshot)

    # ---- what there is to know

    def stats(self) -> dict[str, Any]:
        """What there is and what happened, in numbers."""
        total = Notes()
        for notes in self.context.notes.values():
            total.add(notes)
        return self.states.stats() | {
            "fused": total.fused,
            "prompts": total.prompts,
            "materialized": sum(total.materialized.values()),
            "masks": total.masks,
        }

    def explain(self) -> Explanation:
        """How each layer is stored, and whether attention is computed on the stored bytes."""
        return Explanation.of(self.host, self.states, self.context.notes)

    def __repr__(self) -> str:
        return f"HostCache({self.states!r})"

    # ---- within

    @property
    def _is_user_defined(self) -> bool:
        return self._turn

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        """`generate` marks a cache that it is given: what it holds is the end of a turn."""
        self._turn = value
        if value and self.states.length and self._recurrences:
            self.states.checkpoint()

    def _foreign(self) -> list[Any]:
        return [layer for layer in self.layers if foreign(layer)]

    def _only_ours(self, verb: str) -> None:
        kinds = sorted({type(layer).__name__ for layer in self._foreign()})
        if kinds:
            raise CacheError(f"{verb}: {', '.join(kinds)} of transformers cannot take part")

    def _count(self, tokens: int) -> None:
        """Only recurrent layers: nobody is appended to, so they are told how long they are."""
        length = self.states.length + tokens
        for follower in self._recurrences:
            follower.follow(length)

    def _select(self, index: Tensor) -> None:
        self._move()
        if self.states.batch:
            self.states.select(index)
        told = self.context.padding
        if told is not None:
            start = self.context.start(max(int(index.max()) + 1, len(told))) or []
            self.context.padding = tuple(start[i] for i in index.tolist())

    def _move(self) -> None:
        """What the host holds of the rows is not theirs any more."""
        for layer in self.layers:
            if isinstance(layer, AttentionLayer):
                layer.expire()

    def _widen(self, slack: int) -> None:
        """Keep what an exact rewind of `slack` tokens needs from now on."""
        spec, old = widened(self.spec, slack), self.states
        if spec == self.spec:
            return
        states = Cache(spec=spec, states=memories(self.host, spec, old))
        if old.length:
            states.restore(old.exposed())
        self._move()
        self.context.states = states
