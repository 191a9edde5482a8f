"""The layers of a host's cache: they translate, and hand over to the states.

The host tells a layer's type by `is_sliding` and sizes its masks with `get_mask_sizes`: both speak
of the model's own layer, never of how its rows are stored.
"""

from __future__ import annotations

import logging
import weakref
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvant.contracts import LayerState, View
from kvant.errors import CacheError
from kvant.hf.context import Context
from kvant.hf.detect import HostLayer, narrows
from kvant.hf.handles import Handle, pair
from kvant.hf.latents import LatentReading
from kvant.hf.notes import Notes
from kvant.hf.reading import CrossReading, Reading, Source
from kvant.layers import Attention, Group
from kvant.recipes import LayerSpec

log = logging.getLogger("kvant")
PROCESSOR = torch.device("cpu")


class AttentionLayer(CacheLayerMixin):
    """One attention layer of the model, stored as its recipe says."""

    is_compileable = False
    is_croppable = True

    def __init__(self, context: Context, index: int, described: HostLayer) -> None:
        self.context = context
        self.index = index
        self.described = described
        self.state = _attention_of(context.states[index])
        self.is_sliding = described.window is not None
        self.notes = context.notes.setdefault(index, Notes())
        self.kind: type[Reading] = CrossReading if context.cross else Reading
        if described.latent is not None:
            self.kind = LatentReading
        self.dtype = torch.float32
        self._reading: weakref.ref[Reading] | None = None  # whoever reads it keeps it
        super().__init__()

    @property
    def narrow(self) -> bool:
        """Does the recipe let a query see less than the model would?"""
        return narrows(self.described, self.recipe)

    @property
    def recipe(self) -> LayerSpec:
        return self.state.spec

    @property
    def keys(self) -> Tensor | None:
        """What cross-attention reads, step after step; the host asks whether it is empty, too."""
        return self._pair(self._again())[0] if self.state.length else self._nothing()

    @keys.setter
    def keys(self, value: None) -> None:
        """The host's constructor clears it."""

    @property
    def values(self) -> Tensor | None:
        return self._pair(self._again())[1] if self.state.length else self._nothing()

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
        self.context.check_once(self.index)
        self.context.check_begun(state.length, count)
        speculated = state.ledger.speculating or (self.context.recording and state.length > 0)
        stored = count > 1 and (speculated or self.recipe.prefill == "stored")
        start = self.context.start(key_states.shape[0]) if state.length == 0 else None
        rows = self._rows(key_states, value_states)
        view = state.append(*rows, start=start, prefill="stored" if stored else None)
        if view.columns == count and not stored and not self.narrow:
            # A first chunk sees its own rows, as they came.
            self.notes.prompts += 1
            self.expire()
            return key_states, value_states
        return self._pair(self._read(view, count, stored))

    def arrive(self, backend: str) -> None:
        """A forward has put the row of a token to where it was expected, and attended with it."""
        self.expire()
        self.state.arrive()
        self.state.tally.attended[backend] += 1
        self.notes.fused += 1

    def get_seq_length(self) -> int:
        return self.context.states.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the keys that the next `update` returns: how many, and the first one's column."""
        length = self.get_seq_length()
        past = length if self.described.window is None else min(length, self.described.window - 1)
        return past + query_length, length - past

    def get_max_length(self) -> int:
        limits = (self.described.window, self.recipe.capacity)
        return min((limit for limit in limits if limit is not None), default=-1)

    def expire(self) -> None:
        """What the host was handed before is not to be read any more."""
        reading = None if self._reading is None else self._reading()
        if reading is not None:
            reading.current = False
        self._reading = None

    def forget(self) -> None:
        self.expire()
        self.is_initialized = False

    def reset(self, *args: Any) -> NoReturn:
        raise CacheError(
            f"layer {self.index} alone: call the verb of the cache, all layers go together"
        )

    crop = reorder_cache = reset

    def offload(self) -> None:
        """Lie in the memory of the processor until `prefetch`."""
        self._move(PROCESSOR)

    def prefetch(self) -> None:
        """Be back before the next forward."""
        if self.is_initialized:
            self._move(self.device)

    def like(self, other: AttentionLayer) -> None:
        """Take over what the other has learnt of the model's rows."""
        if other.is_initialized:
            self.dtype, self.device, self.is_initialized = other.dtype, other.device, True

    def _move(self, device: torch.device) -> None:
        self.expire()
        self.context.moves += 1
        self.context.states[self.index].move(device)

    def _rows(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Compressed rows and the part with positions lie in one stream, values inside the keys."""
        return (keys, values) if self.described.latent is None else (torch.cat([keys, values], -1),)

    def _read(self, view: View, count: int, stored: bool) -> Reading:
        self.expire()
        shown = view.columns
        if self.described.window is not None:
            shown = min(view.columns - count, self.described.window - 1) + count
        stored = stored and self.recipe.seals  # raw rows are the same for every query
        reading = self.kind(view, count, shown, self.dtype, self.notes, self.narrow, stored)
        reading.packs = self.described.packs
        self._reading = weakref.ref(reading)
        return reading

    def _again(self) -> Reading:
        """The rows as the newest token sees them, for one query."""
        reading = None if self._reading is None else self._reading()
        return reading or self._read(self.state.view(), 1, stored=False)

    def _nothing(self) -> Tensor | None:
        """The rows of a layer that has forgotten what it had, as the host's own has them."""
        return torch.empty(0, dtype=self.dtype, device=self.device) if self.is_initialized else None

    def _pair(self, source: Source) -> tuple[Handle, Handle]:
        return pair(source, self.dtype, self.device)


def _attention_of(state: LayerState) -> Attention:
    part = state["attention"] if isinstance(state, Group) else state
    assert isinstance(part, Attention)
    return part


@lru_cache(maxsize=1)
def _warn_of_gradients() -> None:
    log.warning("no gradients flow through a cache of kvant: use torch.no_grad() for inference")
