"""What an attention layer shows: views for attention, dense rows for everybody else."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvant.arenas import Span
from kvant.attention import open_pages
from kvant.contracts import (
    Fields,
    Side,
    Tally,
    View,
)
from kvant.layers.geometry import sides
from kvant.layers.record import Record
from kvant.layers.schedule import Schedule
from kvant.recipes import LayerSpec


def view(
    spec: LayerSpec,
    record: Record,
    queries: int,
    own_from: int,
    tally: Tally,
    dense: Fields | None = None,
    dense_from: int | None = None,
) -> View:
    """The pages and rows that the newest `queries` tokens may see.

    `dense` from `dense_from` on stands in for the record's own dense rows where more of them are
    at hand; rows before what any query sees are left out.
    """
    length, window = record.length, spec.retention.window
    query = length - queries
    low = 0 if window is None else max(0, query - window + 1)
    due = Schedule(spec).due
    seam = min(due(query + 1) * spec.page, own_from)
    rows = record.dense.tensors() if dense is None else dense
    rows_from = record.dense.first if dense_from is None else dense_from
    first = min(max(rows_from, seam, low), length)
    cut = {name: tensor[:, :, first - rows_from :] for name, tensor in rows.items()}
    last_seam = min(due(length) * spec.page, own_from)
    pages = record.sealed.cut(low // spec.page, -(-last_seam // spec.page))
    return _view(spec, record, cut, first, pages.first, len(pages), own_from, tally)


def _view(
    spec: LayerSpec,
    record: Record,
    dense: Fields,
    dense_from: int,
    first_page: int,
    num_pages: int,
    own_from: int,
    tally: Tally,
) -> View:
    memory = record.memory
    parts = {
        name: Side(codec, _fields(record, name), dense[name], memory.sinks[name])
        for name, codec in sides(spec).items()
    }
    keys = parts["keys"]
    values = parts.get("values", keys)
    return View(
        keys=keys,
        values=values,
        page_table=_page_table(record, first_page, num_pages),
        start=memory.start_tensor,
        length=torch.full_like(memory.start_tensor, record.length),
        mask=spec.mask,
        columns=record.length,
        padding=max(memory.start),
        page=spec.page,
        tail=spec.resolved_tail,
        dense_until=spec.start,
        first_page=first_page,
        dense_from=dense_from,
        own_from=own_from,
        value_dim=spec.value_dim or values.dense.shape[3],
        tiles=memory.tiles,
        tally=tally,
    )


def _fields(record: Record, side: str) -> Fields:
    """The sealed fields of one side as slots, whatever sequence they belong to."""
    prefix = f"{side}."
    whole = record.sealed.buffer.whole().items()
    return {k.removeprefix(prefix): t.flatten(0, 1) for k, t in whole if k.startswith(prefix)}


def _page_table(record: Record, first_page: int, num_pages: int) -> Tensor:
    buffer, device = record.sealed.buffer, record.memory.start_tensor.device
    begin = first_page - buffer.base
    within = torch.arange(begin, begin + num_pages, device=device)
    sequence = torch.arange(record.memory.geometry.batch, device=device) * buffer.reserved
    return sequence[:, None] + within


def first_stored(spec: LayerSpec, record: Record) -> int:
    """The first column that memory has; its page may be there for later rows only."""
    return record.sealed.first * spec.page if len(record.sealed) else record.dense.first


def first_kept(spec: LayerSpec, record: Record) -> int:
    """The first column, sinks aside, that a rewind may count on."""
    return max(first_stored(spec, record), Schedule(spec).keep(record.length))


def first_held(spec: LayerSpec, record: Record) -> int:
    """The first column, sinks aside, that still matters; rows of the slack before it do not."""
    return max(first_stored(spec, record), spec.retention.keep(record.length))


def columns(spec: LayerSpec, record: Record, first: int, stop: int) -> Fields:
    """Framed rows of columns [first, stop) as the newest query sees them, sinks included."""
    seam = max(record.dense.first, Schedule(spec).due(record.length) * spec.page)
    middle = min(max(first, seam), stop)
    dense = record.dense.tensors()
    parts = {
        n: [t[:, :, middle - record.dense.first : stop - record.dense.first]]
        for n, t in dense.items()
    }
    if first < middle:
        for name, opened in opened_columns(spec, record, first, middle).items():
            parts[name].insert(0, opened.to(dense[name].dtype))
    rows = {n: p[0] if len(p) == 1 else torch.cat(p, 2) for n, p in parts.items()}
    return _with_sinks(record, rows, first)


def opened_columns(spec: LayerSpec, record: Record, first: int, stop: int) -> Fields:
    """Framed rows of columns [first, stop) from sealed pages, in float32."""
    page = spec.page
    begin, end = first // page, -(-stop // page)
    dense = {name: t[:, :, :0] for name, t in record.dense.tensors().items()}
    pages = _view(spec, record, dense, 0, begin, end - begin, stop, Tally())
    names = {"keys": pages.keys, "values": pages.values}
    cut = slice(first - begin * page, stop - begin * page)
    return {n: open_pages(pages, names[n], 0, end - begin)[:, :, cut] for n in sides(spec)}


def _with_sinks(record: Record, rows: Fields, first: int) -> Fields:
    """Sinks are dense where their page is sealed."""
    memory = record.memory
    count = memory.sinks["keys"].shape[2]
    if count == 0 or first >= max(memory.start) + count:
        return rows
    num = rows["keys"].shape[2]
    position = torch.arange(first, first + num, device=memory.start_tensor.device)
    position = position - memory.start_tensor[:, None]
    inside = ((position >= 0) & (position < count))[:, None, :, None]
    index = position.clamp(0, count - 1)[:, None, :, None]
    return {
        name: torch.where(inside, memory.sinks[name].gather(2, index.expand_as(row)), row)
        for name, row in rows.items()
    }


def kept_sinks(spec: LayerSpec, record: Record) -> int:
    """How many sinks lie before the first column held, and are read before it."""
    first = min(record.memory.start)
    lost = first_held(spec, record) > first
    return min(spec.retention.sinks, record.length - first) if lost else 0


def body(spec: LayerSpec, record: Record) -> int:
    """The first column that `read()` returns behind the sinks."""
    first, sinks = first_held(spec, record), kept_sinks(spec, record)
    return min(record.length, max(first, min(record.memory.start) + sinks) if sinks else first)


def everything(spec: LayerSpec, record: Record) -> Fields:
    """All rows held, framed: sinks that stand alone, then columns."""
    rows = columns(spec, record, body(spec, record), record.length)
    count = kept_sinks(spec, record)
    if count == 0:
        return rows
    sinks = record.memory.sinks
    return {n: torch.cat([sinks[n][:, :, :count], row], 2) for n, row in rows.items()}


def positions(spec: LayerSpec, record: Record) -> Tensor:
    """The position of every row of `everything`, [B, n]; -1 where it is padding or a repeat."""
    memory = record.memory
    device = memory.start_tensor.device
    sinks = kept_sinks(spec, record)
    column = torch.arange(body(spec, record), record.length, device=device)
    position = column - memory.start_tensor[:, None]
    position = torch.where(position >= sinks, position, -1)
    alone = torch.arange(sinks, device=device).expand(len(memory.start), -1)
    alone = torch.where(alone < record.length - memory.start_tensor[:, None], alone, -1)
    return torch.cat([alone, position], 1)


def unframed(spec: LayerSpec, rows: Fields) -> Fields:
    codecs = sides(spec)
    return {name: codecs[name].frame.outputs(row) for name, row in rows.items()}


def reopened(spec: LayerSpec, record: Record, to: int) -> tuple[Record, bool]:
    """The record at length `to`, and whether its rows are the ones that were appended."""
    due = Schedule(spec).due(to)
    sealed = record.sealed.cut(record.sealed.first, due)
    first = max(min(due * spec.page, to), first_stored(spec, record))
    if not spec.seals or record.dense.first <= first:
        return replace(record, length=to, dense=record.dense.cut(0, to), sealed=sealed), True
    stop = min(record.dense.first, to)
    rows = {
        n: [r.to(record.memory.geometry.dtypes[n])]
        for n, r in opened_columns(spec, record, first, stop).items()
    }
    for name, tensor in record.dense.cut(0, to).tensors().items():
        rows[name].append(tensor)
    units = {name: torch.cat(parts, 2) for name, parts in rows.items()}
    dense = Span.at(record.memory.geometry.dense(spec), first, units, to - first)
    return replace(record, length=to, dense=dense, sealed=sealed), False
