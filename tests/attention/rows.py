"""Rows that are hard to seal, for backends that must reproduce the bytes of the codecs."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kvant.contracts import Backend, Codec, PagedTensors, Tiles
from kvant.page_table import AppendPlan, LayerGroup, PageTable, Paging


def make_hard_rows(dtype: torch.dtype, dim: int) -> Tensor:
    """Return pages [2, 3, 2, 64, dim] with outliers, zeros, equal values, infinities and NaN.

    Some rows have a least squares fit far from the covering scale, undefined, or beyond float16.
    """
    rows = torch.randn(2, 2, 3 * 64, dim)
    rows[..., 3] *= 30
    rows[0, 0, 5] = 0.0
    rows[0, 0, 6] = -0.0
    rows[0, 1, 7] = 2.5
    rows[0, 1, 8] *= 1e-7
    rows[1, 0, 9, 2] = math.inf
    rows[1, 1, 10, 11] = math.nan
    rows[1, 1, 12] *= 60000
    rows[1, 1, 13] = torch.arange(dim) * 0.5 - 3  # ties
    rows[1, 1, 14] = torch.arange(dim) % 16 * 2.0**-14 - 2.0**-30  # with a bias close to zero
    rows[0, 0, 20:30] += 1000
    rows[0, 0, 30:40] *= torch.logspace(-6, 3, 10)[:, None]
    rows[1, 1, 20:40] *= torch.logspace(-9, -6, 20)[:, None]  # near the smallest float16
    rows[0, 1, 20:30] = rows[0, 1, 20:30].sign() * 65504
    rows[0, 1, 30], rows[0, 1, 30, 4] = 7.5, 8.0
    # One value at either end of 2 bits; the others where rounding of codes differs.
    rows[1, 0, 40] = torch.where(rows[1, 0, 40] > 0, 43000.0, -43000.0)
    rows[1, 0, 40, ::16], rows[1, 0, 40, 1::16] = -65504.0, 65504.0
    return rows.to(dtype).reshape(2, 2, 3, 64, dim).transpose(1, 2)


def seal_with_backend(
    backend: Backend, codec: Codec, rows: Tensor, side: str, tiles: Tiles | None
) -> dict[str, Tensor] | None:
    """Seal rows [B, n, H, P, D] with a backend and return them by slot; None if it cannot."""
    batch, pages, heads, page, dim = rows.shape
    rows = rows.flatten(0, 1)
    count = batch * pages
    fields = {
        name: torch.zeros(count, heads, field.height(page), field.width, dtype=field.dtype)
        for name, field in codec.fields(dim).items()
    }
    stored = PagedTensors(codec, rows.new_zeros(1, heads, page, dim), fields, tiles)
    nowhere = PageTable.make_empty(LayerGroup(Paging(page, 0)), [0] * count)
    index = np.arange(count)
    seals = np.stack([index, index, np.full(count, -1), index * 0], 1)
    change = AppendPlan(nowhere, nowhere, nowhere, page, seals=seals)
    return fields if backend.store(change, {side: rows}, {side: stored}) else None
