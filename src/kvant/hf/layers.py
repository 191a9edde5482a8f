"""The layers of a host's cache: they translate, and hand over to the states.

The host tells a layer's type by `is_sliding` and sizes its masks with `get_mask_sizes`: both speak
of the model's own layer, never of how its rows are stored.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
)

from kvant.cache import Cache
from kvant.contracts import View
from kvant.errors import CacheError
from kvant.hf.detect import HostLayer, narrowed
from kvant.hf.handles import Handle, pair
from kvant.hf.latents import LatentReading
from kvant.hf.notes import Notes
from kvant.hf.reading import CrossReading, Reading, Source
from kvant.hf.recurrence import Recurrence
from kvant.layers import Attention, Group
from kvant.recipes import LayerSpec

log = logging.getLogger("kvant")
NARROW = "a window that the model itself knows nothing of is seen by kvant's attention alone"


@dataclass(eq=False)
class Context:
    """What the layers of one cache share."""

    states: Cache
    padding: tuple[int, ...] | None = None  # columns of left padding, where they were told
    recording: bool = False  # speculation: a chunk is read as single tokens would be
    cross: bool = False  # the rows of an encoder
    begun: bool = False  # a forward has brought rows to every layer
    notes: dict[int, Notes] = field(default_factory=dict)

    def start(self, batch: int) -> list[int] | None:
        """The padding of each row of a batch; beams repeat their sequence."""
        if self.padding is None:
            return None
        times, rest = divmod(batch, len(self.padding))
        if rest:
            raise ValueError(f"rows of {batch} sequences, padding of {len(self.padding)}")
        return [p for p in self.padding for _ in range(times)]


class AttentionLayer(CacheLayerMixin):
    """One attention layer of the model, stored as its recipe says."""

    is_compileable = False
    is_croppable = True

    def __init__(self, context: Context, index: int, host: HostLayer) -> None:
        self.context = context
        self.index = index
        self.host = host
        self.is_sliding = host.window is not None
        self.notes = context.notes.setdefault(index, Notes())
        self.dtype = torch.float32
        self._reading: Reading | None = None
        super().__init__()

    @property
    def state(self) -> Attention:
        state = self.context.states[self.index]
        part = state["attention"] if isinstance(state, Group) else state
        assert isinstance(part, Attention)
        return part

    @property
    def recipe(self) -> LayerSpec:
        return self.state.spec

    @property
    def keys(self) -> Handle | None:
        """What cross-attention reads, step after step."""
        return None if self.state.length == 0 else self._pair(self._again())[0]

    @keys.setter
    def keys(self, value: None) -> None:
        """The host's constructor clears it."""

    @property
    def values(self) -> Handle | None:
        return None if self.state.length == 0 else self._pair(self._again())[1]

    @values.setter
    def values(self, value: None) -> None: ...

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated before the first rows."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized or self.dtype != key_states.dtype:
            self.lazy_initialization(key_states, value_states)
        if key_states.requires_grad:
            _warn_of_gradients()
        count, state = key_states.shape[2], self.state
        self._check_begun(count)
        chunk = self.context.recording and count > 1 and state.length > 0
        start = self.context.start(key_states.shape[0]) if state.length == 0 else None
        rows = self._rows(key_states, value_states)
        view = state.append(*rows, start=start, prefill="stored" if chunk else None)
        if view.columns == count and self._sees_itself():
            self.notes.prompts += 1
            self.expire()
            return key_states, value_states
        return self._pair(self._read(view, count))

    def get_seq_length(self) -> int:
        return self.context.states.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the keys that the next `update` returns: how many, and the first one's column."""
        length = self.get_seq_length()
        past = length if self.host.window is None else min(length, self.host.window - 1)
        return past + query_length, length - past

    def get_max_length(self) -> int:
        limits = (self.host.window, self.recipe.capacity)
        return min((limit for limit in limits if limit is not None), default=-1)

    def expire(self) -> None:
        """What the host was handed before is not to be read any more."""
        if self._reading is not None:
            self._reading.current = False
        self._reading = None

    def reset(self) -> None:
        raise CacheError("layers go together: use the verb of the cache")

    reorder_cache = crop = reset

    def offload(self) -> None:
        """Lie in the memory of the processor until `prefetch`."""
        self.state.move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Be back before the next forward."""
        if self.is_initialized:
            self.state.move(self.device)

    def _rows(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Compressed rows and the part with positions lie in one stream, values inside the keys."""
        return (keys, values) if self.host.latent is None else (torch.cat([keys, values], -1),)

    def _sees_itself(self) -> bool:
        """Does a first chunk see all of its own rows as they came?"""
        return self.recipe.prefill == "dense" and not narrowed(self.host, self.recipe)

    def _check_begun(self, count: int) -> None:
        """A layer that is never appended to would undo every forward of the others."""
        begun, context = self.state.length, self.context
        context.begun = context.begun or context.states.length > 0
        if begun and count != begun and not context.begun:
            silent = [i for i, s in context.states.layers.items() if s.length == 0]
            raise CacheError(
                f"the first forward brought no rows to layers {silent}: if it died, reset the "
                "cache; if this model never uses them, kvant cannot cache it"
            )

    def _read(self, view: View, count: int) -> Reading:
        self.expire()
        shown = view.columns
        if self.host.window is not None:
            shown = min(view.columns - count, self.host.window - 1) + count
        kind: type[Reading] = CrossReading if self.context.cross else Reading
        if self.host.latent is not None:
            kind = LatentReading
        refusal = NARROW if narrowed(self.host, self.recipe) else None
        if count > 1 and self.recipe.prefill == "stored" and self.recipe.seals:
            refusal = refusal or "prefill=stored shows each token of a chunk other rows"
        self._reading = kind(view, count, shown, self.dtype, self.notes, refusal)
        return self._reading

    def _again(self) -> Reading:
        """The rows as the newest token sees them, for one query."""
        return self._reading or self._read(self.state.view(), 1)

    def _pair(self, source: Source) -> tuple[Handle, Handle]:
        return pair(source, self.dtype, self.device)


@lru_cache(maxsize=1)
def _warn_of_gradients() -> None:
    log.warning("no gradients flow through a cache of kvant: use torch.no_grad() for inference")


class HybridLayer(AttentionLayer, LinearAttentionCacheLayerMixin):
    """Attention beside a recurrence that a layer of the host's own keeps."""

    supports_early_init = False

    @property
    def recurrence(self) -> Any:
        """The host's layer."""
        state = self.context.states[self.index]
        assert isinstance(state, Group) and isinstance(state["recurrence"], Recurrence)
        return state["recurrence"].host

    @property
    def conv_states(self) -> Any:
        return self.recurrence.conv_states

    @property
    def recurrent_states(self) -> Any:
        return self.recurrence.recurrent_states

    @property
    def has_previous_state(self) -> Any:
        return self.recurrence.has_previous_state

    @property
    def record_past(self) -> Any:
        return self.recurrence.record_past

    @property
    def is_croppable(self) -> Any:  # type: ignore[override]
        return self.recurrence.is_croppable

    def activate_past_recording(self) -> None:
        self.recurrence.activate_past_recording()

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        return self.recurrence.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        return self.recurrence.update_recurrent_state(*args, **kwargs)
