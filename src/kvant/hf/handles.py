"""Keys and values without storage, as a host's model sees them.

The host's own `scaled_dot_product_attention` on a pair of handles becomes attention on the pages;
any other operation makes the dense rows once. So every model is right, and most are fused. Where
the host repeats heads for grouped queries, a handle goes along: it repeats nothing, but says so.
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
    """One side of a source, [B, H * times, n, D], or [B, H, times, n, D] on the way there."""

    source: KVSource
    side: SideName
    repeats: int
    is_4d: bool  # four dimensions: not on the way

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
        made: KVHandle = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._dense, made._shape = None, torch.Size(shape)
        made.source, made.side, made.repeats = source, side, repeats
        made.is_4d = len(shape) == 4
        return made

    def make_reshaped(self, shape: Sequence[int], repeats: int) -> KVHandle:
        """The same rows in another shape."""
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
    """The keys and the values of a source."""
    keys, values = source.get_shapes()
    return (
        KVHandle.from_source(source, "keys", dtype, device, keys),
        KVHandle.from_source(source, "values", dtype, device, values),
    )


def get_shared_source(key: Any, value: Any) -> KVSource | None:
    """Where keys and values come from, if they are the two sides of one source."""
    if type(key) is not KVHandle or type(value) is not KVHandle or key.source is not value.source:
        return None
    alike = key.repeats == value.repeats and key.is_4d and value.is_4d
    alike = alike and key._dense is None and value._dense is None
    return key.source if alike and (key.side, value.side) == ("keys", "values") else None


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
    """PyTorch's attention on a pair of handles, or None where it must see dense rows."""
    source = get_shared_source(key, value)
    # A causal mask is laid to the upper left corner there: ours only where the two are one.
    if source is None or dropout_p or (is_causal and query.shape[2] != key.shape[2]):
        return None
    packable = not (is_causal or enable_gqa)
    return source.attend(
        query, AttentionCall(attn_mask, scale, causal=is_causal, may_pack_heads=packable)
    )


def _insert_axis(handle: KVHandle, index: Any) -> KVHandle | None:
    """`x[:, :, None, :, :]`"""
    if handle.ndim != 4 or index != (FULL_SLICE, FULL_SLICE, None, FULL_SLICE, FULL_SLICE):
        return None
    batch, heads, rows, dim = handle.shape
    return (
        handle.make_reshaped((batch, heads, 1, rows, dim), handle.repeats)
        if handle.repeats == 1
        else None
    )


def _expand_heads(handle: KVHandle, *shape: int) -> KVHandle | None:
    """`x.expand(batch, heads, times, rows, dim)`"""
    if handle.ndim != 5 or handle.repeats != 1 or len(shape) != 5:
        return None
    batch, heads, _, rows, dim = handle.shape
    times = shape[2]
    fits = shape == (batch, heads, times, rows, dim) and times > 0
    return handle.make_reshaped(shape, times) if fits else None


def _merge_heads(handle: KVHandle, *shape: int) -> KVHandle | None:
    """`x.reshape(batch, heads * times, rows, dim)`"""
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
