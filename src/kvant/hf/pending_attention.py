"""What the host is handed after an append, in place of keys and values.

A reading answers for attention where it can (`attend`), on the pages. Where it cannot, `rows` are
the dense rows, made once. It is current until the layer's next append.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kvant.attention import attend, has_fast_prefill
from kvant.cache.readable_rows import read_columns
from kvant.contracts import Mask, View
from kvant.errors import CacheError, UnsupportedView
from kvant.hf.cache_context import AttentionStats
from kvant.hf.lazy_tensor import materialize_tensor
from kvant.hf.masks import resolve_mask

NARROW_WINDOW_REFUSAL = (
    "a window that the model does not have itself is seen by kvant's attention alone: "
    "kvant.attach the model, or leave the window out"
)
STORED_PREFILL_REFUSAL = (
    "each token of this chunk sees rows of its own (prefill=stored, or a speculation): "
    "kvant.attach the model, or take a raw format"
)
PRUNED_REFUSAL = (
    "rows of this layer were pruned, each head keeps others: kvant.attach the model, or leave the "
    "prune out"
)
RAGGED_REFUSAL = (
    "the sequences of this cache have different lengths, and dense rows without a mask would show "
    "tokens that are not there: kvant.attach the model, or extract the sequences one by one"
)
SideName = Literal["keys", "values"]


class AttentionCall(NamedTuple):
    """What an attention call of the host asks, beside its queries."""

    mask: Tensor | None
    scale: float | None
    causal: bool = True
    softcap: float | None = None
    sink_logits: Tensor | None = None
    may_pack_heads: bool = False  # the queries may be heads, laid out so by the host


class KVSource(Protocol):
    """Where the keys and values that a host sees come from."""

    def get_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the keys, and of the values."""

    def attend(self, q: Tensor, call: AttentionCall) -> Tensor | None:
        """Attention [B, heads, T, D], or None where dense rows are needed after all."""

    def read_rows(self, side: SideName, reason: str) -> Tensor:
        """Dense rows, contiguous: models are known to call `view` on them."""


@dataclass(eq=False)
class PendingAttention:
    """The rows of one layer for the forward that appended `count` tokens."""

    view: View
    num_new: int
    num_columns: int  # the newest columns, those the host has been told of
    dtype: torch.dtype
    attention_stats: AttentionStats
    narrows_window: bool = False  # the view's window is not the model's
    stored_prefill: bool = False  # each token of a chunk sees rows of its own
    model_has_gqa: bool = True  # some layer of the host has grouped queries
    layer_has_gqa: bool = False  # and so has the one that these rows are of: it was seen
    is_current: bool = True
    is_materialized: bool = False
    takes_tensor_masks: bool = True  # may masks be tensors, which not every kernel takes?

    def get_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        view = self.view
        lead = (view.batch, view.heads, self.num_columns)
        return (*lead, view.keys.dim), (*lead, view.value_dim)

    def attend(self, q: Tensor, call: AttentionCall) -> Tensor | None:
        if not self.is_current:
            self.check_current()
        mask, asked = call.mask, q.shape
        packed = self.detect_packed_heads(q, call)
        if packed:
            q, mask = pack_queries_as_heads(q, mask)
        if packed is None or not self.matches_queries(q):
            return None
        seen = resolve_mask(self.view, q.shape[2], mask, call.causal, self.narrows_window)
        if seen is None:
            return None
        view, rule = seen
        if isinstance(rule, Tensor) and not self.takes_tensor_masks:
            return None
        self.attention_stats.tensor_masks += isinstance(rule, Tensor)
        out = self.attend_view(q, view, None if rule is view.mask else rule, call)
        self.attention_stats.fused_calls += 1
        return out.reshape(*asked[:3], -1) if packed else out

    def attend_view(
        self, q: Tensor, view: View, rule: Mask | Tensor | None, call: AttentionCall
    ) -> Tensor:
        """Attention over all rows, those that were appended included."""
        out = attend(
            q,
            view,
            mask=rule,
            scale=call.scale,
            softcap=call.softcap,
            sink_logits=call.sink_logits,
        )
        assert isinstance(out, Tensor)
        return out

    def read_rows(self, side: SideName, reason: str) -> Tensor:
        self.check_dense(reason)
        rows = read_dense_rows(self.view, side, self.num_columns)
        if side == "values":
            rows = rows[..., : self.view.value_dim]
        return rows.to(self.dtype).contiguous()

    def detect_packed_heads(self, q: Tensor, call: AttentionCall) -> bool | None:
        """Are these the heads of the newest token, those of a group laid out as its queries?

        The host does so for one token (`pack_gqa`), which may be the last of several. Sizes cannot
        tell: as many tokens as a group has heads look the same. None: nothing can tell.
        """
        heads, mask = self.view.heads, call.mask
        self.layer_has_gqa |= q.shape[1] > heads
        if not call.may_pack_heads or q.shape[1] != heads or q.shape[2] == 1:
            return False
        if mask is not None and heads > 1 and mask.shape[1:3] == (1, q.shape[2]):
            return False  # a row for each query is one for each token: all heads share it
        if self.num_new == 1 or self.layer_has_gqa:
            return True
        return None if self.model_has_gqa else False

    def matches_queries(self, q: Tensor) -> bool:
        """Are these the queries of the tokens that were appended, or of the last of them?"""
        view = self.view
        batch, asked, tokens, width = q.shape
        fits = batch == view.batch and width == view.keys.dim and asked % view.heads == 0
        return fits and tokens in (1, self.num_new)  # a model may need the last one's logits only

    def check_current(self) -> None:
        if not self.is_current:
            raise CacheError(
                "keys or values of an earlier forward: the cache has moved on since, and they are "
                "not what they were; read them before the next forward"
            )

    def check_dense(self, reason: str) -> None:
        """Refuse dense rows that would not be what attention sees; count the others once."""
        self.check_current()
        refusal = (
            NARROW_WINDOW_REFUSAL
            if self.narrows_window
            else STORED_PREFILL_REFUSAL
            if self.stored_prefill
            else None
        )
        refusal = RAGGED_REFUSAL if self.view.page_table.ragged else refusal
        refusal = PRUNED_REFUSAL if self.view.page_table.pruned_at.any() else refusal
        if refusal is not None:
            raise UnsupportedView(f"{reason} needs dense rows, but {refusal}")
        if not self.is_materialized:
            self.attention_stats.materialized[reason] += 1
            self.is_materialized = True


