"""The attention that follows an append: on the stored pages, or on dense rows.

The model receives handles of a PendingAttention in place of keys and values. `attend` computes
attention on the pages where it can; otherwise `read_rows` materializes dense rows. A pending
attention is current until the next append to its layer.
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
    "only kvant's attention applies a window that the model does not have: "
    "kvant.attach the model, or leave the window out"
)
STORED_PREFILL_REFUSAL = (
    "the tokens of this chunk see different rows (prefill=stored, or a speculation): "
    "kvant.attach the model, or use a raw format"
)
PRUNED_REFUSAL = (
    "each head of this layer keeps different rows after a prune: kvant.attach the model, or leave "
    "the prune out"
)
RAGGED_REFUSAL = (
    "the sequences of this cache have different lengths, and without a mask attention would read "
    "rows before their first tokens: kvant.attach the model, or extract each sequence"
)
SideName = Literal["keys", "values"]


class AttentionCall(NamedTuple):
    """The arguments of an attention call of the model, except the queries."""

    mask: Tensor | None
    scale: float | None
    causal: bool = True
    softcap: float | None = None
    sink_logits: Tensor | None = None
    may_pack_heads: bool = False  # query heads of a group may be packed into the token dimension


class KVSource(Protocol):
    """The source of the keys and values behind a pair of handles."""

    def get_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the keys and of the values."""

    def attend(self, q: Tensor, call: AttentionCall) -> Tensor | None:
        """Compute attention [B, heads, T, D]; return None if dense rows are needed."""

    def read_rows(self, side: SideName, reason: str) -> Tensor:
        """Return dense rows, contiguous, since some models call `view` on them."""


@dataclass(eq=False)
class PendingAttention:
    """The rows of one layer for the forward that appended `num_new` tokens."""

    view: View
    num_new: int
    num_columns: int  # the newest columns, as many as the masks of the model have
    dtype: torch.dtype
    attention_stats: AttentionStats
    is_window_narrowed: bool = False  # the view's window is not the model's
    stored_prefill: bool = False  # the tokens of a chunk see different rows
    model_has_gqa: bool = True  # some layer of the model has grouped queries
    layer_has_gqa: bool = False  # an earlier call showed that this layer has them
    is_current: bool = True
    is_materialized: bool = False
    takes_tensor_masks: bool = True  # some kernels accept only rules

    def get_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        view = self.view
        lead = (view.batch, view.heads, self.num_columns)
        return (*lead, view.keys.dim), (*lead, view.value_dim)

    def attend(self, q: Tensor, call: AttentionCall) -> Tensor | None:
        if not self.is_current:
            self.check_current()
        mask, shape = call.mask, q.shape
        packed = self.detect_packed_heads(q, call)
        if packed:
            q, mask = pack_queries_as_heads(q, mask)
        if packed is None or not self.matches_queries(q):
            return None
        resolved = resolve_mask(self.view, q.shape[2], mask, call.causal, self.is_window_narrowed)
        if resolved is None:
            return None
        view, rule = resolved
        if isinstance(rule, Tensor) and not self.takes_tensor_masks:
            return None
        self.attention_stats.tensor_masks += isinstance(rule, Tensor)
        out = self.attend_view(q, view, None if rule is view.mask else rule, call)
        self.attention_stats.fused_calls += 1
        return out.reshape(*shape[:3], -1) if packed else out

    def attend_view(
        self, q: Tensor, view: View, rule: Mask | Tensor | None, call: AttentionCall
    ) -> Tensor:
        """Compute attention over all rows, including those just appended."""
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
        """Return whether `q` packs the query heads of each group into its token dimension.

            as usual  [B, H * group, 1, D]
            packed    [B, H, group, D]

        transformers packs for one token (`pack_gqa`), which may be the last of several. The shape
        alone is ambiguous if a chunk has `group` tokens. None: unknown.
        """
        heads, mask = self.view.heads, call.mask
        self.layer_has_gqa |= q.shape[1] > heads
        if not call.may_pack_heads or q.shape[1] != heads or q.shape[2] == 1:
            return False
        if mask is not None and heads > 1 and mask.shape[1:3] == (1, q.shape[2]):
            return False  # a mask row per query: the queries are tokens
        if self.num_new == 1 or self.layer_has_gqa:
            return True
        return None if self.model_has_gqa else False

    def matches_queries(self, q: Tensor) -> bool:
        """Return whether `q` has queries of all appended tokens, or of the last one."""
        view = self.view
        batch, heads, tokens, dim = q.shape
        fits = batch == view.batch and dim == view.keys.dim and heads % view.heads == 0
        return fits and tokens in (1, self.num_new)  # a model may compute only the last logits

    def check_current(self) -> None:
        """Refuse a pending attention whose cache has changed since."""
        if not self.is_current:
            raise CacheError(
                "keys or values of an earlier forward: the cache has changed since; read "
                "them before the next forward"
            )

    def check_dense(self, reason: str) -> None:
        """Refuse dense rows that differ from what attention reads; count the others once."""
        self.check_current()
        refusal = (
            NARROW_WINDOW_REFUSAL
            if self.is_window_narrowed
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
    """Return the newest columns as the newest query sees them, decoded and out of their frame."""
    tensors, length = view.keys if side == "keys" else view.values, view.page_table.num_columns
    return tensors.codec.frame.restore_outputs(
        read_columns(view, side, length - num_columns, length)
    )


def pack_queries_as_heads(q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Turn each query into another head of its group, at the newest column."""
    if mask is not None and mask.shape[1] * mask.shape[2] > 1:
        mask = mask.expand(-1, *q.shape[1:3], -1).flatten(1, 2).unsqueeze(2)
    batch, heads, count, dim = q.shape
    return q.reshape(batch, heads * count, 1, dim), mask


@dataclass(eq=False)
class PendingPromptAttention(PendingAttention):
    """The dense rows of a first chunk: transformers attends to them if no kernel is faster."""

    keys: Tensor = field(kw_only=True)
    values: Tensor = field(kw_only=True)
    takes_tensor_masks: bool = False

    def attend(self, q: Tensor, call: AttentionCall) -> Tensor | None:
        """Compute attention; return None if gradients are needed or no kernel is faster."""
        if (torch.is_grad_enabled() and q.requires_grad) or not has_fast_prefill(self.view, q):
            return None
        return super().attend(q, call)

    def read_rows(self, side: SideName, reason: str) -> Tensor:
        self.check_current()
        return (self.keys if side == "keys" else self.values).contiguous()


class PendingCrossAttention(PendingAttention):
    """Rows of an encoder, all visible to every query."""

    def attend(self, q: Tensor, call: AttentionCall) -> Tensor | None:
        """Compute attention with each query as another head, at the newest column."""
        self.check_current()
        heads, dim = self.view.keys.heads, self.view.keys.dim
        if q.shape[::3] != (self.view.batch, dim) or q.shape[1] % heads or q.shape[2] == 0:
            return None
        packed, mask = pack_queries_as_heads(
            q, materialize_tensor(call.mask, "a mask over an encoder's rows")
        )
        self.attention_stats.tensor_masks += mask is not None
        out = attend(packed, self.view, mask=mask, scale=call.scale, softcap=call.softcap)
        assert isinstance(out, Tensor)
        self.attention_stats.fused_calls += 1
        return out.reshape(*q.shape[:3], -1)
