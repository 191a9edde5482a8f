"""The layers of a host's cache: they translate, and hand over to the states.

The host tells a layer's type by `is_sliding` and sizes its masks with `get_mask_sizes`: both speak
of the model's own layer, never of how its rows are stored. `layer_for` makes each of them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvant.attention import reads_prompts
from kvant.cache import Attention, Group
from kvant.contracts import View
from kvant.errors import CacheError
from kvant.hf.context import Context, Notes
from kvant.hf.detect import HostLayer, narrows
from kvant.hf.handles import Handle, pair
from kvant.hf.latents import LatentReading
from kvant.hf.reading import CrossReading, PromptReading, Reading, Source
from kvant.hf.recurrence import Recurrence
from kvant.models.shapes import CROSS
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, RecurrentSpec

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
        self._window = described.window
        self.is_sliding = described.window is not None
        self.notes = context.notes.setdefault(index, Notes())
        self.kind: type[Reading] = CrossReading if context.cross else Reading
        if described.latent is not None:
            self.kind = LatentReading
        self.dtype = torch.float32
        self._known: Any = None  # the contents of the cache that `_state` and `_narrow` are of
        self._state: Attention
        self._narrow = False
        self._reading: weakref.ref[Reading] | None = None  # whoever reads it keeps it
        super().__init__()

    @property
    def state(self) -> Attention:
        """Where its rows are: a recode or a restore puts another one there."""
        contents = self.context.states.contents
        if contents is not self._known:
            state = contents.by_layer[self.index]
            self._state = state["attention"] if isinstance(state, Group) else state
            self._narrow = narrows(self.described, self._state.spec)
            self._known = contents
        return self._state

    @property
    def narrow(self) -> bool:
        """Does the recipe let a query see less than the model would?"""
        return narrows(self.described, self.state.spec)

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
        count, context = key_states.shape[2], self.context
        state = self._state if context.states.contents is self._known else self.state
        ledger, narrow = state.ledger, self._narrow
        if state.leaf in ledger.book.arrived:
            context.check_once(self.index)
        if not context.begun:
            context.check_begun(state.length, count)
        start, stored = None, False
        if count > 1:
            speculated = ledger.speculating or (context.recording and state.length > 0)
            stored = speculated or state.spec.prefill == "stored"
        if context.padding is not None and state.length == 0:
            context.check_columns(count)
            start = context.start(key_states.shape[0])
        rows: tuple[Tensor, ...] = (key_states, value_states)
        if self.described.latent is not None:  # in one stream, values inside the keys
            rows = (torch.cat(rows, -1),)
        view = state.append(*rows, start=start, prefill="stored" if stored else None)
        reading = None if self._reading is None else self._reading()
        if reading is not None:
            reading.current = False
        if (
            count > 1
            and view.extent.columns == count
            and not (stored or narrow)
            and view.watch is None
        ):
            # A first chunk sees its own rows, as they came.
            self.notes.prompts += 1
            self._reading = None
            if self.kind is not Reading or context.padding is not None or not reads_prompts(view):
                return key_states, value_states
            return pair(self._prompt(view, key_states, value_states), self.dtype, self.device)
        return pair(self._read(view, count, stored), self.dtype, self.device)

    def arrive(self) -> None:
        """A forward has put the row of a token to where it was expected, and attended with it."""
        self.expire()
        self.notes.fused += 1

    def get_seq_length(self) -> int:
        return self.context.states.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the keys that the next `update` returns: how many, and the first one's column."""
        length = self.get_seq_length()
        if query_length == 1 and self.context.states.ragged:
            return 1, length  # every row of a sequence is seen, or left out by its own window
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

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse a copy of one layer; `HostCache.fork` copies all layers."""
        raise CacheError(
            f"layer {self.index} is copied alone: a model that runs layers in loops keeps a copy "
            "for each pass, of which kvant's cache knows nothing; leave kvant out and call "
            "model.generate(...)"
        )

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
        state = self.context.states[self.index]
        for part in state.values() if isinstance(state, Group) else [state]:
            part.move(device)

    def _read(self, view: View, count: int, stored: bool) -> Reading:
        shown, window = view.extent.columns, self._window
        if window is not None and shown - count >= window:
            shown = window - 1 + count
        stored = stored and not self._state.spec.exact  # raw rows are the same for every query
        reading = self.kind(view, count, shown, self.dtype, self.notes, self._narrow, stored)
        reading.packs = self.described.packs
        self._reading = weakref.ref(reading)
        return reading

    def _prompt(self, view: View, keys: Tensor, values: Tensor) -> Reading:
        count = keys.shape[2]
        reading = PromptReading(view, count, count, self.dtype, Notes(), keys=keys, values=values)
        reading.packs = self.described.packs
        self._reading = weakref.ref(reading)
        return reading

    def _again(self) -> Reading:
        """The rows as the newest token sees them, for one query."""
        reading = None if self._reading is None else self._reading()
        if reading is None:
            self.expire()
            reading = self._read(self.state.view(), 1, stored=False)
        return reading

    def _nothing(self) -> Tensor | None:
        """The rows of a layer that has forgotten what it had, as the host's own has them."""
        return torch.empty(0, dtype=self.dtype, device=self.device) if self.is_initialized else None

    def _pair(self, source: Source) -> tuple[Handle, Handle]:
        return pair(source, self.dtype, self.device)


