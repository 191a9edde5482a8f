"""A cache of ours in a host's hands: every verb under the host's name, on all layers or on none."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvant.cache import Cache
from kvant.errors import CacheError
from kvant.hf.context import Context
from kvant.hf.detect import HostLayer
from kvant.hf.layers import layer_for, recurrences
from kvant.hf.recurrence import Pace
from kvant.hf.verbs import Verbs
from kvant.recipes import CacheSpec

RECORDED = 32  # tokens of a draft; a longer one widens the cache again,
LONGEST = 256  # but a chunk beyond this is another prompt
GENERATE_CODE = inspect.unwrap(GenerationMixin.generate).__code__


class HostCache(Verbs, TransformersCache):
    """The memory of one batch of sequences, for a model of the host's.

    `states` is the cache as the rest of kvant knows it. Layers that only the host understands are
    of its own classes; they go along where they can, and what they cannot do is refused.
    """

    def __init__(
        self,
        described: Sequence[HostLayer],
        spec: CacheSpec,
        *,
        padding: Sequence[int] | None = None,
        columns: int | None = None,
        cross: bool = False,
        attachable: bool = False,
    ) -> None:
        states = Cache(spec=spec, host_states=recurrences(described, spec))
        told = None if padding is None else tuple(padding)
        self._hold(tuple(described), Context(states, told, columns, cross, attachable), {})

    def _hold(
        self, described: tuple[HostLayer, ...], context: Context, own: dict[int, Any]
    ) -> None:
        """`own` are the layers of the host's classes that exist already."""
        self.described = described
        self.context = context
        self._turn = False
        self._watched = False  # is this the first or second forward of a `generate`?
        self._first = 0  # tokens of the first one
        self._opening = next((i for i, one in enumerate(described) if one.attends), None)
        host_states: list[Any] = context.states.host_states
        self._pace = Pace(described, host_states)
        layers = [layer_for(context, i, one, own.get(i)) for i, one in enumerate(described)]
        super().__init__(layers=layers)

    # ---- what a model calls

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        if layer_idx >= len(self.described):
            raise CacheError(
                f"rows for layer {layer_idx} of a cache for {len(self.described)}: it was made for "
                "another model, or its configuration does not tell all layers"
            )
        if self._watched and layer_idx == self._opening:
            self._check_second(key_states.shape[2])
        if self.context.recording and layer_idx == self._opening:
            count = key_states.shape[2]
            self._record(min(count, LONGEST))
            self.states.recording = self.states.length > 0 and count <= LONGEST
        updated: tuple[Tensor, Tensor] = self.layers[layer_idx].update(
            key_states, value_states, *args, **kwargs
        )
        if self._pace.recurrences:
            self._pace.check()
        return updated

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        if self._pace.again(layer_idx, state_idx):
            self.states.rollback()  # before this forward brings a state
        self._pace.asked(layer_idx, state_idx, rows=not self.states.whole)
        state: Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._pace.passed(layer_idx, state_idx, conv_states.shape[-1])
        state: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen; a forward that has not reached all layers does not count."""
        states = self.context.states
        if states.contents.leaves:
            return states.length
        length: int = super().get_seq_length(layer_idx)
        return length

    @property
    def is_linear(self) -> list[bool]:
        """Layers without keys and values; the host knows only its own class that has both."""
        return [
            isinstance(layer, LinearAttentionCacheLayerMixin)
            and not isinstance(layer, CacheLayerMixin)
            for layer in self.layers
        ]

    @property
    def has_shapes(self) -> bool:
        """Whether all layers have tensors: what a file or a store says can be compared with them.

        So it is behind a first forward, also of a cache that was reset.
        """
        rows = all(leaf.storage is not None for _, leaf in self.states.contents.attention())
        return rows and all(state.has_shapes for state in self._pace.recurrences)

    # ---- the verbs

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens; the host counts them as a negative number."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): a negative number, of the tokens to remove, is needed"
            )
        self._expire()
        foreign, to = self._foreign().values(), max(0, self.states.length + tokens_to_remove)
        if foreign and self.states.reachable(to) == to:
            for layer in foreign:  # theirs may refuse, ours cannot any more
                layer.crop(tokens_to_remove)
        self._go_back(to)

    def trim(self, count: int) -> int:
        """Drop the newest `count` tokens, or all there are; how many that was."""
        if count < 0:
            raise ValueError(f"trim({count}): 0 or more tokens")
        dropped = min(count, self.length)
        self.crop(-dropped)
        return dropped

    def reset(self) -> None:
        """Forget the tokens, keep the memory."""
        self._forget()
        self.states.reset()
        for layer in self._foreign().values():
            layer.reset()

    def clear(self) -> None:
        """Forget the tokens and free the memory."""
        self._forget()
        self.states.clear()
        for index in self._foreign():
            self.layers[index] = layer_for(self.context, index, self.described[index], None)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)
        for layer in self._foreign().values():
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keep these sequences of the batch: whatever PyTorch takes in brackets."""
        chosen = _chosen(indices, self.states.batch) if self.states.batch else indices
        self._select(chosen)
        for layer in self._foreign().values():
            layer.batch_select_indices(chosen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._expire()
        self.states.repeat(repeats)  # told padding needs nothing: `start` repeats it by itself
        for layer in self._foreign().values():
            layer.batch_repeat_interleave(repeats)

    def activate_past_recording(self) -> None:
        """Speculation begins: go back exactly, and read a chunk as single tokens would be."""
        super().activate_past_recording()
        self.context.recording = True
        if self.states.length:
            self.states.checkpoint()
        self._record(RECORDED)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Let a layer wait in the memory of the processor; small ones stay, unless asked."""
        if not (only_non_sliding and self.is_sliding[layer_idx]):
            self.layers[layer_idx].offload()

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Bring a layer back to where its rows are made."""
        if not (only_non_sliding and self.is_sliding[layer_idx]):
            self.layers[layer_idx].prefetch()

    def fork(self) -> HostCache:
        """A second cache with the same tokens, which shares pages until one writes to them."""
        return self.around(self.states.fork(), self.context.padding)

    def extract(self, sequence: int) -> HostCache:
        """A cache of one of the sequences alone, which shares its pages."""
        self._check_ours("extract")
        return self.around(self.states.extract(sequence))

    def remove(self, sequence: int) -> None:
        """Let one of the sequences go; the others stay as they are."""
        self._check_ours("remove")
        rest = [i for i in range(self.states.batch) if i != sequence]
        self.states.extract(sequence)  # refuses a number that there is not
        self.batch_select_indices(torch.tensor(rest))

    def merged(self, others: Sequence[Any]) -> HostCache:
        """The sequences of this cache and of others of the same model under one."""
        self._check_alike(others)
        return self.around(self.states.merged([cache.states for cache in others]))

    def extended(self, other: HostCache) -> HostCache:
        """Another cache of the same model in these pools, which begins with the tokens of this."""
        self._check_alike([other])
        return self.around(self.states.extended(other.states))

    def _check_alike(self, others: Sequence[Any]) -> None:
        for cache in (self, *others):
            if not isinstance(cache, HostCache) or cache.described != self.described:
                raise ValueError("caches of different models: they have no layers in common")
            cache._check_ours("merge")

    def around(self, states: Cache, padding: tuple[int, ...] | None = None) -> HostCache:
        """A cache of the same model with other states."""
        notes, replays = copy.deepcopy((self.context.notes, self.context.replays))
        context = replace(
            self.context, states=states, padding=padding, notes=notes, replays=replays
        )
        twin = HostCache.__new__(HostCache)
        twin._hold(
            self.described, context, copy.deepcopy(self._foreign(), {id(self.context): context})
        )
        for old, new in zip(self._attending(), twin._attending(), strict=True):
            new.like(old)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> HostCache:
        return self.fork()

    def __repr__(self) -> str:
        return f"HostCache({self.states!r})"

    # ---- within

    @property
    def _is_user_defined(self) -> bool:
        return self._turn

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        """`generate` marks a cache that it is given: what it holds is the end of a turn."""
        self._turn = self._watched = value
        self._first = 0
        if value and self._pace.recurrences and self.states.length:
            self.states.checkpoint()

    def _check_second(self, count: int) -> None:
        """Refuse a `generate` without use_cache: each step brings all tokens and one more.

        A forward after the end of `generate` may bring as many, which are new ones.
        """
        first, self._first = self._first, count
        if not first:
            return
        self._watched = False
        if count == first + 1 and not self.context.recording and _is_generating():
            raise CacheError(
                f"{first} tokens and then {count}: generate reads the whole text at every step, "
                "since use_cache=False (look at model.generation_config), and would fill this "
                "cache with copies of it; say generate(..., use_cache=True), or give no cache"
            )

    def _forget(self) -> None:
        """What was learnt of a batch."""
        for layer in self._attending():
            layer.forget()
        self.context.begun, self.context.padding = False, None

    def _select(self, index: Any) -> None:
        """The verb says which of the batch; padding that was told is of the batch too."""
        self._expire()
        if self.states.batch == 0:
            return
        start = self.context.start(self.states.batch)
        self.states.select(index)
        if start is not None:
            self.context.padding = tuple(start[i] for i in index.tolist())

    def _record(self, count: int) -> None:
        """Let all of the next chunk be taken back exactly."""
        if count > self.context.slack:
            self.widen(2 * count)


def _is_generating() -> bool:
    """Return whether `generate` of transformers is running: rows do not say their positions."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not GENERATE_CODE:
        frame = frame.f_back
    return frame is not None


def _chosen(indices: Any, batch: int) -> Tensor:
    """The sequences that `rows[indices, ...]` keeps; an index that fails, fails as there."""
    indices = indices.cpu() if isinstance(indices, Tensor) else indices
    try:
        chosen = torch.arange(batch)[indices, ...]
    except (IndexError, TypeError) as error:
        raise type(error)(f"sequences {indices} of a batch of {batch}: {error}") from error
    if chosen.ndim != 1 or not len(chosen):
        raise ValueError(f"sequences {indices} of a batch of {batch}: one or more, in one row")
    return chosen
