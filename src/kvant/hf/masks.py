"""The host's masks as rules: a mask that nobody touches is never made.

The host asks for a mask before it asks for keys, with a function over indices. Where that function
is one of the known patterns, attention needs the rule and the padding and nothing that grows with
the context. Any other pattern is evaluated by the host's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvant.contracts import Mask
from kvant.hf.lazies import Lazy
from kvant.hf.padding import left_padding

HostMask = Callable[..., Tensor | None]  # of the host: the mask of one of its implementations
LOCAL: Mapping[str, Callable[[int], Mask]] = {  # the host's overlays on a causal mask
    "sliding_window_overlay.<locals>.inner_mask": lambda size: Mask(window=size),
    "chunked_overlay.<locals>.inner_mask": lambda size: Mask(chunk=size),
}


class LazyMask(Lazy):
    """What the host asked for: a rule where it is a known one, and the padding mask beside it."""

    host: HostMask
    asked: Mapping[str, Any]

    @classmethod
    def of(cls, host: HostMask, asked: Mapping[str, Any]) -> LazyMask:
        shape = (asked["batch_size"], 1, asked["q_length"], asked["kv_length"])
        # Models are known to ask a mask for its dtype, and to build beside it.
        kind = torch.bool if host is sdpa_mask else asked.get("dtype", torch.float32)
        made: LazyMask = cls.shaped(shape, kind, torch.device(asked.get("device", "cpu")))
        made.host, made.asked = host, asked
        return made

    def make(self, why: str) -> Tensor:
        made = self.host(**{**self.asked, "allow_is_causal_skip": False})
        assert made is not None  # only a skip gives none
        return made

    @cached_property
    def original(self) -> Tensor | None:
        """What the host would have made by itself; it may be nothing."""
        return self.host(**self.asked)

    @cached_property
    def rule(self) -> Mask | None:
        """None: a pattern that positions alone do not tell."""
        return pattern(self.asked["mask_function"], self.asked.get("local_size"))

    @cached_property
    def padding(self) -> list[int] | None:
        """Columns of left padding of each sequence; None where it is not that."""
        seen: Tensor | None = self.asked.get("attention_mask")
        columns = self.asked["q_offset"] + self.asked["q_length"]
        if seen is None:
            return [0] * self.asked["batch_size"]
        return left_padding(seen) if seen.ndim == 2 and seen.shape[1] == columns else None


def pattern(function: Callable[..., Any], local: int | None) -> Mask | None:
    """The rule that a mask function of the host stands for, if it is a known one."""
    if function is causal_mask_function:
        return Mask()
    cells = getattr(function, "__closure__", None)
    parts: Any = cells[0].cell_contents if cells else None
    if not isinstance(parts, tuple) or parts[1:] != (causal_mask_function,):
        return None
    rule = LOCAL.get(parts[0].__qualname__)
    return None if rule is None or local is None else rule(local)


def lazily(host: HostMask) -> HostMask:
    """The host's mask function, made lazy where attention may do without the mask."""

    def mask(**asked: Any) -> Tensor | None:
        # Packed sequences, blocks of an image and encoders are the host's own business.
        if not asked.get("allow_is_causal_skip", True) or asked.get("allow_is_bidirectional_skip"):
            return host(**asked)
        return LazyMask.of(host, asked)

    return mask
