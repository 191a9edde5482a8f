"""Expected results, computed as plainly as possible and independent of the library's page
tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.contracts import Codec, Mask
from kvant.recipes import LayerSpec


def visible_positions(mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    """Return visible positions by the mask rule of the architecture."""
    visible = (q - k < (mask.window or 1 << 40)) | (k < mask.sinks)
    block = k // (mask.chunk or 1 << 40) == q // (mask.chunk or 1 << 40)
    return (k >= 0) & ((k <= q) | (not mask.causal)) & visible & block


def exact_attention(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Compute float64 attention; `visible` is [B, T, n]; a query with no visible key gives
    zeros.
    """
    group = q.shape[1] // keys.shape[1]
    keys, values = (r.double().repeat_interleave(group, 1) for r in (keys, values))
    scores = q.double() @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    return weights.nan_to_num(0.0) @ values


def is_sealed(spec: LayerSpec, position: Tensor, query: Tensor) -> Tensor:
    """Whether a query at this position sees these rows sealed, by the rule."""
    page_start = position // spec.page * spec.page
    due = page_start + spec.page <= query - (spec.paging.tail or 0) + 1
    dense = position < spec.retention.sinks
    return due & ~dense & (spec.seals & (query + 1 >= spec.dense_until))


def decode_rows(codec: Codec, rows: Tensor, page: int) -> Tensor:
    """Return the rows as stored: whole pages decoded by the codec, the others unchanged."""
    framed = codec.frame.transform_rows(rows)
    whole = framed.shape[2] // page * page
    batch, heads, _, dim = rows.shape
    pages = framed[:, :, :whole].reshape(batch, heads, whole // page, page, dim)
    opened = codec.open(codec.seal(pages)).reshape(batch, heads, whole, dim)
    return codec.frame.restore_outputs(torch.cat([opened, framed[:, :, whole:].float()], 2))


def stored_side(codec: Codec, rows: Tensor, start: list[int], choice: Tensor, page: int) -> Tensor:
    """Return the rows of one side, decoded where `choice` is set; pages start at sequence
    starts.
    """
    count = choice.shape[1]
    dense = (
        codec.frame.restore_outputs(codec.frame.transform_rows(rows)).float()[:, :, :count].clone()
    )
    for sequence, first in enumerate(start):
        if first >= count:
            continue
        sealed = decode_rows(codec, rows[sequence : sequence + 1, :, first:], page)[
            0, :, : count - first
        ]
        chosen = choice[sequence, first:]
        dense[sequence, :, first:][:, chosen] = sealed[:, chosen].float()
    return dense


def visible_rows(
    spec: LayerSpec, keys: Tensor, values: Tensor, start: list[int], query: int, own_from: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values as the query at this column sees them, from all rows ever appended."""
    column = torch.arange(query + 1)
    position = column - torch.tensor(start)[:, None]
    query_position = position[:, -1:]
    choice = is_sealed(spec, position, query_position) & (position >= 0) & (column < own_from)
    sides = [
        stored_side(codec, rows, start, choice, spec.page)
        for codec, rows in ((spec.keys, keys), (spec.values, values))
    ]
    return sides[0], sides[1], visible_positions(spec.mask, query_position, position)[:, None]
