"""How an attention layer goes back: exactly while its rows are dense, else from decoded ones."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvant.arenas import Span
from kvant.layers.reading import opened
from kvant.layers.record import Record


def reopened(record: Record, to: int) -> tuple[Record, bool]:
    """The record at length `to`, and whether its rows are the ones that were appended."""
    memory, spec = record.memory, record.memory.spec
    due = spec.paging.due(to)
    sealed = record.sealed.cut(record.sealed.first, due)
    first = max(due * spec.page, record.first_stored)
    if not spec.seals or record.dense.first <= first:
        return replace(record, length=to, dense=record.dense.cut(0, to), sealed=sealed), True
    decoded = opened(record, first, min(record.dense.first, to))
    kept = record.dense.cut(0, to).tensors()
    units = {n: torch.cat([decoded[n].to(rows.dtype), rows], 2) for n, rows in kept.items()}
    dense = Span.adopted(memory.geometry.dense(spec), first, units, to)
    return Record(memory, to, dense, sealed), False
