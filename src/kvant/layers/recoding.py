"""The rows of an attention layer under another recipe.

The new record is what a new layer would be that was given, as `prefill="stored"` gives them, the
rows as the newest token sees them in the old one. A side whose codec, page and dtype stay keeps its
sealed pages and dense rows as they are: nothing is encoded twice. Rows that a window let go do not
come back; where a page of the new record begins before the first row there is, zeros stand in for
what nobody can see. Knows no format, and changes nothing in the old record.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from kvant.arenas import Span
from kvant.contracts import Fields
from kvant.errors import CapacityError, SpecError
from kvant.layers.geometry import Geometry
from kvant.layers.reading import columns
from kvant.layers.record import SEAL_AT_ONCE, Record
from kvant.layers.rows import Rows
from kvant.recipes import LayerSpec


def recoded(record: Record | None, spec: LayerSpec) -> Record | None:
    """The record of another recipe, in memory of its own, or an error."""
    if record is None or record.length == 0:
        return None
    _check_room(record, spec)
    _check_rows(record, spec)
    old = record.memory
    blank = Record.fresh(spec, _geometry(record, spec), old.tiles, old.tally, old.start)
    memory = replace(blank.memory, begins=_reaching(record, record.first_given))
    recoding = Recoding(record, Record(memory, record.length, blank.dense, blank.sealed))
    recoding.fill_sinks()
    return replace(recoding.new, dense=recoding.dense(), sealed=recoding.sealed())


def nbytes_after(record: Record, length: int, spec: LayerSpec) -> int:
    """Bytes once `length` tokens were seen; memory that is there stays, unless it is recoded."""
    if spec is record.memory.spec or spec == record.memory.spec:
        return max(record.nbytes, record.memory.footprint.nbytes(length))
    return _geometry(record, spec).footprint(spec).nbytes(length)


def _geometry(record: Record, spec: LayerSpec) -> Geometry:
    old = record.memory.geometry
    dtypes = {name: spec.dtype or dtype for name, dtype in old.dtypes.items()}
    return replace(old, dtypes=dtypes)


def _check_room(record: Record, spec: LayerSpec) -> None:
    if spec.capacity is not None and record.length > spec.capacity:
        raise CapacityError(
            f"{record.length} tokens for a capacity of {spec.capacity}: rewind first, or give the "
            f"spec capacity={record.length} or none"
        )


def _check_rows(record: Record, spec: LayerSpec) -> None:
    """Refuse to bring back what was let go."""
    length, old, new = record.length, record.memory.spec.retention, spec.retention
    held = _reaching(record, max(record.first_given, old.keep(length)))
    if new.keep(length) < held:
        asked = "all rows" if new.window is None else f"window={new.window}"
        raise SpecError(
            f"{asked} of {length} tokens, but the last {length - held} are held: what a window let "
            f"go does not come back; ask for at most window={length - held}, or reset first"
        )
    if new.sinks > old.sinks and min(record.memory.start) + old.sinks < min(held, length):
        raise SpecError(
            f"sinks={new.sinks}, but of the first rows {old.sinks} are held: what a window let go "
            f"does not come back; ask for at most sinks={old.sinks}, or reset first"
        )


def _reaching(record: Record, first: int) -> int:
    """The first column there is: rows from `first` on, and the sinks where they touch those."""
    memory = record.memory
    return 0 if first <= min(memory.start) + memory.spec.retention.sinks else first


@dataclass(frozen=True)
class Recoding:
    """Two records of the same rows, the new one still without them."""

    old: Record
    new: Record

    @cached_property
    def kept(self) -> frozenset[str]:
        """The sides whose pages and dense rows are taken over as they are."""
        old, new = self.old.memory, self.new.memory
        if old.spec.page != new.spec.page or not (old.spec.seals and new.spec.seals):
            return frozenset()
        dtypes = old.geometry.dtypes, new.geometry.dtypes
        return frozenset(
            name
            for name, codec in new.spec.sides.items()
            if old.spec.sides[name] == codec and dtypes[0][name] == dtypes[1][name]
        )

    def fill_sinks(self) -> None:
        memory, length = self.new.memory, self.new.length
        first = min(memory.start)
        stop = min(length, memory.padding + memory.spec.retention.sinks)
        if memory.spec.retention.sinks and first < stop:
            replace(self.new, length=first).fill_sinks(self.rows(first, stop))

    def dense(self) -> Span:
        """The rows that stay dense; where pages are sealed they begin with a whole one."""
        memory, length = self.new.memory, self.new.length
        page = memory.spec.page if memory.spec.seals else 1
        first = max(memory.schedule.first_dense(length), memory.begins // page * page)
        return Span.adopted(self.new.dense.arena, first, self.rows(first, length), length)

    def sealed(self) -> Span:
        """The pages that are due and stay."""
        memory, length, arena = self.new.memory, self.new.length, self.new.sealed.arena
        due = memory.spec.paging.due(length)
        first = max(memory.schedule.first_page(length), memory.begins // memory.spec.page)
        if not memory.spec.seals or first >= due:
            return Span(arena)
        old = self.old.sealed
        chunks = [self._pages(*cut) for cut in _cuts(first, due, (old.first, old.stop))]
        units = {name: torch.cat([chunk[name] for chunk in chunks], 1) for name in chunks[0]}
        return Span.adopted(arena, first, units, due)

    def _pages(self, first: int, stop: int) -> Fields:
        """Pages [first, stop): the old layer has all of them sealed, or none."""
        old, page = self.old.sealed, self.new.memory.spec.page
        kept = self.kept if old.first <= first and stop <= old.stop else frozenset()
        fields: dict[str, Tensor] = {}
        if kept != set(self.new.memory.spec.sides):
            rows = Rows.loose(self.rows(first * page, stop * page), first * page)
            fields |= self.new.pages(rows, first, stop - first, without=kept)
        if kept:
            taken = old.cut(first, stop).tensors()
            fields |= {n: tensor for n, tensor in taken.items() if n.partition(".")[0] in kept}
        return fields

    def rows(self, first: int, stop: int) -> Fields:
        """Columns [first, stop) in the frames and dtypes of the new record."""
        old = self.old
        begin = min(max(first, old.first_given), stop)
        rows, dense = columns(old, begin, stop), old.dense.cut(begin, stop)
        made = {}
        for name, tensor in rows.items():
            if name in self.kept:  # those that are sealed as well stay what was sealed
                sealed = tensor[:, :, : tensor.shape[2] - len(dense)]
                tensor = torch.cat([sealed, dense.tensors()[name]], 2)
            if first < begin:
                tensor = torch.cat([self._gone(name, first, begin), tensor], 2)
            made[name] = self._reframed(name, tensor)
        return made

    def _gone(self, name: str, first: int, stop: int) -> Tensor:
        """Columns of which nothing but sinks is there."""
        memory = self.old.memory
        sinks = memory.sinks[name]
        column = torch.arange(first, stop, device=sinks.device)
        position = column - memory.start_tensor[:, None]
        blank = sinks.new_zeros(*sinks.shape[:2], stop - first, sinks.shape[3])
        if sinks.shape[2] == 0:
            return blank
        inside = ((position >= 0) & (position < sinks.shape[2]))[:, None, :, None]
        index = position.clamp(0, sinks.shape[2] - 1)[:, None, :, None].expand_as(blank)
        return torch.where(inside, sinks.gather(2, index), blank)

    def _reframed(self, name: str, rows: Tensor) -> Tensor:
        """From one frame to the other; rows of the same frame are not touched."""
        old, new = (r.memory.spec.sides[name].frame for r in (self.old, self.new))
        dtype = self.new.memory.geometry.dtypes[name]
        return rows.to(dtype) if old == new else new.rows(old.outputs(rows).to(dtype))


def _cuts(first: int, stop: int, edges: Iterable[int]) -> Iterable[tuple[int, int]]:
    """[first, stop) in parts that bound the scratch and have no edge within."""
    inner = {edge for edge in edges if first < edge < stop}
    return pairwise(sorted({stop, *range(first, stop, SEAL_AT_ONCE), *inner}))
