"""The cache that a model of transformers gets in a replayed forward, of one step per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import CacheLayerMixin

from kvant.contracts import Mask, View
from kvant.errors import CacheError, UnsupportedView
from kvant.hf.cache_context import AttentionStats
from kvant.hf.handles import AttentionCall, PendingAttention, SideName, make_handles
from kvant.hf.layers import AttentionLayer
from kvant.replay.steps import DecodeStep


@dataclass(eq=False, kw_only=True)
class PendingReplayAttention(PendingAttention):
    """The rows of one layer; attention first stores the rows of the new tokens."""

    step: DecodeStep
    new_rows: tuple[Tensor, Tensor]

    def attend_view(
        self, q: Tensor, view: View, rule: Mask | Tensor | None, call: AttentionCall
    ) -> Tensor:
        if isinstance(rule, Tensor) or view is not self.view:
            raise UnsupportedView("a mask that is a tensor")
        step = self.step if rule is None else replace(self.step, mask=rule)
        return step(
            q,
            *self.new_rows,
            scale=call.scale,
            softcap=call.softcap,
            sink_logits=call.sink_logits,
        )

    def read_rows(self, side: SideName, reason: str) -> Tensor:
        raise UnsupportedView(f"{reason} needs dense rows")


class ReplayLayer(CacheLayerMixin):
    """One attention layer of a replayed forward; `step` stores its rows and attends."""

    def __init__(self, layer: AttentionLayer, step: DecodeStep) -> None:
        self.step = step
        self.is_sliding = layer.is_sliding
        self.is_window_narrowed = layer.is_window_narrowed
        self.window, self.model_has_gqa = layer.layer_info.window, layer.layer_info.model_has_gqa
        super().__init__()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the layer has its tensors."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        source = PendingReplayAttention(
            self.step.view,
            self.step.page_table.num_new,
            self.get_mask_sizes(self.step.page_table.num_new)[0],
            key_states.dtype,
            AttentionStats(),
            self.is_window_narrowed,
            model_has_gqa=self.model_has_gqa,
            step=self.step,
            new_rows=(key_states, value_states),
        )
        return make_handles(source, key_states.dtype, key_states.device)

    def get_seq_length(self) -> Tensor:
        """Return the number of columns before these tokens, as a tensor."""
        page_table = self.step.page_table
        return page_table.columns - page_table.num_new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return an upper bound on columns; a mask tensor of that size is refused later."""
        capacity = self.step.page_table.capacity
        return capacity if self.window is None else min(capacity, self.window), 0

    def get_max_length(self) -> int:
        return -1

    def reset(self, *args: Any) -> NoReturn:
        raise CacheError("a captured forward may only append its tokens to its cache")

    crop = reorder_cache = batch_select_indices = batch_repeat_interleave = reset


class ReplayCache(HFCache):
    """The cache of a replayed forward: ReplayLayers, and the layers without rows."""

    def __init__(self, layers: Sequence[Any], steps: Sequence[DecodeStep]) -> None:
        remaining = iter(steps)
        super().__init__(
            layers=[
                ReplayLayer(layer, next(remaining)) if isinstance(layer, AttentionLayer) else layer
                for layer in layers
            ]
        )

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        first = next(layer for layer in self.layers if isinstance(layer, ReplayLayer))
        return first.get_seq_length()
