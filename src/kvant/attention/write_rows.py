"""Store rows in pages with plain tensor operations; every other backend writes the same bytes.

An append plan has a row of integers for each write and each seal:

    writes  | sequence | slot | row | number of rows | column |   into open pages
    seals   | sequence | slot | open slot, or -1     | column |   into sealed pages

A seal reads its page from the open slot; at -1 it reads the new rows from `column` on.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvant.contracts import Codec, Fields, PagedTensors
from kvant.errors import CacheError
from kvant.page_table import (
    SEAL_SLOT,
    SEAL_SOURCE,
    WRITE_COLUMN,
    WRITE_COUNT,
    WRITE_ROW,
    AppendPlan,
    Ints,
)

MAX_PAGES_PER_SEAL = 32  # bounds the scratch of sealing a long prompt


def write_rows(plan: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors]) -> None:
    """Apply `plan` to the new rows {side: [B, H, T, D]}: copy pages, write rows, seal pages."""
    for name, stored in sides.items():
        _copy_pages(plan, stored)
        _write_open_rows(plan, rows[name], stored)
        for first in range(0, len(plan.seals), MAX_PAGES_PER_SEAL):
            seals = plan.seals[first : first + MAX_PAGES_PER_SEAL]
            _seal_pages(seals, gather_rows_to_seal(seals, rows[name], stored), name, stored)


def decode_pages(tensors: PagedTensors, side: str, slots: Tensor) -> Tensor:
    """Decode the sealed pages at slots [...] to [..., H, P, D]."""
    fields = {name: tensor[slots.to(tensor.device)] for name, tensor in tensors.sealed.items()}
    if tensors.tiles is not None:
        fields = {n: tensors.tiles.unpack(f"{side}.{n}", t) for n, t in fields.items()}
    rows = tensors.codec.open(fields)
    expected = (*slots.shape, *tensors.open.shape[1:])
    if rows.shape != expected:  # assigned to the storage, some shapes would be broadcast
        raise CacheError(
            f"{type(tensors.codec).__name__}.open returns {list(rows.shape)} for pages of rows"
            f" {list(expected)}: return all rows"
        )
    return rows


def _copy_pages(plan: AppendPlan, tensors: PagedTensors) -> None:
    if len(plan.copies):
        source, target = _make_index(plan.copies, tensors.open)
        tensors.open[target] = tensors.open[source]


def _write_open_rows(plan: AppendPlan, rows: Tensor, tensors: PagedTensors) -> None:
    writes = plan.writes
    if len(writes) == 0:
        return
    if writes[:, WRITE_COUNT].max() > 1:
        index, offset = _expand_counts(writes[:, WRITE_COUNT])
        writes = writes[index]  # one entry per row
        writes[:, WRITE_ROW] += offset
        writes[:, WRITE_COLUMN] += offset
    sequence, slot, row, _, column = _make_index(writes, tensors.open)
    tensors.open[slot, :, row] = rows[sequence, :, column]


def gather_rows_to_seal(seals: Ints, rows: Tensor, tensors: PagedTensors) -> Tensor:
    """Return the dense rows of the pages to seal, [n, H, P, D]."""
    page, is_stored = tensors.open.shape[2], seals[:, SEAL_SOURCE] >= 0
    if is_stored.all():
        return tensors.open[_make_index(seals, rows)[SEAL_SOURCE]]
    pages = rows.new_empty(len(seals), rows.shape[1], page, rows.shape[3])
    stored, new = (
        torch.from_numpy(np.flatnonzero(selected)).to(rows.device)
        for selected in (is_stored, ~is_stored)
    )
    if len(stored):
        pages[stored] = tensors.open[_make_index(seals[is_stored], rows)[SEAL_SOURCE]]
    sequence, _, _, column = _make_index(seals[~is_stored], rows)
    columns = column[:, None] + torch.arange(page, device=rows.device)
    pages[new] = rows[sequence[:, None], :, columns].transpose(1, 2)
    return pages


def _seal_pages(seals: Ints, rows: Tensor, name: str, tensors: PagedTensors) -> None:
    slots = _make_index(seals, rows)[SEAL_SLOT]
    for field, sealed in _encode_pages(tensors.codec, rows).items():
        if tensors.tiles is not None:
            sealed = tensors.tiles.pack(f"{name}.{field}", sealed)
        tensors.sealed[field][slots] = sealed


def _encode_pages(codec: Codec, rows: Tensor) -> Fields:
    """Encode pages [n, H, P, D]; raise unless the fields are those that the codec declares."""
    sealed = codec.seal(rows)
    declared = {
        name: (
            (*rows.shape[:2], field.height(rows.shape[2]), field.width),
            field.dtype or rows.dtype,
        )
        for name, field in codec.fields(rows.shape[3]).items()
    }
    returned = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in sealed.items()}
    if returned != declared:  # assigned to the storage, some would be broadcast or left out
        raise CacheError(
            f"{type(codec).__name__}.seal returns {returned} for pages {list(rows.shape)}, and its"
            f" `fields` declares {declared}: make them agree"
        )
    return sealed


def reopen_pages(plan: AppendPlan, sides: Mapping[str, PagedTensors]) -> None:
    """Decode the plan's sealed pages back into open pages."""
    if len(plan.reopens) == 0:
        return
    for name, stored in sides.items():
        source, target = _make_index(plan.reopens, stored.open)
        stored.open[target] = decode_pages(stored, name, source).to(stored.open.dtype)


def _make_index(numbers: Ints, like: Tensor) -> tuple[Tensor, ...]:
    """Return the columns of an integer array as index tensors on the device of `like`."""
    return torch.from_numpy(np.ascontiguousarray(numbers.T)).to(like.device).unbind()


def _expand_counts(counts: Ints) -> tuple[Ints, Ints]:
    """Repeat each index i `counts[i]` times; return the indices and the number of each repeat."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
