"""Define the cache that transformers models call; each method changes all layers, or none."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvant.cache import Cache, constrain_spec
from kvant.cache.cache import list_other_sequences
from kvant.cache.row_attention import RowAttention
from kvant.cache.state import CacheState
from kvant.cache.transitions import drop_pending_padding
from kvant.contracts import Snapshot
from kvant.errors import CacheError, RenamedAttribute
from kvant.hf.cache_context import (
    CacheContext,
    CacheExplanation,
    StatesAttribute,
    UseCacheCheck,
    resolve_indices,
    sum_attention_stats,
)
from kvant.hf.layers import AttentionLayer, make_layer, make_recurrences
from kvant.hf.model import ModelLayer, make_cache_spec
from kvant.hf.recurrence import RecurrentProgress
from kvant.recipes import AnySpec, CacheSpec, iterate_attention

INITIAL_DRAFT_TOKENS = 32  # expected in the first drafts; a smaller slack is set to twice this
MAX_DRAFT_TOKENS = 256  # a longer chunk is a prompt, not a draft


class TransformersCache(HFCache):
    """The cache of one batch of sequences, for a transformers model.

    `states` is the kvant cache that stores the rows. An opaque layer is one of transformers, whose
    state kvant cannot read; an operation that it does not support is refused.

    `padding` is the left padding of each sequence, and `columns` the width of the attention mask
    that gave it. With `is_cross`, the rows come from an encoder. With `attachable`, `kvant.attach`
    can switch the model to kvant's attention.
    """

    # Attributes and methods of `states`, under the same names.
    spec = StatesAttribute[CacheSpec]()
    state = StatesAttribute[CacheState]()
    backend = StatesAttribute[str | None]()
    lengths = StatesAttribute[list[int]]()
    num_rows = StatesAttribute[int]()
    held = StatesAttribute[int]()  # the public name of num_rows
    capacity = StatesAttribute[int | None]()
    is_recurrent = StatesAttribute[bool]()
    nbytes = StatesAttribute[int]()  # opaque layers are not counted
    checkpoint = StatesAttribute[Callable[[], None]]()
    prompt_mode = StatesAttribute[Callable[[], AbstractContextManager[None]]]()
    speculation_mode = StatesAttribute[Callable[[], AbstractContextManager[None]]]()

    is_compileable = False  # `generate` may not compile a model that calls this cache
    # Old public names.
    resumable = RenamedAttribute("find_exact_rewind")
    extended = RenamedAttribute("import_sequence")
    prompting = RenamedAttribute("prompt_mode")
    speculating = RenamedAttribute("speculation_mode")

    def __init__(
        self,
        layer_info: Sequence[ModelLayer],
        spec: CacheSpec,
        *,
        padding: Sequence[int] | None = None,
        columns: int | None = None,
        is_cross: bool = False,
        attachable: bool = False,
    ) -> None:
        states = Cache.from_spec(spec, make_recurrences(layer_info, spec))
        context = CacheContext(
            states, None if padding is None else tuple(padding), columns, is_cross, attachable
        )
        self._initialize(tuple(layer_info), context, {})

    def _initialize(
        self,
        layer_info: tuple[ModelLayer, ...],
        context: CacheContext,
        existing_layers: dict[int, Any],
    ) -> None:
        """Set all fields; `existing_layers` are opaque layers to reuse, by index."""
        self.layer_info = layer_info
        self.context = context
        # Refuses use_cache=False; set once `generate` has been given this cache.
        self._use_cache_check: UseCacheCheck | None = None
        self._first_attention_index = next(
            (i for i, info in enumerate(layer_info) if info.attends), None
        )
        recurrences: list[Any] = list(context.states.holder.external_states.values())
        self._recurrent_progress = RecurrentProgress(layer_info, recurrences)
        layers = [
            make_layer(context, i, info, existing_layers.get(i))
            for i, info in enumerate(layer_info)
        ]
        super().__init__(layers=layers)

    @property
    def states(self) -> Cache:
        return self.context.states

    @property
    def length(self) -> int:
        """Tokens in the cache; an incomplete forward does not count."""
        return self.get_seq_length()

    # ---- called by models

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        if layer_idx >= len(self.layer_info):
            raise CacheError(
                f"rows for layer {layer_idx} of a cache for {len(self.layer_info)} layers: it was "
                "made for another model, or the configuration does not name all layers"
            )
        if layer_idx == self._first_attention_index:
            count, is_speculating = key_states.shape[2], self.context.record_past
            if self._use_cache_check is not None:
                self._use_cache_check.check(count, is_draft=is_speculating)
            if is_speculating:
                is_draft = self.states.length > 0 and count <= MAX_DRAFT_TOKENS
                if is_draft or self.spec.has_window:  # one chunk may hold prompt and drafts
                    self._ensure_draft_slack(min(count, MAX_DRAFT_TOKENS))
                self.states.holder.external_speculation = is_draft
        updated: tuple[Tensor, Tensor] = self.layers[layer_idx].update(
            key_states, value_states, *args, **kwargs
        )
        if self._recurrent_progress.recurrences:
            self._recurrent_progress.check_valid()
        return updated

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        if self._recurrent_progress.restarts_forward(layer_idx, state_idx):
            self.states.rollback()  # before this forward changes a state
        self._recurrent_progress.record_state_read(
            layer_idx, state_idx, has_rows=not self.states.is_complete
        )
        state: Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._recurrent_progress.record_conv_tokens(layer_idx, state_idx, conv_states.shape[-1])
        state: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens in the cache; an incomplete forward does not count."""
        states = self.context.states
        if states.state.layout.names:
            return states.length
        length: int = super().get_seq_length(layer_idx)
        return length

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer is recurrent only, without keys and values."""
        return [
            isinstance(layer, LinearAttentionCacheLayerMixin)
            and not isinstance(layer, CacheLayerMixin)
            for layer in self.layers
        ]

    @property
    def has_shapes(self) -> bool:
        """Whether all layers have tensors; data from a prefix store must match their shapes."""
        state = self.states.state
        has_rows = all(leaf.index in state.storages for leaf in state.layout.attention)
        return has_rows and all(state.has_shapes for state in self._recurrent_progress.recurrences)

    # ---- operations on all layers

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens; transformers passes their number negated."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): a negative number is needed, -n to remove n tokens"
            )
        self._invalidate_pending()
        opaque_layers = self._get_opaque_layers().values()
        to = max(0, self.states.length + tokens_to_remove)
        if opaque_layers and self.states.reachable(to) == to:
            for layer in opaque_layers:  # these may fail, the rewind below cannot
                layer.crop(tokens_to_remove)
        self._run_rewind(partial(self.states.rewind, to))

    def trim(self, count: int) -> int:
        """Drop up to `count` of the newest tokens, and return their number."""
        if count < 0:
            raise ValueError(f"trim({count}): 0 or more tokens")
        dropped = min(count, self.length)
        self.crop(-dropped)
        return dropped

    def reset(self) -> None:
        """Drop all tokens, but keep the memory allocated."""
        self._clear_batch_info()
        self.states.reset()
        for layer in self._get_opaque_layers().values():
            layer.reset()

    def clear(self) -> None:
        """Drop all tokens and free the memory."""
        self._clear_batch_info()
        self.states.clear()
        for index in self._get_opaque_layers():
            self.layers[index] = make_layer(self.context, index, self.layer_info[index], None)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select_sequences(beam_idx)
        for layer in self._get_opaque_layers().values():
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keep the sequences that `indices` selects; any index that PyTorch accepts is allowed."""
        selected = resolve_indices(indices, self.states.batch) if self.states.batch else indices
        self._select_sequences(selected)
        for layer in self._get_opaque_layers().values():
            layer.batch_select_indices(selected)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._invalidate_pending()
        self.states.repeat(repeats)  # `compute_start` repeats the padding
        for layer in self._get_opaque_layers().values():
            layer.batch_repeat_interleave(repeats)

    def activate_past_recording(self) -> None:
        """Start speculation: rewinds are exact, and each draft token reads as if decoded alone."""
        super().activate_past_recording()
        self.context.record_past = True
        if self.states.length:
            self.states.checkpoint()
        # The slack of recurrent models cannot grow within a forward: it would end their state.
        has_states = bool(self._recurrent_progress.recurrences)
        self._ensure_draft_slack(MAX_DRAFT_TOKENS if has_states else INITIAL_DRAFT_TOKENS)

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Move an offloaded layer back to its device."""
        if not (only_non_sliding and self.is_sliding[layer_idx]):
            self.layers[layer_idx].prefetch()

    def fork(self) -> TransformersCache:
        """Return a copy that shares pages until either cache writes to them."""
        return self.wrap_states(self.states.fork(), self.context.padding)

    def extract(self, sequence: int) -> TransformersCache:
        """Return a cache of one sequence, which shares its pages."""
        self._check_no_opaque_layers("extract")
        return self.wrap_states(self.states.extract(sequence))

    def remove(self, sequence: int) -> None:
        """Remove one sequence and release its pages."""
        self._check_no_opaque_layers("remove")
        self.batch_select_indices(torch.tensor(list_other_sequences(self.states.batch, sequence)))

    def merge_with(self, others: Sequence[Any]) -> TransformersCache:
        """Return one cache with the sequences of this cache and of `others`, of the same model."""
        self._check_same_model(others)
        slack = max(cache.context.slack for cache in (self, *others))
        states, *other_states = (cache.context.copy_states(slack) for cache in (self, *others))
        merged = self.wrap_states(states.merge_with(other_states))
        merged.context.slack = slack
        return merged

    def import_sequence(self, other: TransformersCache) -> TransformersCache:
        """Return a copy of `other` in the pools of this cache.

        The tokens of `other` start with those of this cache.
        """
        self._check_same_model([other])
        return self.wrap_states(self.states.import_sequence(other.states))

    def _check_same_model(self, others: Sequence[Any]) -> None:
        for cache in (self, *others):
            if not isinstance(cache, TransformersCache) or cache.layer_info != self.layer_info:
                raise ValueError(
                    "caches of different models cannot be merged: make them for one model"
                )
            cache._check_no_opaque_layers("merge")

    def wrap_states(
        self, states: Cache, padding: tuple[int, ...] | None = None
    ) -> TransformersCache:
        """Return a cache of the same model over `states`."""
        attention_stats, replay_stats = copy.deepcopy(
            (self.context.attention_stats, self.context.replay_stats)
        )
        context = replace(
            self.context,
            states=states,
            padding=padding,
            attention_stats=attention_stats,
            replay_stats=replay_stats,
        )
        cache = TransformersCache.__new__(TransformersCache)
        # With this memo, the copied layers refer to the new context.
        cache._initialize(
            self.layer_info,
            context,
            copy.deepcopy(self._get_opaque_layers(), {id(self.context): context}),
        )
        layers = self._list_attention_layers(), cache._list_attention_layers()
        for old, new in zip(*layers, strict=True):
            new.copy_initialization(old)
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformersCache:
        return self.fork()

    def __repr__(self) -> str:
        return f"TransformersCache({self.states!r})"

    def nbytes_after(self, num_new_tokens: int, spec: AnySpec | None = None) -> int:
        """Return the bytes after a recode to `spec`, if given, and `num_new_tokens` more tokens."""
        new_spec = None if spec is None else self._resolve_spec(spec)
        return self.states.nbytes_after(num_new_tokens, new_spec)

    def reachable(self, to: int) -> int:
        """Return the longest length <= `to` that every layer can rewind to."""
        if self._get_opaque_layers():  # they cannot rewind, only reset
            return self.length if to >= self.length else 0
        return self.states.reachable(to)

    def find_exact_rewind(self, to: int) -> int:
        """Return the longest length <= `to` whose rewind is exact."""
        return (
            self.reachable(to) if self._get_opaque_layers() else self.states.find_exact_rewind(to)
        )

    def rewind(self, to: int) -> None:
        """Rewind every layer to length `to`, or raise an error and change none."""
        self._invalidate_pending()
        if to != self.length:
            self._check_no_opaque_layers("rewind")
            self._run_rewind(partial(self.states.rewind, to))
        elif self.states.layers:  # roll back an incomplete forward
            self.states.rewind(self.states.length)

    def rewind_each(self, lengths: Sequence[int]) -> None:
        """Rewind each sequence to its own length, or raise an error and change none."""
        self._invalidate_pending()
        self._check_no_opaque_layers("rewind_each")
        self._run_rewind(partial(self.states.rewind_each, lengths))

    def prune(self, row_attention: RowAttention | None = None) -> int:
        """Prune the rows of a prompt now, as `Cache.prune` does."""
        num_dropped = self.states.prune(row_attention)
        if num_dropped:
            self._invalidate_pending()
        return num_dropped

    def ensure_slack(self, slack: int) -> None:
        """Make rewinds of up to `slack` tokens exact from now on."""
        if (slack := operator.index(slack)) > self.context.slack:
            self._invalidate_pending()
            self.states.ensure_slack(slack)
            self.context.slack = slack

    def recode(self, spec: AnySpec) -> None:
        """Convert the stored rows to another spec; the windows of the model still apply."""
        cache_spec = self._resolve_spec(spec)
        self._invalidate_pending()
        self.states.recode(cache_spec)

    def snapshot(self) -> Snapshot:
        """Return a copy of the state of all layers, for `restore`."""
        return self.shared_snapshot().copy()

    def shared_snapshot(self) -> Snapshot:
        """Return a snapshot that may share memory with the cache, valid until its next change."""
        self._check_no_opaque_layers("snapshot")
        return self.states.shared_snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Replace the state of all layers by a snapshot."""
        self._check_no_opaque_layers("restore")
        self._invalidate_pending()
        self.states.restore(snapshot)
        if self.states.length:  # the snapshot has its own padding
            self.context.padding = None

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the cache and of its attention calls."""
        return {
            **self.states.stats(),
            "raw_nbytes": self.raw_nbytes,
            **sum_attention_stats(self.context.attention_stats.values()),
            "replayed": self.context.replay_stats.num_tokens,
        }

    @property
    def raw_nbytes(self) -> int:
        """Bytes that the cache of transformers would take: only the rows of the model's windows."""
        layers = self._list_attention_layers()
        return self.states.raw_nbytes - sum(x.count_nbytes_beyond_window() for x in layers)

    def explain(self) -> CacheExplanation:
        """Explain how each layer is stored, and whether attention reads the stored pages."""
        return CacheExplanation.from_layers(self.layer_info, self.context)

    # ---- internals

    @property
    def _is_user_defined(self) -> bool:
        return self._use_cache_check is not None

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        """Checkpoint the cached tokens when `generate` starts.

        `generate` sets this attribute to True on a cache that the user passes.
        """
        self._use_cache_check = UseCacheCheck() if value else None
        self.context.end_speculation()  # speculation of this call starts later
        self._recurrent_progress.stop_recording()
        if value and self._recurrent_progress.recurrences and self.states.length:
            self.states.checkpoint()

    def _run_rewind(self, rewind: Callable[[], None]) -> None:
        """Rewind `states`, and forget the padding that its sequences no longer have."""
        had_tokens = self.states.length > 0
        rewind()
        if had_tokens and not self.states.length:  # the next tokens may be of another batch
            self.context.padding = None
        # A rewind may end inside left padding; the rest of the padding is then pending. Drop it, as
        # the next mask gives the padding. With sinks, keep it: their positions depend on it.
        if not any(recipe.retention.sinks for recipe in iterate_attention(*self.spec.layers)):
            holder = self.states.holder
            holder.state = drop_pending_padding(holder.state)

    def _resolve_spec(self, spec: AnySpec) -> CacheSpec:
        """Return the spec of each layer after a recode to `spec`."""
        self._check_no_opaque_layers("recode")
        cache_spec = make_cache_spec(self.layer_info, spec)
        if not isinstance(spec, CacheSpec):
            cache_spec = constrain_spec(self.spec, cache_spec)
        return cache_spec.with_slack(self.context.slack)

    def _list_attention_layers(self) -> list[AttentionLayer]:
        return [layer for layer in self.layers if isinstance(layer, AttentionLayer)]

    def _get_opaque_layers(self) -> dict[int, Any]:
        """Return the layers whose state only transformers understands, by index."""
        return {i: self.layers[i] for i, info in enumerate(self.layer_info) if info.is_opaque}

    def _check_no_opaque_layers(self, method: str) -> None:
        if opaque_layers := self._get_opaque_layers():
            types = sorted({self.layer_info[index].kind for index in opaque_layers})
            raise CacheError(
                f"{method}: layers {list(opaque_layers)} ({', '.join(types)}) live in "
                "transformers, which supports only crop(-n), reset() and deepcopy for them"
            )

    def _invalidate_pending(self) -> None:
        """Invalidate the handles that the model still has: using one raises an error."""
        for layer in self._list_attention_layers():
            layer.invalidate_pending()

    def _clear_batch_info(self) -> None:
        """Forget the padding and the dtypes of the batch."""
        for layer in self._list_attention_layers():
            layer.clear_initialization()
        self.context.first_forward_done, self.context.padding = False, None
        self.context.end_speculation()

    def _select_sequences(self, indices: Any) -> None:
        """Select sequences of the batch, and their padding."""
        self._invalidate_pending()
        if self.states.batch == 0:
            return
        start = self.context.compute_start(self.states.batch)
        self.states.select(indices)
        if start is not None:
            self.context.padding = tuple(start[i] for i in indices.tolist())

    def _ensure_draft_slack(self, count: int) -> None:
        """Make a rewind of `count` tokens exact; if the slack is smaller, set it to `2 * count`."""
        if count > self.context.slack:
            self.ensure_slack(2 * count)
