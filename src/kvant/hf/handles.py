"""Define handles: keys and values without storage, which a cache returns to the model.

`scaled_dot_product_attention` on a pair of handles becomes attention on the pages. Any other
operation materializes the dense rows once. So every model works, and most read the pages directly.

For grouped queries, transformers repeats the heads of keys and values in three steps. A handle only
records them:

    [B, H, n, D] --x[:, :, None]--> [B, H, 1, n, D] --expand--> [B, H, times, n, D]
                 --reshape--> [B, H * times, n, D]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvant.attention import attend, has_fast_prefill
from kvant.cache.readable_rows import read_columns
from kvant.contracts import Mask, View
from kvant.errors import CacheError, UnsupportedView
from kvant.hf.cache_context import AttentionStats
from kvant.hf.masks import LazyTensor, materialize_tensor, resolve_mask

NARROW_WINDOW_REFUSAL = (
    "only kvant's attention applies a window that the model does not have: "
    "kvant.attach the model, or leave the window out"
)
STORED_PREFILL_REFUSAL = (
    "each token of this chunk must read the rows as if decoded alone (prefill=stored, or a "
    "speculation). One token reads a row before it is quantized and another after, and one dense "
    "tensor cannot hold both: "
    "kvant.attach the model, or use a raw format"
)
PRUNED_REFUSAL = (
    "each head of this layer keeps different rows after a prune: kvant.attach the model, or leave "
    "the prune out"
)
RAGGED_REFUSAL = (
    "the sequences of this cache have different lengths, and dense attention without a mask would "
    "read the padding before their first tokens: kvant.attach the model, or extract each sequence"
)
SideName = Literal["keys", "values"]


class AttentionCall(NamedTuple):
    """The arguments of an attention call of the model, except the queries."""

    mask: Tensor | None
    scale: float | None
    causal: bool = True
    softcap: float | None = None
    sink_logits: Tensor | None = None
    may_be_packed: bool = False  # transformers may have packed the query heads of a group as tokens


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
    num_columns: int  # the newest columns, which the model's masks cover
    dtype: torch.dtype
    attention_stats: AttentionStats
    is_window_narrowed: bool = False  # the view's window is not the model's
    stored_prefill: bool = False  # each token of a chunk reads as if decoded alone
    model_has_gqa: bool = True  # some layer of the model has grouped queries
    layer_has_gqa: bool = False  # a call on these handles had more query heads than key heads
    is_current: bool = True
    is_materialized: bool = False
    takes_tensor_masks: bool = True  # some kernels accept only masks that are rules (masks.py)

    def get_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        view = self.view
        lead = (view.batch, view.heads, self.num_columns)
        return (*lead, view.keys.dim), (*lead, view.value_dim)

    def attend(self, q: Tensor, call: AttentionCall) -> Tensor | None:
        if not self.is_current:
            self.check_current()
        mask, shape, view, packed = call.mask, q.shape, self.view, False
        self.layer_has_gqa |= shape[1] > view.heads
        if call.may_be_packed and shape[1] == view.heads and shape[2] > 1:
            detected = self.detect_packed_heads(q, mask)
            if detected is None:
                return None
            if packed := detected:
                q, mask = turn_queries_into_heads(q, mask)
        batch, heads, count, dim = q.shape
        fits = batch == view.batch and heads % view.heads == 0 and dim == view.keys.dim
        if not fits or count not in (1, self.num_new):  # a model may compute only the last logits
            return None
        resolved = resolve_mask(view, count, mask, call.causal, self.is_window_narrowed)
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

    def detect_packed_heads(self, q: Tensor, mask: Tensor | None) -> bool | None:
        """Return whether the token dimension of `q` holds the query heads of each group.

            as usual  [B, H * group, 1, D]
            packed    [B, H, group, D]

        transformers packs the queries of one token (`pack_gqa`), which may be the last token of a
        chunk. A chunk of `group` tokens without grouped queries has the packed shape too. Return
        None if both are possible.
        """
        if mask is not None and q.shape[1] > 1 and mask.shape[1:3] == (1, q.shape[2]):
            return False  # a mask row per query: the queries are tokens
        if self.num_new == 1 or self.layer_has_gqa:
            return True
        return None if self.model_has_gqa else False

    def check_current(self) -> None:
        """Refuse to read if the cache has changed since the forward of this attention."""
        if not self.is_current:
            raise CacheError(
                "keys or values of an earlier forward: the cache has changed since; read "
                "them before the next forward"
            )

    def check_dense(self, reason: str) -> None:
        """Refuse dense rows that differ from what attention reads; count the first allowed read."""
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
    """Return the newest columns as the newest query sees them: decoded from their format.

    Rows are stored in the codec's frame (a rotation or scaling), which this undoes.
    """
    tensors, length = view.keys if side == "keys" else view.values, view.page_table.num_columns
    return tensors.codec.frame.restore_outputs(
        read_columns(view, side, length - num_columns, length)
    )


def turn_queries_into_heads(q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Move the query tokens into the head dimension; all then attend from the newest position."""
    if mask is not None and mask.shape[1] * mask.shape[2] > 1:
        mask = mask.expand(-1, *q.shape[1:3], -1).flatten(1, 2).unsqueeze(2)
    batch, heads, count, dim = q.shape
    return q.reshape(batch, heads * count, 1, dim), mask