def read_dense_rows(view: View, side: SideName, num_columns: int) -> Tensor:
    """The newest columns as the newest query sees them, out of their frame."""
    stored, length = view.keys if side == "keys" else view.values, view.page_table.num_columns
    return stored.codec.frame.restore_outputs(
        read_columns(view, side, length - num_columns, length)
    )


def pack_queries_as_heads(q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Each query as one more head, at the newest column."""
    if mask is not None and mask.shape[1] * mask.shape[2] > 1:
        mask = mask.expand(-1, *q.shape[1:3], -1).flatten(1, 2).unsqueeze(2)
    batch, heads, count, dim = q.shape
    return q.reshape(batch, heads * count, 1, dim), mask


@dataclass(eq=False)
class PendingPromptAttention(PendingAttention):
    """The rows of a first chunk, as they came: where no kernel reads them, the host does."""

    keys: Tensor = field(kw_only=True)
    values: Tensor = field(kw_only=True)
    takes_tensor_masks: bool = False

    def attend(self, q: Tensor, call: AttentionCall) -> Tensor | None:
        """None where gradients are wanted, too, and where no kernel is sooner done."""
        if (torch.is_grad_enabled() and q.requires_grad) or not has_fast_prefill(self.view, q):
            return None
        return super().attend(q, call)

    def read_rows(self, side: SideName, reason: str) -> Tensor:
        self.check_current()
        return (self.keys if side == "keys" else self.values).contiguous()


class PendingCrossAttention(PendingAttention):
    """Rows of an encoder: every query sees all of them, however many queries there are."""

    def attend(self, q: Tensor, call: AttentionCall) -> Tensor | None:
        """Each query as one more head of its group, at the newest column."""
        self.check_current()
        heads, dim = self.view.keys.heads, self.view.keys.dim
        if q.shape[::3] != (self.view.batch, dim) or q.shape[1] % heads or q.shape[2] == 0:
            return None
        folded, mask = pack_queries_as_heads(
            q, materialize_tensor(call.mask, "a mask over an encoder's rows")
        )
        self.attention_stats.tensor_masks += mask is not None
        out = attend(folded, self.view, mask=mask, scale=call.scale, softcap=call.softcap)
        assert isinstance(out, Tensor)
        self.attention_stats.fused_calls += 1
        return out.reshape(*q.shape[:3], -1)
