"""What torch has to attend over raw rows: each way is called with keys and values.

Everywhere: SDPA with enable_gqa, SDPA with the queries of a group folded into their length, and
softmax(q k) v by hand. On a GPU also SDPA held to its flash kernel, and FlexAttention compiled.
Of several queries each sees the rows up to its own. Knows no clock, and nothing of kvant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

Way = Callable[[Tensor, Tensor], Any]


def torch_ways(q: Tensor, heads: int, length: int) -> dict[str, Way]:
    """For queries [B, heads * group, T, D], the newest of `length` rows."""
    batch, all_heads, queries, dim = q.shape
    folded = q.view(batch, heads, -1, dim)
    mask = folded_mask = None
    if queries > 1:
        mask = torch.ones(queries, length, dtype=torch.bool, device=q.device)
        mask = mask.tril(length - queries)
        folded_mask = mask.repeat(all_heads // heads, 1)

    def by_hand(keys: Tensor, values: Tensor) -> Any:
        scores = folded @ keys.transpose(2, 3) * dim**-0.5
        if folded_mask is not None:
            scores = scores.masked_fill(~folded_mask, -torch.inf)
        return scores.softmax(-1) @ values

    return {
        "torch gqa": lambda k, v: sdpa(q, k, v, attn_mask=mask, enable_gqa=True),
        "torch folded": lambda k, v: sdpa(folded, k, v, attn_mask=folded_mask),
        "torch by hand": by_hand,
    }


def gpu_ways(
    q: Tensor, heads: int, length: int, compiler: Callable[..., Any] = torch.compile
) -> dict[str, Way]:
    """Those, and what torch has for GPUs alone; which of them run is not said."""
    ways = torch_ways(q, heads, length)
    gqa, flex = ways["torch gqa"], compiler(flex_attention, dynamic=False)
    queries, blocks = q.shape[2], None
    if queries > 1:
        blocks = create_block_mask(
            lambda b, h, row, column: column <= row + length - queries,
            *(None, None, queries, length),
            device=str(q.device),
        )

    def flash(keys: Tensor, values: Tensor) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return gqa(keys, values)

    own = {
        "torch flash": flash,
        "torch flex": lambda k, v: flex(q, k, v, block_mask=blocks, enable_gqa=True),
    }
    return ways | own


def running(
    ways: Mapping[str, Way], keys: Tensor, values: Tensor
) -> tuple[dict[str, Way], list[str]]:
    """Those that run, found by running them once, and a line for each that does not."""
    found, skipped = {}, []
    for name, way in ways.items():
        try:
            way(keys, values)
            found[name] = way
        except Exception as error:  # what compilers raise has no common kind
            reason = next(iter(str(error).strip().splitlines()), "no reason is given")
            skipped.append(f"{name}: {type(error).__name__}, {reason}")
    return found, skipped
