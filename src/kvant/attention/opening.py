"""Sealed pages as dense rows again: block by block for a backend, or all that a view shows.

The second is what a backend exists to avoid; a foreign model that touches keys itself needs it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.contracts import Side, View


def open_pages(view: View, side: Side, first: int, stop: int) -> Tensor:
    """Sealed pages [first, stop) of the table, opened: [B, H, rows, D]."""
    slots = view.page_table[:, first:stop]
    fields = {name: tensor[slots] for name, tensor in side.sealed.items()}
    if view.tiles is not None:
        which = "keys" if side is view.keys else "values"
        fields = {n: view.tiles.unpack(f"{which}.{n}", tensor) for n, tensor in fields.items()}
    return side.codec.open(fields).transpose(1, 2).flatten(2, 3)


def dense_rows(view: View, side: Side, first: int) -> Tensor:
    """Columns [first, columns) as the newest query sees them, out of their frame."""
    rows = framed_rows(view, side, first, view.columns)
    return side.codec.frame.outputs(rows)


def framed_rows(view: View, side: Side, first: int, stop: int) -> Tensor:
    """Columns [first, stop) as the newest query sees them."""
    seam = min(max(first, view.seam(view.columns - 1)), stop)
    rows = side.dense[:, :, max(0, seam - view.dense_from) :][:, :, : stop - seam]
    if first < seam:
        begin, end = first // view.page, -(-seam // view.page)
        pages = open_pages(view, side, begin - view.first_page, end - view.first_page)
        part = pages[:, :, first - begin * view.page : seam - begin * view.page]
        rows = torch.cat([part.to(rows.dtype), rows], 2)
    sinks = side.sinks.shape[2]
    if sinks and first < view.padding + sinks:
        rows = _with_sinks(rows, side.sinks, view.start, first)
    return rows


def _with_sinks(rows: Tensor, sinks: Tensor, start: Tensor, first: int) -> Tensor:
    """Rows of columns from `first` on, with the sinks among them: dense where a page is sealed."""
    count = sinks.shape[2]
    column = torch.arange(first, first + rows.shape[2], device=rows.device)
    position = column - start[:, None]
    inside = ((position >= 0) & (position < count))[:, None, :, None]
    index = position.clamp(0, count - 1)[:, None, :, None]
    return torch.where(inside, sinks.gather(2, index.expand_as(rows)), rows)
