"""Define the layers of a TransformersCache, which adapt kvant's layers to transformers.

transformers reads the layer type from `is_sliding`, and sizes masks with `get_mask_sizes`. Both
describe the layer of the model, not how its rows are stored. `make_layer` builds each layer.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvant.attention import has_fast_prefill
from kvant.cache import GroupLayer, PagedLayer
from kvant.contracts import View
from kvant.errors import CacheError
from kvant.hf.attention import PendingLatentAttention
from kvant.hf.cache_context import AttentionStats, CacheContext, DelegatedAttribute
from kvant.hf.handles import (
    PendingAttention,
    PendingCrossAttention,
    PendingFirstChunk,
    make_handles,
)
from kvant.hf.model import ModelLayer
from kvant.hf.recurrence import Recurrence
from kvant.models.shapes import CROSS
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, RecurrentSpec

log = logging.getLogger("kvant")
CPU = torch.device("cpu")
T = TypeVar("T")


class AttentionLayer(CacheLayerMixin):
    """One attention layer of the model; its recipe says how its rows are stored.

    `update` returns handles in place of keys and values. A handle computes its rows only when an
    operation needs them. Keys and values of one append share a `PendingAttention`, which reads the
    rows, or attends to them without reading them.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, context: CacheContext, index: int, layer_info: ModelLayer) -> None:
        self.context = context
        self.index = index
        self.layer_info = layer_info
        self._window = layer_info.window
        self.is_sliding = layer_info.window is not None
        self.attention_stats = context.attention_stats.setdefault(index, AttentionStats())
        self.pending_type: type[PendingAttention] = (
            PendingCrossAttention if context.is_cross else PendingAttention
        )
        if layer_info.latent_width is not None:
            self.pending_type = PendingLatentAttention
        self.dtype = torch.float32
        cached_layer = context.states[index]
        self.paged_layer: PagedLayer = (
            cached_layer["attention"] if isinstance(cached_layer, GroupLayer) else cached_layer
        )
        self._pending_ref: weakref.ref[PendingAttention] | None = None  # kept alive by the handles
        super().__init__()

    @property
    def is_window_narrowed(self) -> bool:
        """Whether the window of the recipe is narrower than that of the model."""
        window = self.paged_layer.leaf.spec.retention.window
        return window is not None and (self._window is None or window < self._window)

    @property
    def recipe(self) -> LayerSpec:
        return self.paged_layer.spec

    @property
    def keys(self) -> Tensor | None:
        """The cached keys, which cross-attention reads at every step; None before any rows."""
        return self._get_rows(0)

    @keys.setter
    def keys(self, value: None) -> None:
        """Ignore the None that the constructor of transformers assigns."""

    @property
    def values(self) -> Tensor | None:
        return self._get_rows(1)

    @values.setter
    def values(self, value: None) -> None: ...

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Record the dtype and the device of the first rows, without an allocation."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized or self.dtype != key_states.dtype:
            self.lazy_initialization(key_states, value_states)
        if key_states.requires_grad:
            _warn_about_gradients()
        count, context, paged_layer = key_states.shape[2], self.context, self.paged_layer
        if paged_layer.has_appended:
            context.check_not_appended(self.index)
        if not context.first_forward_done:
            context.check_first_forward(paged_layer.length, count)
        start, reads_stored = None, False
        if count > 1:
            # `reads_stored`: tokens of the chunk attend to stored (quantized) rows, also to those
            # of the chunk itself, as each token would if it were decoded alone.
            is_draft = paged_layer.holder.in_speculation or (
                context.record_past and paged_layer.length > 0
            )
            reads_stored = is_draft or paged_layer.spec.prefill == "stored"
        if context.padding is not None and paged_layer.length == 0:
            context.check_padding_columns(count)
            start = context.compute_start(key_states.shape[0])
        rows: tuple[Tensor, ...] = (key_states, value_states)
        if self.layer_info.latent_width is not None:  # stored as one tensor
            rows = (torch.cat(rows, -1),)
        view = paged_layer.append(*rows, start=start, prefill="stored" if reads_stored else None)
        pending = None if self._pending_ref is None else self._pending_ref()
        if pending is not None:
            pending.is_current = False
        if (
            count > 1
            and view.page_table.num_columns == count
            and not (reads_stored or self.is_window_narrowed)
            and view.query_listener is None
        ):
            # A first chunk attends to its own rows, which are dense.
            self.attention_stats.prompt_calls += 1
            self._pending_ref = None
            if (
                self.pending_type is not PendingAttention
                or context.padding is not None
                or not has_fast_prefill(view)
            ):
                return key_states, value_states
            prompt = PendingFirstChunk(
                view,
                count,
                count,
                self.dtype,
                AttentionStats(),
                model_has_gqa=self.layer_info.model_has_gqa,
                keys=key_states,
                values=value_states,
            )
            self._pending_ref = weakref.ref(prompt)
            return make_handles(prompt, self.dtype, self.device)
        return make_handles(self._make_pending(view, count, reads_stored), self.dtype, self.device)

    def record_replay(self) -> None:
        """Count a replayed forward, which stored the row of a token and attended to the pages."""
        self.invalidate_pending()
        self.attention_stats.fused_calls += 1

    def count_nbytes_beyond_window(self) -> int:
        """Return the bytes that raw rows before the model's window would take."""
        layer = self.paged_layer
        return layer.count_raw_nbytes() - layer.count_raw_nbytes(self._window)

    def get_seq_length(self) -> int:
        return self.context.states.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the next `update` returns, and the mask column of the first."""
        state = self.context.states.state
        length, window = state.length, self._window
        if query_length == 1 and state.ragged:
            return 1, length  # each sequence has its own length and window: no common mask
        past = length if window is None else min(length, window - 1)
        return past + query_length, length - past

    def get_max_length(self) -> int:
        limits = (self.layer_info.window, self.recipe.capacity)
        return min((limit for limit in limits if limit is not None), default=-1)

    def invalidate_pending(self) -> None:
        """Invalidate the handles that the model still has, so that using one raises an error."""
        pending = None if self._pending_ref is None else self._pending_ref()
        if pending is not None:
            pending.is_current = False
        self._pending_ref = None

    def clear_initialization(self) -> None:
        """Forget the dtype and the device of the rows."""
        self.invalidate_pending()
        self.is_initialized = False

    def reset(self, *args: Any) -> NoReturn:
        raise CacheError(
            f"layer {self.index} alone: call the method of the cache, which changes all layers"
        )

    crop = reorder_cache = reset

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse a copy of one layer; `TransformersCache.fork` copies all layers."""
        raise CacheError(
            f"layer {self.index} is copied alone: a model that runs layers in loops keeps a copy "
            "for each pass, which kvant's cache cannot track; leave kvant out and call "
            "model.generate(...)"
        )

    def offload(self) -> None:
        """Move the rows to CPU memory, until `prefetch`."""
        self._move(CPU)

    def prefetch(self) -> None:
        """Move the rows back to their device, before the next forward."""
        if self.is_initialized:
            self._move(self.device)

    def copy_initialization(self, other: AttentionLayer) -> None:
        """Copy the dtype and the device of the rows from another layer."""
        if other.is_initialized:
            self.dtype, self.device, self.is_initialized = other.dtype, other.device, True

    def _move(self, device: torch.device) -> None:
        self.invalidate_pending()
        self.context.num_moves += 1
        state = self.context.states[self.index]
        for part in state.values() if isinstance(state, GroupLayer) else [state]:
            part.move(device)

    def _make_pending(self, view: View, count: int, stored_prefill: bool) -> PendingAttention:
        num_columns, window = view.page_table.num_columns, self._window
        if window is not None and num_columns - count >= window:
            num_columns = window - 1 + count
        # Exact formats store rows unchanged: reading stored rows makes no difference.
        stored_prefill = stored_prefill and not self.recipe.exact
        pending = self.pending_type(
            view,
            count,
            num_columns,
            self.dtype,
            self.attention_stats,
            self.is_window_narrowed,
            stored_prefill,
            self.layer_info.model_has_gqa,
        )
        self._pending_ref = weakref.ref(pending)
        return pending

    def _get_rows(self, side: int) -> Tensor | None:
        """Return the handle of the keys (0) or the values (1), for a query at the newest token."""
        if not self.paged_layer.length:  # as transformers: None at first, no rows after a rewind
            if not self.is_initialized:
                return None
            return torch.empty(0, dtype=self.dtype, device=self.device)
        pending = None if self._pending_ref is None else self._pending_ref()
        if pending is None:
            view = self.paged_layer.view()
            if not self.is_initialized:  # the rows come from a file
                self.lazy_initialization(view.keys.open, view.keys.open)
            pending = self._make_pending(view, 1, stored_prefill=False)
        return make_handles(pending, self.dtype, self.device)[side]