@dataclass(eq=False)
class PendingFirstChunk(PendingAttention):
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
        """Compute attention with query tokens as heads: each sees all rows."""
        self.check_current()
        heads, dim = self.view.keys.heads, self.view.keys.dim
        if q.shape[::3] != (self.view.batch, dim) or q.shape[1] % heads or q.shape[2] == 0:
            return None
        queries, mask = turn_queries_into_heads(
            q, materialize_tensor(call.mask, "a mask over an encoder's rows")
        )
        self.attention_stats.tensor_masks += mask is not None
        out = attend(queries, self.view, mask=mask, scale=call.scale, softcap=call.softcap)
        assert isinstance(out, Tensor)
        self.attention_stats.fused_calls += 1
        return out.reshape(*q.shape[:3], -1)


FULL_SLICE = slice(None)


class KVHandle(LazyTensor):
    """The keys or values of a source, such as a PendingAttention.

    Its shape is [B, H * repeats, n, D], or 5-d while heads are repeated.
    """

    source: KVSource
    side: SideName
    repeats: int
    is_4d: bool  # usable for attention: no repetition of heads is under way

    @classmethod
    def from_source(
        cls,
        source: KVSource,
        side: SideName,
        dtype: torch.dtype,
        device: torch.device,
        shape: Sequence[int],
        repeats: int = 1,
    ) -> KVHandle:
        """Return a handle of one side of `source`."""
        handle: KVHandle = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        handle._dense, handle._shape = None, torch.Size(shape)
        handle.source, handle.side, handle.repeats = source, side, repeats
        handle.is_4d = len(shape) == 4
        return handle

    def make_reshaped(self, shape: Sequence[int], repeats: int) -> KVHandle:
        """Return a handle of the same rows in another shape."""
        return KVHandle.from_source(self.source, self.side, self.dtype, self.device, shape, repeats)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out: Tensor | None = None
        if func is functional.scaled_dot_product_attention:
            out = _attend_handles(*args, **(kwargs or {}))
        elif (
            func in REPEAT_KV_FUNCTIONS
            and type(args[0]) is KVHandle
            and not kwargs
            and not args[0].is_materialized
        ):
            out = REPEAT_KV_FUNCTIONS[func](*args)
        if out is not None:
            return out
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def compute_dense(self, reason: str) -> Tensor:
        rows = self.source.read_rows(self.side, reason)
        if rows.shape == self.shape:
            return rows
        return rows.repeat_interleave(self.repeats, 1).view(self.shape)


def make_handles(
    source: KVSource, dtype: torch.dtype, device: torch.device
) -> tuple[KVHandle, KVHandle]:
    """Return handles of the keys and the values of a source."""
    keys, values = source.get_shapes()
    return (
        KVHandle.from_source(source, "keys", dtype, device, keys),
        KVHandle.from_source(source, "values", dtype, device, values),
    )


def get_shared_source(key: Any, value: Any) -> KVSource | None:
    """Return the source of a pair of handles, None if they are not its keys and values."""
    if type(key) is not KVHandle or type(value) is not KVHandle or key.source is not value.source:
        return None
    is_pair = key.repeats == value.repeats and key.is_4d and value.is_4d
    is_pair = is_pair and key._dense is None and value._dense is None
    return key.source if is_pair and (key.side, value.side) == ("keys", "values") else None


def _attend_handles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Compute PyTorch's attention on a pair of handles; None if it needs dense rows."""
    source = get_shared_source(key, value)
    # PyTorch aligns causal masks to the upper left, kvant to the lower right: equal if square.
    if source is None or dropout_p or (is_causal and query.shape[2] != key.shape[2]):
        return None
    # Without these options, transformers may have packed query heads into the token dimension.
    may_be_packed = not (is_causal or enable_gqa)
    return source.attend(
        query, AttentionCall(attn_mask, scale, causal=is_causal, may_be_packed=may_be_packed)
    )


def _insert_axis(handle: KVHandle, index: Any) -> KVHandle | None:
    """Record `x[:, :, None, :, :]`; None for another index."""
    inserted = (FULL_SLICE, FULL_SLICE, None, FULL_SLICE, FULL_SLICE)
    if handle.ndim != 4 or handle.repeats != 1 or index != inserted:
        return None
    batch, heads, rows, dim = handle.shape
    return handle.make_reshaped((batch, heads, 1, rows, dim), 1)


def _expand_heads(handle: KVHandle, *shape: int) -> KVHandle | None:
    """Record `x.expand(batch, heads, times, rows, dim)`; None for another shape."""
    if handle.ndim != 5 or handle.repeats != 1 or len(shape) != 5:
        return None
    batch, heads, _, rows, dim = handle.shape
    times = shape[2]
    fits = shape == (batch, heads, times, rows, dim) and times > 0
    return handle.make_reshaped(shape, times) if fits else None


def _merge_heads(handle: KVHandle, *shape: int) -> KVHandle | None:
    """Record `x.reshape(batch, heads * times, rows, dim)`; None for another shape."""
    if handle.ndim != 5 or len(shape) != 4:
        return None
    batch, heads, times, rows, dim = handle.shape
    fits = shape == (batch, heads * times, rows, dim)
    return handle.make_reshaped(shape, times) if fits else None


REPEAT_KV_FUNCTIONS: Mapping[Any, Callable[..., KVHandle | None]] = {
    Tensor.__getitem__: _insert_axis,
    Tensor.expand: _expand_heads,
    Tensor.reshape: _merge_heads,
}
