"""Keys and values without storage, as a host's model sees them.

The host's own `scaled_dot_product_attention` on a pair of handles becomes attention on the pages;
any other operation makes the dense rows once. So every model is right, and most are fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvant.hf.lazies import Lazy
from kvant.hf.reading import Question, SideName, Source

ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class Handle(Lazy):
    """One side of a source."""

    source: Source
    side: SideName

    @classmethod
    def of(cls, source: Source, side: SideName, dtype: torch.dtype, device: torch.device) -> Handle:
        made: Handle = cls.shaped(source.shape(side), dtype, device)
        made.source, made.side = source, side
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            out = _intercepted(**dict(zip(ARGUMENTS, args, strict=False)), **(kwargs or {}))
            if out is not None:
                return out
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def make(self, why: str) -> Tensor:
        return self.source.rows(self.side, why)


def pair(source: Source, dtype: torch.dtype, device: torch.device) -> tuple[Handle, Handle]:
    """The keys and the values of a source."""
    keys = Handle.of(source, "keys", dtype, device)
    return keys, Handle.of(source, "values", dtype, device)


def source_of(key: Any, value: Any) -> Source | None:
    """Where keys and values come from, if they are the two sides of one source."""
    if type(key) is not Handle or type(value) is not Handle or key.source is not value.source:
        return None
    return key.source if (key.side, value.side) == ("keys", "values") else None


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
    return source.attend(query, Question(attn_mask, scale, causal=is_causal))
