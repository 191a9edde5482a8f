"""How far an attention layer is: one immutable value, and how it becomes the next one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvant import attention
from kvant.arenas import Span
from kvant.contracts import Fields, Tally, Tiles
from kvant.layers.geometry import Geometry, sides
from kvant.layers.schedule import Schedule
from kvant.recipes import LayerSpec

SEAL_AT_ONCE = 32  # pages: bounds the scratch of sealing a long prompt


@dataclass(frozen=True)
class Memory:
    """What a layer owns from its first rows on."""

    geometry: Geometry
    tiles: Tiles | None
    start: tuple[int, ...]  # columns of left padding
    start_tensor: Tensor
    sinks: dict[str, Tensor]  # {side: [B, H, S, D]}, by position


@dataclass(frozen=True)
class Record:
    """Everything that an append changes. An older record stays readable (see `Span`)."""

    memory: Memory
    length: int
    dense: Span
    sealed: Span

    @property
    def nbytes(self) -> int:
        sinks = sum(tensor.nbytes for tensor in self.memory.sinks.values())
        return self.dense.buffer.nbytes + self.sealed.buffer.nbytes + sinks

    @property
    def nbytes_used(self) -> int:
        sinks = sum(tensor.nbytes for tensor in self.memory.sinks.values())
        return self.dense.nbytes_used + self.sealed.nbytes_used + sinks


def fresh(
    spec: LayerSpec, geometry: Geometry, start: tuple[int, ...], tiles: Tiles | None
) -> Record:
    """No tokens yet, nothing allocated but the sinks."""
    with torch.inference_mode(False):
        start_tensor = torch.tensor(start, device=geometry.device)
    memory = Memory(geometry, tiles, start, start_tensor, geometry.sinks(spec))
    return Record(memory, 0, Span(geometry.dense(spec)), Span(geometry.sealed(spec)))


def extended(
    spec: LayerSpec, old: Record, rows: Fields, tally: Tally
) -> tuple[Record, Fields, int]:
    """The record with framed `rows` behind it; all rows that were dense meanwhile, and from where.

    The rows of a chunk that outgrows the bound are owned by the caller's view alone, and are gone
    with it: the record keeps those that stay dense.
    """
    count = rows["keys"].shape[2]
    length = old.length + count
    _fill_sinks(old, rows)
    bound = old.dense.buffer.growth.bound
    if bound is None or length - old.dense.first <= bound:
        dense = old.dense.extended(rows, count)
        whole = dense.tensors()
    else:
        whole = {name: torch.cat([t, rows[name]], 2) for name, t in old.dense.tensors().items()}
        dense = _end(spec, old, whole, length)
    sealed = _sealed(spec, old, whole, length, tally)
    return Record(old.memory, length, dense, sealed), whole, old.dense.first


def _end(spec: LayerSpec, old: Record, whole: Fields, length: int) -> Span:
    """A new span with the rows of a long chunk that stay dense."""
    first = max(old.dense.first, Schedule(spec).first_dense(length))
    kept = {name: tensor[:, :, first - old.dense.first :] for name, tensor in whole.items()}
    return Span.at(old.memory.geometry.dense(spec), first, kept, length - first)


def _sealed(spec: LayerSpec, old: Record, whole: Fields, length: int, tally: Tally) -> Span:
    """The sealed pages with those that `length` makes due."""
    span, page = old.sealed, spec.page
    due = Schedule(spec).due(length)
    begin = max(span.stop, -(-old.dense.first // page))
    if begin > span.stop:  # a window shorter than the tail lets pages go before they are due
        span = Span(span.buffer, begin, begin)
    if due > begin:
        span.buffer.allocate(span.first, span.stop, due)
    for first in range(begin, due, SEAL_AT_ONCE):
        count = min(SEAL_AT_ONCE, due - first)
        units = {}
        for name, codec in sides(spec).items():
            part = whole[name].narrow(2, first * page - old.dense.first, count * page)
            batch, heads, _, dim = part.shape
            pages = part.reshape(batch, heads, count, page, dim).transpose(1, 2)
            for field, tensor in attention.seal(codec, pages, tally).items():
                tiles = old.memory.tiles
                units[f"{name}.{field}"] = tensor if tiles is None else tiles.pack(tensor)
        span = span.extended(units, count)
    return span


def _fill_sinks(old: Record, rows: Fields) -> None:
    """Copy rows that are sinks to where they stay; what lies behind the length is never read."""
    memory, first = old.memory, old.length
    for name, kept in memory.sinks.items():
        count, new = kept.shape[2], rows[name]
        if count == 0 or new.shape[2] == 0 or first >= max(memory.start) + count:
            continue
        column = memory.start_tensor[:, None] + torch.arange(count, device=kept.device) - first
        inside = (column >= 0) & (column < new.shape[2])
        index = column.clamp(0, new.shape[2] - 1)[:, None, :, None].expand_as(kept)
        kept.copy_(torch.where(inside[:, None, :, None], new.gather(2, index), kept))


def committed(spec: LayerSpec, record: Record) -> Record:
    """Without what nobody will ask for, and without what a long chunk took."""
    schedule, length = Schedule(spec), record.length
    dense = record.dense.cut(schedule.first_dense(length), length).settled()
    sealed = record.sealed.cut(schedule.first_page(length), record.sealed.stop).settled()
    return Record(record.memory, length, dense, sealed)


def shared(record: Record) -> Record:
    """A record that nothing done to this one can reach."""
    with torch.inference_mode(False):
        sinks = {name: tensor.clone() for name, tensor in record.memory.sinks.items()}
    memory = replace(record.memory, sinks=sinks)
    return replace(
        record, memory=memory, dense=record.dense.shared(), sealed=record.sealed.shared()
    )


def selected(record: Record, index: Tensor) -> Record:
    """The sequences `index` of a record, in memory of its own."""
    memory = record.memory
    index = index.to(memory.start_tensor.device)
    geometry = replace(memory.geometry, batch=len(index))
    with torch.inference_mode(False):
        start = memory.start_tensor.index_select(0, index)
        sinks = {name: tensor.index_select(0, index) for name, tensor in memory.sinks.items()}
    chosen = replace(
        memory,
        geometry=geometry,
        start=tuple(memory.start[i] for i in index.tolist()),
        start_tensor=start,
        sinks=sinks,
    )
    dense, sealed = record.dense.selected(index), record.sealed.selected(index)
    return replace(record, memory=chosen, dense=dense, sealed=sealed)


def emptied(record: Record) -> Record:
    """No tokens, in the same memory."""
    dense, sealed = Span(record.dense.buffer), Span(record.sealed.buffer)
    return replace(record, length=0, dense=dense, sealed=sealed)
