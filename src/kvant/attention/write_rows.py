"""Rows on their way into pages, by plain tensor operations: what every backend writes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvant.contracts import Fields, PagedTensors
from kvant.page_table import AppendPlan, Ints

MAX_PAGES_PER_SEAL = 32  # pages: bounds the scratch of sealing a long prompt


def write_rows(plan: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors]) -> None:
    """Copy, write and seal what a change says of the rows {side: [B, H, T, D]} that came."""
    for name, stored in sides.items():
        _copy_pages(plan, stored)
        _write_open_rows(plan, rows[name], stored)
        for first in range(0, len(plan.seals), MAX_PAGES_PER_SEAL):
            seals = plan.seals[first : first + MAX_PAGES_PER_SEAL]
            _seal_pages(seals, gather_rows_to_seal(seals, rows[name], stored), name, stored)


def decode_pages(tensors: PagedTensors, side: str, slots: Tensor) -> Tensor:
    """Sealed pages, opened: [..., H, P, D] for slots [...]."""
    fields = {name: tensor[slots.to(tensor.device)] for name, tensor in tensors.sealed.items()}
    if tensors.tiles is not None:
        fields = {n: tensors.tiles.unpack(f"{side}.{n}", t) for n, t in fields.items()}
    return tensors.codec.open(fields)


def _copy_pages(plan: AppendPlan, tensors: PagedTensors) -> None:
    if len(plan.copies):
        source, to = _make_index(plan.copies, tensors.open)
        tensors.open[to] = tensors.open[source]


def _write_open_rows(plan: AppendPlan, rows: Tensor, tensors: PagedTensors) -> None:
    writes = plan.writes
    if len(writes) == 0:
        return
    if writes[:, 3].max() > 1:
        at, offset = _expand_counts(writes[:, 3])
        writes = writes[at]
        writes[:, 2] += offset
        writes[:, 4] += offset
    which, slot, row, _, column = _make_index(writes, tensors.open)
    tensors.open[slot, :, row] = rows[which, :, column]


def gather_rows_to_seal(seals: Ints, rows: Tensor, tensors: PagedTensors) -> Tensor:
    """The rows of pages that fall due, [n, H, P, D]."""
    page, stored_here = tensors.open.shape[2], seals[:, 2] >= 0
    if stored_here.all():
        return tensors.open[_make_index(seals, rows)[2]]
    pages = rows.new_empty(len(seals), rows.shape[1], page, rows.shape[3])
    there, came = (
        torch.from_numpy(np.flatnonzero(some)).to(rows.device)
        for some in (stored_here, ~stored_here)
    )
    if len(there):
        pages[there] = tensors.open[_make_index(seals[stored_here], rows)[2]]
    which, _, _, column = _make_index(seals[~stored_here], rows)
    columns = column[:, None] + torch.arange(page, device=rows.device)
    pages[came] = rows[which[:, None], :, columns].transpose(1, 2)
    return pages


def _seal_pages(seals: Ints, rows: Tensor, name: str, tensors: PagedTensors) -> None:
    slots = _make_index(seals, rows)[1]
    for field, sealed in tensors.codec.seal(rows).items():
        if tensors.tiles is not None:
            sealed = tensors.tiles.pack(f"{name}.{field}", sealed)
        tensors.sealed[field][slots] = sealed


def reopen_pages(plan: AppendPlan, sides: Mapping[str, PagedTensors]) -> None:
    """Fill open pages with what sealed ones decode to."""
    if len(plan.reopens) == 0:
        return
    for name, stored in sides.items():
        source, to = _make_index(plan.reopens, stored.open)
        stored.open[to] = decode_pages(stored, name, source).to(stored.open.dtype)


def _make_index(numbers: Ints, like: Tensor) -> tuple[Tensor, ...]:
    """The columns of integers as tensors to index with."""
    return torch.from_numpy(np.ascontiguousarray(numbers.T)).to(like.device).unbind()


def _expand_counts(counts: Ints) -> tuple[Ints, Ints]:
    """Each index so often as it is counted, and which of them it is."""
    at = np.repeat(np.arange(len(counts)), counts)
    return at, np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
