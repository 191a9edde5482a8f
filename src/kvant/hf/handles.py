"""Define handles: keys and values without storage, which a cache returns to the model.

`scaled_dot_product_attention` on a pair of handles becomes attention on the pages. Any other
operation materializes the dense rows once. So every model is correct, and most are fused.

transformers repeats the heads of grouped queries in three steps, which a handle only records:

    [B, H, n, D]  x[:, :, None]  [B, H, 1, n, D]  expand  [B, H, times, n, D]  reshape
    [B, H * times, n, D]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvant.hf.lazy_tensor import LazyTensor
from kvant.hf.pending_attention import AttentionCall, KVSource, SideName

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
    may_pack_heads = not (is_causal or enable_gqa)
    return source.attend(
        query, AttentionCall(attn_mask, scale, causal=is_causal, may_pack_heads=may_pack_heads)
    )


def _insert_axis(handle: KVHandle, index: Any) -> KVHandle | None:
    """Record `x[:, :, None, :, :]`; None for another index."""
    if handle.ndim != 4 or index != (FULL_SLICE, FULL_SLICE, None, FULL_SLICE, FULL_SLICE):
        return None
    batch, heads, rows, dim = handle.shape
    return (
        handle.make_reshaped((batch, heads, 1, rows, dim), handle.repeats)
        if handle.repeats == 1
        else None
    )


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
    return (
        handle.make_reshaped(shape, times) if shape == (batch, heads * times, rows, dim) else None
    )


REPEAT_KV_FUNCTIONS: Mapping[Any, Callable[..., KVHandle | None]] = {
    Tensor.__getitem__: _insert_axis,
    Tensor.expand: _expand_heads,
    Tensor.reshape: _merge_heads,
}
