"""Rows on their way into pages, by plain tensor operations: what every backend writes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvant.contracts import Fields, Stored
from kvant.extent import Change, Ints

SEAL_AT_ONCE = 32  # pages: bounds the scratch of sealing a long prompt


def write(change: Change, rows: Fields, sides: Mapping[str, Stored]) -> None:
    """Copy, write and seal what a change says of the rows {side: [B, H, T, D]} that came."""
    for name, stored in sides.items():
        _copy(change, stored)
        _write(change, rows[name], stored)
        for first in range(0, len(change.seals), SEAL_AT_ONCE):
            seals = change.seals[first : first + SEAL_AT_ONCE]
            _seal(seals, rows_to_seal(seals, rows[name], stored), name, stored)


def open_pages(stored: Stored, side: str, slots: Tensor) -> Tensor:
    """Sealed pages, opened: [..., H, P, D] for slots [...]."""
    fields = {name: tensor[slots.to(tensor.device)] for name, tensor in stored.sealed.items()}
    if stored.tiles is not None:
        fields = {n: stored.tiles.unpack(f"{side}.{n}", t) for n, t in fields.items()}
    return stored.codec.open(fields)


def _copy(change: Change, stored: Stored) -> None:
    if len(change.copies):
        source, to = _index(change.copies, stored.open)
        stored.open[to] = stored.open[source]


def _write(change: Change, rows: Tensor, stored: Stored) -> None:
    writes = change.writes
    if len(writes) == 0:
        return
    if writes[:, 3].max() > 1:
        at, offset = _spread(writes[:, 3])
        writes = writes[at]
        writes[:, 2] += offset
        writes[:, 4] += offset
    which, slot, row, _, column = _index(writes, stored.open)
    stored.open[slot, :, row] = rows[which, :, column]


def rows_to_seal(seals: Ints, rows: Tensor, stored: Stored) -> Tensor:
    """The rows of pages that fall due, [n, H, P, D]."""
    page, stored_here = stored.open.shape[2], seals[:, 2] >= 0
    if stored_here.all():
        return stored.open[_index(seals, rows)[2]]
    pages = rows.new_empty(len(seals), rows.shape[1], page, rows.shape[3])
    there, came = (
        torch.from_numpy(np.flatnonzero(some)).to(rows.device)
        for some in (stored_here, ~stored_here)
    )
    if len(there):
        pages[there] = stored.open[_index(seals[stored_here], rows)[2]]
    which, _, _, column = _index(seals[~stored_here], rows)
    columns = column[:, None] + torch.arange(page, device=rows.device)
    pages[came] = rows[which[:, None], :, columns].transpose(1, 2)
    return pages


def _seal(seals: Ints, rows: Tensor, name: str, stored: Stored) -> None:
    slots = _index(seals, rows)[1]
    for field, sealed in stored.codec.seal(rows).items():
        if stored.tiles is not None:
            sealed = stored.tiles.pack(f"{name}.{field}", sealed)
        stored.sealed[field][slots] = sealed


def reopen(change: Change, sides: Mapping[str, Stored]) -> None:
    """Fill open pages with what sealed ones decode to."""
    if len(change.opens) == 0:
        return
    for name, stored in sides.items():
        source, to = _index(change.opens, stored.open)
        stored.open[to] = open_pages(stored, name, source).to(stored.open.dtype)


def _index(numbers: Ints, like: Tensor) -> tuple[Tensor, ...]:
    """The columns of integers as tensors to index with."""
    return torch.from_numpy(np.ascontiguousarray(numbers.T)).to(like.device).unbind()


def _spread(counts: Ints) -> tuple[Ints, Ints]:
    """Each index so often as it is counted, and which of them it is."""
    at = np.repeat(np.arange(len(counts)), counts)
    return at, np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
