"""What an attention layer shows: views for attention, dense rows for everybody else."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvant.arenas import Span
from kvant.attention import framed_rows, open_pages
from kvant.contracts import Fields, Side, View
from kvant.layers.record import Record
from kvant.layers.rows import Rows


def view_of(record: Record, queries: int, own_from: int, rows: Rows) -> View:
    """The pages and rows that the newest `queries` tokens may see; others are left out."""
    spec, length = record.memory.spec, record.length
    query, window = length - queries, spec.retention.window
    low = 0 if window is None else max(0, query - window + 1)
    seam = min(spec.paging.due(query + 1) * spec.page, own_from)
    dense = rows.behind(min(max(rows.first, seam, low), length))
    last_seam = min(spec.paging.due(length) * spec.page, own_from)
    pages = record.sealed.cut(low // spec.page, -(-last_seam // spec.page))
    return _view(record, dense, pages, own_from)


def _view(record: Record, rows: Rows, pages: Span, own_from: int) -> View:
    memory, spec = record.memory, record.memory.spec
    placed, room, slot, count = pages.placed, rows.room, rows.slot, rows.stop - rows.first
    sides = {
        name: Side(codec, placed.sides.get(name, {}), room[name], slot, count, memory.sinks[name])
        for name, codec in spec.sides.items()
    }
    keys = sides["keys"]
    values = sides.get("values", keys)
    return View(
        keys=keys,
        values=values,
        page_table=placed.table,
        start=memory.start_tensor,
        mask=spec.mask,
        columns=record.length,
        padding=memory.padding,
        paging=spec.paging,
        first_page=pages.first,
        dense_from=rows.first,
        own_from=own_from,
        value_dim=spec.value_dim or values.room.shape[3],
        tiles=memory.tiles,
        tally=memory.tally,
        begins=memory.begins,
    )


def opened(record: Record, first: int, stop: int) -> Fields:
    """Framed rows of columns [first, stop) from sealed pages, in float32."""
    page = record.memory.spec.page
    begin, end = first // page, -(-stop // page)
    none = replace(record.dense_rows(), first=stop, stop=stop)
    view = _view(record, none, record.sealed.cut(begin, end), stop)
    sides = {"keys": view.keys, "values": view.values}
    cut = slice(first - begin * page, stop - begin * page)
    names = record.memory.spec.sides
    return {name: open_pages(view, sides[name], 0, end - begin)[:, :, cut] for name in names}


def columns(record: Record, first: int, stop: int) -> Fields:
    """Framed rows of columns [first, stop) as the newest query sees them, sinks included."""
    spec, length = record.memory.spec, record.length
    seam = spec.paging.due(length) * spec.page
    rows = record.dense_rows().behind(max(record.dense.first, min(seam, length)))
    view = _view(record, rows, record.sealed.cut(first // spec.page, -(-stop // spec.page)), length)
    sides = {"keys": view.keys, "values": view.values}
    return {name: framed_rows(view, sides[name], first, stop) for name in spec.sides}


@dataclass(frozen=True)
class Held:
    """What `read()` returns: sinks that stand alone, then columns [first, length)."""

    record: Record
    sinks: int
    first: int

    @classmethod
    def of(cls, record: Record) -> Held:
        retention, start = record.memory.spec.retention, min(record.memory.start)
        first = max(record.first_stored, retention.keep(record.length))
        if first <= start:
            return cls(record, 0, min(first, record.length))
        sinks = min(retention.sinks, record.length - start)
        return cls(record, sinks, min(max(first, start + sinks), record.length))

    def __len__(self) -> int:
        return self.sinks + self.record.length - self.first

    def rows(self) -> Fields:
        """Framed rows."""
        rows = columns(self.record, self.first, self.record.length)
        if self.sinks == 0:
            return rows
        sinks = self.record.memory.sinks
        return {n: torch.cat([sinks[n][:, :, : self.sinks], r], 2) for n, r in rows.items()}

    def positions(self) -> Tensor:
        """The position of every row, [B, n]; -1 where it is padding or a repeat."""
        start, length = self.record.memory.start_tensor[:, None], self.record.length
        body = torch.arange(self.first, length, device=start.device) - start
        alone = torch.arange(self.sinks, device=start.device).expand(len(start), -1)
        alone = torch.where(alone < length - start, alone, -1)
        return torch.cat([alone, torch.where(body >= self.sinks, body, -1)], 1)


def between(record: Record, start: int, stop: int | None) -> Fields:
    """Framed rows of columns [start, stop), or an error that says what is held."""
    stop, held, sinks = (
        record.length if stop is None else stop,
        Held.of(record),
        record.memory.sinks,
    )
    if not 0 <= start <= stop <= record.length:
        raise ValueError(f"rows [{start}, {stop}) of {record.length}")
    if start >= held.first:
        return columns(record, start, stop)
    if stop <= record.memory.spec.retention.sinks and record.memory.padding == 0:
        return {name: tensor[:, :, start:stop] for name, tensor in sinks.items()}
    raise ValueError(f"rows [{start}, {stop}): the layer holds [{held.first}, {record.length})")


def unframed(record: Record, rows: Fields) -> Fields:
    sides = record.memory.spec.sides
    return {name: sides[name].frame.outputs(row) for name, row in rows.items()}
