"""What is right, said as plainly as possible and apart from the library's own bookkeeping."""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.contracts import Codec, Mask
from kvant.recipes import LayerSpec


def sees(mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    """The mask rule of the architecture, over positions."""
    near = (q - k < (mask.window or 1 << 40)) | (k < mask.sinks)
    block = k // (mask.chunk or 1 << 40) == q // (mask.chunk or 1 << 40)
    return (k >= 0) & ((k <= q) | (not mask.causal)) & near & block


def attention(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Float64 attention; `visible` is [B, T, n]; a query that sees nothing gets zeros."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (r.double().repeat_interleave(group, 1) for r in (keys, values))
    scores = q.double() @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    return weights.nan_to_num(0.0) @ values


def is_sealed(spec: LayerSpec, position: Tensor, query: Tensor) -> Tensor:
    """Does a query at this position see these rows sealed? The rule, word by word."""
    page_start = position // spec.page * spec.page
    due = page_start + spec.page <= query - (spec.paging.tail or 0) + 1
    dense = position < spec.retention.sinks
    return due & ~dense & (spec.seals & (query + 1 >= spec.dense_until))


def decoded(codec: Codec, rows: Tensor, page: int) -> Tensor:
    """Every whole page of rows as it comes back from the codec, the rest as it went in."""
    framed = codec.frame.transform_rows(rows)
    whole = framed.shape[2] // page * page
    batch, heads, _, dim = rows.shape
    pages = framed[:, :, :whole].reshape(batch, heads, whole // page, page, dim)
    opened = codec.open(codec.seal(pages)).reshape(batch, heads, whole, dim)
    return codec.frame.restore_outputs(torch.cat([opened, framed[:, :, whole:].float()], 2))


def side(codec: Codec, rows: Tensor, start: list[int], choice: Tensor, page: int) -> Tensor:
    """The rows of one side, sealed where `choice` says so; pages begin where sequences do."""
    count = choice.shape[1]
    dense = (
        codec.frame.restore_outputs(codec.frame.transform_rows(rows)).float()[:, :, :count].clone()
    )
    for which, first in enumerate(start):
        if first >= count:
            continue
        sealed = decoded(codec, rows[which : which + 1, :, first:], page)[0, :, : count - first]
        chosen = choice[which, first:]
        dense[which, :, first:][:, chosen] = sealed[:, chosen].float()
    return dense


def seen(
    spec: LayerSpec, keys: Tensor, values: Tensor, start: list[int], query: int, own_from: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values as a query at this column sees them, from all rows ever appended."""
    column = torch.arange(query + 1)
    position = column - torch.tensor(start)[:, None]
    here = position[:, -1:]
    choice = is_sealed(spec, position, here) & (position >= 0) & (column < own_from)
    both = [
        side(codec, rows, start, choice, spec.page)
        for codec, rows in ((spec.keys, keys), (spec.values, values))
    ]
    return both[0], both[1], sees(spec.mask, here, position)[:, None]