@lru_cache(maxsize=1)
def _warn_about_gradients() -> None:
    log.warning("no gradients flow through a cache of kvant: use torch.no_grad() for inference")


class LinearLayerAttribute(DelegatedAttribute[T]):
    """An attribute or a method of the layer of transformers inside a HybridLayer."""

    get_target = attrgetter("linear_layer")


class HybridLayer(AttentionLayer, LinearAttentionCacheLayerMixin):
    """Attention and a recurrence in one layer; transformers stores the recurrent state."""

    supports_early_init = False

    @property
    def linear_layer(self) -> Any:
        """The layer of transformers that stores the recurrent state."""
        recurrence: Recurrence = self.context.states[self.index]["recurrence"]
        return recurrence.layer

    conv_states = LinearLayerAttribute[Any]()
    recurrent_states = LinearLayerAttribute[Any]()
    has_previous_state = LinearLayerAttribute[Any]()
    record_past = LinearLayerAttribute[bool]()
    is_croppable = LinearLayerAttribute[bool]()
    activate_past_recording = LinearLayerAttribute[Callable[[], None]]()
    update_conv_state = LinearLayerAttribute[Callable[..., Tensor]]()
    update_recurrent_state = LinearLayerAttribute[Callable[..., Tensor]]()


class CrossAttentionLayer(DynamicLayer):
    """Rows of an image or an encoder inside a text model.

    The cache does not wait for them: a forward is complete once every text layer has appended.
    """

    def __init__(self, context: CacheContext, index: int) -> None:
        self.context = context
        self.index = index
        self._row_counts: list[tuple[int, int]] = []  # (text length, rows) of each update
        super().__init__()

    @property
    def keys(self) -> Tensor | None:
        """The cached keys, which later forwards read without an update."""
        self._truncate_rows(self.context.states.length)
        return self._keys

    @keys.setter
    def keys(self, rows: Tensor | None) -> None:
        self._keys = rows

    @property
    def values(self) -> Tensor | None:
        self._truncate_rows(self.context.states.length)
        return self._values

    @values.setter
    def values(self, rows: Tensor | None) -> None:
        self._values = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rows: tuple[Tensor, Tensor] = super().update(key_states, value_states)
        self._row_counts.append((self.context.states.length, key_states.shape[2]))
        return rows

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the rows of images that came with the text tokens that the cache drops next."""
        self._truncate_rows(max(0, self.context.states.length + tokens_to_remove))

    def reset(self) -> None:
        super().reset()
        self._row_counts = []

    def _truncate_rows(self, length: int) -> None:
        """Keep only the rows appended with the first `length` tokens of the text."""
        # `update` records the length of the text as `start`. A layer behind the last text layer
        # runs after the commit, so its `start` already counts the tokens of this forward. It keeps
        # rows with `start <= length`; other layers keep rows with `start < length`.
        follows_text = self.index > max(self.context.states.layers, default=self.index)
        row_counts = [
            (start, count) for start, count in self._row_counts if start < length + follows_text
        ]
        if len(row_counts) < len(self._row_counts):
            assert self._keys is not None and self._values is not None
            num_rows = sum(count for _, count in row_counts)
            self._keys = self._keys[:, :, :num_rows]
            self._values = self._values[:, :, :num_rows]
            self._row_counts = row_counts


def make_recurrences(layers: Sequence[ModelLayer], spec: CacheSpec) -> dict[str, Recurrence]:
    """Make the recurrent states that transformers stores, by their name in the cache."""
    recurrences = {}
    for index, (layer, recipe) in enumerate(zip(layers, spec.layers, strict=True)):
        if layer.recurs:
            name = str(index)
            if isinstance(recipe, GroupSpec):
                name, recipe = f"{index}/recurrence", dict(recipe.parts)["recurrence"]
            assert isinstance(recipe, RecurrentSpec)
            layer_class = (
                LinearAttentionLayer if layer.attends else DYNAMIC_LAYER_TYPE_MAPPING[layer.kind]
            )
            hf_layer = layer_class(number_of_states=layer.options.get("number_of_states", 1))
            recurrences[name] = Recurrence(recipe, hf_layer)
    return recurrences


def make_layer(context: CacheContext, index: int, layer: ModelLayer, existing: Any) -> Any:
    """Make one layer of a TransformersCache, or reuse `existing` if it is opaque."""
    if layer.attends:
        layer_class = HybridLayer if layer.recurs else AttentionLayer
        return layer_class(context, index, layer)
    if layer.recurs:
        recurrence = context.states[index]
        assert isinstance(recurrence, Recurrence)
        return recurrence.layer
    if layer.kind == CROSS:
        return existing or CrossAttentionLayer(context, index)
    return existing or DYNAMIC_LAYER_TYPE_MAPPING[layer.kind](**layer.options)
