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

from kvant.hf.lazies import Lazy
from kvant.hf.reading import Question, SideName, Source

ALL = slice(None)


class Handle(Lazy):
    """One side of a source, [B, H * times, n, D], or [B, H, times, n, D] on the way there."""

    source: Source
    side: SideName
    times: int
    whole: bool  # four dimensions: not on the way

    @classmethod
    def of(
        cls,
        source: Source,
        side: SideName,
        dtype: torch.dtype,
        device: torch.device,
        shape: Sequence[int],
        times: int = 1,
    ) -> Handle:
        made: Handle = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._real, made._shape = None, torch.Size(shape)
        made.source, made.side, made.times = source, side, times
        made.whole = len(shape) == 4
        return made

    def laid(self, shape: Sequence[int], times: int) -> Handle:
        """The same rows in another shape."""
        return Handle.of(self.source, self.side, self.dtype, self.device, shape, times)

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
            out = _intercepted(*args, **(kwargs or {}))
        elif func in REPEATING and type(args[0]) is Handle and not kwargs and not args[0].touched:
            out = REPEATING[func](*args)
        if out is not None:
            return out
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def make(self, why: str) -> Tensor:
        rows = self.source.rows(self.side, why)
        if rows.shape == self.shape:
            return rows
        return rows.repeat_interleave(self.times, 1).view(self.shape)


def pair(source: Source, dtype: torch.dtype, device: torch.device) -> tuple[Handle, Handle]:
    """The keys and the values of a source."""
    keys, values = source.shapes()
    return (
        Handle.of(source, "keys", dtype, device, keys),
        Handle.of(source, "values", dtype, device, values),
    )


def source_of(key: Any, value: Any) -> Source | None:
    """Where keys and values come from, if they are the two sides of one source."""
    if type(key) is not Handle or type(value) is not Handle or key.source is not value.source:
        return None
    alike = key.times == value.times and key.whole and value.whole
    alike = alike and key._real is None and value._real is None
    return key.source if alike and (key.side, value.side) == ("keys", "values") else None


def _intercepted(
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
    source = source_of(key, value)
    # A causal mask is laid to the upper left corner there: ours only where the two are one.
    if source is None or dropout_p or (is_causal and query.shape[2] != key.shape[2]):
        return None
    packable = not (is_causal or enable_gqa)
    return source.attend(query, Question(attn_mask, scale, causal=is_causal, packable=packable))


def _with_axis(handle: Handle, index: Any) -> Handle | None:
    """`x[:, :, None, :, :]`"""
    if handle.ndim != 4 or index != (ALL, ALL, None, ALL, ALL):
        return None
    batch, heads, rows, dim = handle.shape
    return handle.laid((batch, heads, 1, rows, dim), handle.times) if handle.times == 1 else None


def _expanded(handle: Handle, *shape: int) -> Handle | None:
    """`x.expand(batch, heads, times, rows, dim)`"""
    if handle.ndim != 5 or handle.times != 1 or len(shape) != 5:
        return None
    batch, heads, _, rows, dim = handle.shape
    times = shape[2]
    fits = shape == (batch, heads, times, rows, dim) and times > 0
    return handle.laid(shape, times) if fits else None


def _reshaped(handle: Handle, *shape: int) -> Handle | None:
    """`x.reshape(batch, heads * times, rows, dim)`"""
    if handle.ndim != 5 or len(shape) != 4:
        return None
    batch, heads, times, rows, dim = handle.shape
    return handle.laid(shape, times) if shape == (batch, heads * times, rows, dim) else None


REPEATING: Mapping[Any, Callable[..., Handle | None]] = {
    Tensor.__getitem__: _with_axis,
    Tensor.expand: _expanded,
    Tensor.reshape: _reshaped,
}
