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
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvant.cache import Cache
from kvant.errors import CacheError
from kvant.hf.cache_context import CacheContext
from kvant.hf.cache_methods import CacheMethods
from kvant.hf.layers import make_layer, make_recurrences
from kvant.hf.model_layers import ModelLayer
from kvant.hf.recurrence import RecurrentProgress
from kvant.recipes import CacheSpec

INITIAL_DRAFT_TOKENS = 32  # tokens of a draft; a longer one widens the cache again,
MAX_DRAFT_TOKENS = 256  # but a chunk beyond this is another prompt
GENERATE_CODE = inspect.unwrap(GenerationMixin.generate).__code__


class TransformersCache(CacheMethods, HFCache):
    """The memory of one batch of sequences, for a model of the host's.

    `states` is the cache as the rest of kvant knows it. Layers that only the host understands are
    of its own classes; they go along where they can, and what they cannot do is refused.
    """

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
        states = Cache(spec=spec, external_states=make_recurrences(layer_info, spec))
        told = None if padding is None else tuple(padding)
        self._initialize(
            tuple(layer_info), CacheContext(states, told, columns, is_cross, attachable), {}
        )

    def _initialize(
        self,
        layer_info: tuple[ModelLayer, ...],
        context: CacheContext,
        existing_layers: dict[int, Any],
    ) -> None:
        """`own` are the layers of the host's classes that exist already."""
        self.layer_info = layer_info
        self.context = context
        self._user_defined = False
        self._checks_use_cache = False  # is this the first or second forward of a `generate`?
        self._first_num_tokens = 0  # tokens of the first one
        self._first_attention_index = next(
            (i for i, one in enumerate(layer_info) if one.attends), None
        )
        host_states: list[Any] = context.states.external_states
        self._recurrent_progress = RecurrentProgress(layer_info, host_states)
        layers = [
            make_layer(context, i, one, existing_layers.get(i)) for i, one in enumerate(layer_info)
        ]
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
        if layer_idx >= len(self.layer_info):
            raise CacheError(
                f"rows for layer {layer_idx} of a cache for {len(self.layer_info)}: it was made "
                "for "
                "another model, or its configuration does not tell all layers"
            )
        if self._checks_use_cache and layer_idx == self._first_attention_index:
            self._check_use_cache(key_states.shape[2])
        if self.context.record_past and layer_idx == self._first_attention_index:
            count = key_states.shape[2]
            self._ensure_draft_slack(min(count, MAX_DRAFT_TOKENS))
            self.states.external_speculation = self.states.length > 0 and count <= MAX_DRAFT_TOKENS
        updated: tuple[Tensor, Tensor] = self.layers[layer_idx].update(
            key_states, value_states, *args, **kwargs
        )
        if self._recurrent_progress.recurrences:
            self._recurrent_progress.check_valid()
        return updated

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        if self._recurrent_progress.is_repeated_forward(layer_idx, state_idx):
            self.states.rollback()  # before this forward brings a state
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
        rows = all(leaf.storage is not None for _, leaf in self.states.contents.list_attention())
        return rows and all(state.has_shapes for state in self._recurrent_progress.recurrences)

    # ---- the verbs

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens; the host counts them as a negative number."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): a negative number, of the tokens to remove, is needed"
            )
        self._invalidate_pending()
        foreign, to = (
            self._get_opaque_layers().values(),
            max(0, self.states.length + tokens_to_remove),
        )
        if foreign and self.states.reachable(to) == to:
            for layer in foreign:  # theirs may refuse, ours cannot any more
                layer.crop(tokens_to_remove)
        self._rewind_to(to)

    def trim(self, count: int) -> int:
        """Drop the newest `count` tokens, or all there are; how many that was."""
        if count < 0:
            raise ValueError(f"trim({count}): 0 or more tokens")
        dropped = min(count, self.length)
        self.crop(-dropped)
        return dropped

    def reset(self) -> None:
        """Forget the tokens, keep the memory."""
        self._clear_batch_info()
        self.states.reset()
        for layer in self._get_opaque_layers().values():
            layer.reset()

    def clear(self) -> None:
        """Forget the tokens and free the memory."""
        self._clear_batch_info()
        self.states.clear()
        for index in self._get_opaque_layers():
            self.layers[index] = make_layer(self.context, index, self.layer_info[index], None)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select_sequences(beam_idx)
        for layer in self._get_opaque_layers().values():
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keep these sequences of the batch: whatever PyTorch takes in brackets."""
        chosen = _resolve_indices(indices, self.states.batch) if self.states.batch else indices
        self._select_sequences(chosen)
        for layer in self._get_opaque_layers().values():
            layer.batch_select_indices(chosen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._invalidate_pending()
        self.states.repeat(repeats)  # told padding needs nothing: `start` repeats it by itself
        for layer in self._get_opaque_layers().values():
            layer.batch_repeat_interleave(repeats)

    def activate_past_recording(self) -> None:
        """Speculation begins: go back exactly, and read a chunk as single tokens would be."""
        super().activate_past_recording()
        self.context.record_past = True
        if self.states.length:
            self.states.checkpoint()
        self._ensure_draft_slack(INITIAL_DRAFT_TOKENS)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Let a layer wait in the memory of the processor; small ones stay, unless asked."""
        if not (only_non_sliding and self.is_sliding[layer_idx]):
            self.layers[layer_idx].offload()

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Bring a layer back to where its rows are made."""
        if not (only_non_sliding and self.is_sliding[layer_idx]):
            self.layers[layer_idx].prefetch()

    def fork(self) -> TransformersCache:
        """A second cache with the same tokens, which shares pages until one writes to them."""
        return self.wrap_states(self.states.fork(), self.context.padding)

    def extract(self, sequence: int) -> TransformersCache:
        """A cache of one of the sequences alone, which shares its pages."""
        self._check_no_opaque_layers("extract")
        return self.wrap_states(self.states.extract(sequence))

    def remove(self, sequence: int) -> None:
        """Let one of the sequences go; the others stay as they are."""
        self._check_no_opaque_layers("remove")
        rest = [i for i in range(self.states.batch) if i != sequence]
        self.states.extract(sequence)  # refuses a number that there is not
        self.batch_select_indices(torch.tensor(rest))

    def merge_with(self, others: Sequence[Any]) -> TransformersCache:
        """The sequences of this cache and of others of the same model under one."""
        self._check_same_model(others)
        return self.wrap_states(self.states.merge_with([cache.states for cache in others]))

    def import_sequence(self, other: TransformersCache) -> TransformersCache:
        """Another cache of the same model in these pools, which begins with the tokens of this."""
        self._check_same_model([other])
        return self.wrap_states(self.states.import_sequence(other.states))

    def _check_same_model(self, others: Sequence[Any]) -> None:
        for cache in (self, *others):
            if not isinstance(cache, TransformersCache) or cache.layer_info != self.layer_info:
                raise ValueError("caches of different models: they have no layers in common")
            cache._check_no_opaque_layers("merge")

    def wrap_states(
        self, states: Cache, padding: tuple[int, ...] | None = None
    ) -> TransformersCache:
        """A cache of the same model with other states."""
        notes, replays = copy.deepcopy((self.context.attention_stats, self.context.replay_stats))
        context = replace(
            self.context,
            states=states,
            padding=padding,
            attention_stats=notes,
            replay_stats=replays,
        )
        twin = TransformersCache.__new__(TransformersCache)
        twin._initialize(
            self.layer_info,
            context,
            copy.deepcopy(self._get_opaque_layers(), {id(self.context): context}),
        )
        for old, new in zip(
            self._list_attention_layers(), twin._list_attention_layers(), strict=True
        ):
            new.copy_initialization(old)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformersCache:
        return self.fork()

    def __repr__(self) -> str:
        return f"TransformersCache({self.states!r})"

    # ---- within

    @property
    def _is_user_defined(self) -> bool:
        return self._user_defined

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        """`generate` marks a cache that it is given: what it holds is the end of a turn."""
        self._user_defined = self._checks_use_cache = value
        self._first_num_tokens = 0
        if value and self._recurrent_progress.recurrences and self.states.length:
            self.states.checkpoint()

    def _check_use_cache(self, count: int) -> None:
        """Refuse a `generate` without use_cache: each step brings all tokens and one more.

        A forward after the end of `generate` may bring as many, which are new ones.
        """
        first, self._first_num_tokens = self._first_num_tokens, count
        if not first:
            return
        self._checks_use_cache = False
        if count == first + 1 and not self.context.record_past and _is_generating():
            raise CacheError(
                f"{first} tokens and then {count}: generate reads the whole text at every step, "
                "since use_cache=False (look at model.generation_config), and would fill this "
                "cache with copies of it; say generate(..., use_cache=True), or give no cache"
            )

    def _clear_batch_info(self) -> None:
        """What was learnt of a batch."""
        for layer in self._list_attention_layers():
            layer.clear_initialization()
        self.context.first_forward_done, self.context.padding = False, None

    def _select_sequences(self, indices: Any) -> None:
        """The verb says which of the batch; padding that was told is of the batch too."""
        self._invalidate_pending()
        if self.states.batch == 0:
            return
        start = self.context.compute_start(self.states.batch)
        self.states.select(indices)
        if start is not None:
            self.context.padding = tuple(start[i] for i in indices.tolist())

    def _ensure_draft_slack(self, count: int) -> None:
        """Let all of the next chunk be taken back exactly."""
        if count > self.context.slack:
            self.ensure_slack(2 * count)


def _is_generating() -> bool:
    """Return whether `generate` of transformers is running: rows do not say their positions."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not GENERATE_CODE:
        frame = frame.f_back
    return frame is not None


def _resolve_indices(indices: Any, batch: int) -> Tensor:
    """The sequences that `rows[indices, ...]` keeps; an index that fails, fails as there."""
    indices = indices.cpu() if isinstance(indices, Tensor) else indices
    try:
        chosen = torch.arange(batch)[indices, ...]
    except (IndexError, TypeError) as error:
        raise type(error)(f"sequences {indices} of a batch of {batch}: {error}") from error
    if chosen.ndim != 1 or not len(chosen):
        raise ValueError(f"sequences {indices} of a batch of {batch}: one or more, in one row")
    return chosen