@lru_cache(maxsize=1)
def _warn_of_gradients() -> None:
    log.warning("no gradients flow through a cache of kvant: use torch.no_grad() for inference")


class HybridLayer(AttentionLayer, LinearAttentionCacheLayerMixin):
    """Attention beside a recurrence that a layer of the host's own keeps."""

    supports_early_init = False

    @property
    def beside(self) -> Any:
        """The host's layer."""
        state: Recurrence = self.context.states[self.index]["recurrence"]
        return state.layer

    @property
    def conv_states(self) -> Any:
        return self.beside.conv_states

    @property
    def recurrent_states(self) -> Any:
        return self.beside.recurrent_states

    @property
    def has_previous_state(self) -> Any:
        return self.beside.has_previous_state

    @property
    def record_past(self) -> Any:
        return self.beside.record_past

    @property
    def is_croppable(self) -> Any:  # type: ignore[override]
        return self.beside.is_croppable

    def activate_past_recording(self) -> None:
        self.beside.activate_past_recording()

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        return self.beside.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        return self.beside.update_recurrent_state(*args, **kwargs)


class CrossLayer(DynamicLayer):
    """Rows that every token reads whole: no part of what the other layers commit together."""

    def __init__(self, context: Context, index: int) -> None:
        self.context = context
        self.index = index
        self._came: list[tuple[int, int]] = []  # how long the text was then, and how many rows
        super().__init__()

    @property
    def keys(self) -> Tensor | None:
        """The host asks for them in a forward that brings none."""
        self._keep(self.context.states.length)
        return self._keys

    @keys.setter
    def keys(self, rows: Tensor | None) -> None:
        self._keys = rows

    @property
    def values(self) -> Tensor | None:
        self._keep(self.context.states.length)
        return self._values

    @values.setter
    def values(self, rows: Tensor | None) -> None:
        self._values = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rows: tuple[Tensor, Tensor] = super().update(key_states, value_states)
        self._came.append((self.context.states.length, key_states.shape[2]))
        return rows

    def crop(self, tokens_to_remove: int) -> None:
        """Tokens of the text go; an image goes with the last of those that it came with."""
        self._keep(max(0, self.context.states.length + tokens_to_remove))

    def reset(self) -> None:
        super().reset()
        self._came = []

    def _keep(self, length: int) -> None:
        """Only the rows that came with the first `length` tokens of the text."""
        # Behind the last layer of the text, the tokens of the forward are counted already.
        behind = self.index > max(self.context.states.layers, default=self.index)
        kept = [(at, count) for at, count in self._came if at < length + behind]
        if len(kept) < len(self._came):
            assert self._keys is not None and self._values is not None
            rows = sum(count for _, count in kept)
            self._keys, self._values = self._keys[:, :, :rows], self._values[:, :, :rows]
            self._came = kept


def recurrences(layers: Sequence[HostLayer], spec: CacheSpec) -> dict[str, Recurrence]:
    """States whose present a layer of the host's keeps, by the name of their memory."""
    found = {}
    for index, (layer, recipe) in enumerate(zip(layers, spec.layers, strict=True)):
        if layer.recurs:
            grouped = isinstance(recipe, GroupSpec)
            own = dict(recipe.parts)["recurrence"] if isinstance(recipe, GroupSpec) else recipe
            assert isinstance(own, RecurrentSpec)
            kind = LinearAttentionLayer if layer.attends else DYNAMIC_LAYER_TYPE_MAPPING[layer.type]
            kept = kind(number_of_states=layer.options.get("number_of_states", 1))
            found[f"{index}/recurrence" if grouped else str(index)] = Recurrence(own, kept)
    return found


def layer_for(context: Context, index: int, layer: HostLayer, own: Any) -> Any:
    """What stands in the host's list; `own` is one of the host's classes that exists already."""
    if layer.attends:
        kind = HybridLayer if layer.recurs else AttentionLayer
        return kind(context, index, layer)
    if layer.recurs:
        state = context.states[index]
        assert isinstance(state, Recurrence)
        return state.layer
    if layer.type == CROSS:
        return own or CrossLayer(context, index)
    return own or DYNAMIC_LAYER_TYPE_MAPPING[layer.type](**layer.options)
