"""How far an attention layer is: one immutable value, and how it becomes the next one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvant.arenas import Span, joined, retiled
from kvant.attention import arrangement, seal
from kvant.contracts import Fields, Tally, Tiles
from kvant.errors import CapacityError
from kvant.lasting import lasting
from kvant.layers.clamping import count_clamped
from kvant.layers.geometry import Footprint, Geometry
from kvant.layers.rows import Rows
from kvant.layers.schedule import Schedule
from kvant.recipes import LayerSpec

SEAL_AT_ONCE = 32  # pages: bounds the scratch of sealing a long prompt, or of moving it


@dataclass(frozen=True)
class Memory:
    """What a layer owns from its first rows on."""

    spec: LayerSpec
    geometry: Geometry
    tiles: Tiles | None
    tally: Tally
    start: tuple[int, ...]  # columns of left padding
    start_tensor: Tensor
    sinks: dict[str, Tensor]  # {side: [B, H, S, D]}, by position
    begins: int = 0  # columns before it have no rows, even where a recode made their page

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule(self.spec)

    @cached_property
    def padding(self) -> int:
        """The most that a sequence has."""
        return max(self.start)

    @cached_property
    def footprint(self) -> Footprint:
        return self.geometry.footprint(self.spec)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.sinks.values())


@dataclass(frozen=True)
class Record:
    """Everything that an append changes. An older record stays readable (see `Span`)."""

    memory: Memory
    length: int
    dense: Span
    sealed: Span

    @classmethod
    def fresh(
        cls,
        spec: LayerSpec,
        geometry: Geometry,
        tiles: Tiles | None,
        tally: Tally,
        start: tuple[int, ...],
    ) -> Record:
        """No tokens yet, nothing allocated but the sinks."""
        with lasting():
            start_tensor = torch.tensor(start, device=geometry.device)
        sinks = geometry.sinks(spec)
        tiles = arrangement(geometry.device) if tiles is None else tiles
        memory = Memory(spec, geometry, tiles, tally, start, start_tensor, sinks)
        return cls(memory, 0, Span(geometry.dense(spec)), Span(geometry.sealed(spec)))

    @property
    def nbytes(self) -> int:
        return self.dense.arena.nbytes + self.sealed.arena.nbytes + self.memory.nbytes

    @property
    def nbytes_used(self) -> int:
        return self.dense.nbytes_used + self.sealed.nbytes_used + self.memory.nbytes

    @property
    def first_stored(self) -> int:
        """The first column that memory has; its page may be there for later rows only."""
        return self.sealed.first * self.memory.spec.page if len(self.sealed) else self.dense.first

    @property
    def first_given(self) -> int:
        """The first column that a row was given for and is still there."""
        return max(self.first_stored, self.memory.begins)

    def dense_rows(self) -> Rows:
        return Rows.of(self.dense)

    def check_room(self, count: int) -> None:
        """Refuse more rows than a fixed capacity has room for."""
        capacity, length = self.memory.spec.capacity, self.length + count
        if capacity is not None and length > capacity:
            raise CapacityError(
                f"{length} tokens for a capacity of {capacity}: rewind, reset, or give the spec "
                f"capacity={length} or none"
            )

    def extended(self, units: Fields) -> tuple[Record, Rows]:
        """The record with framed rows behind it, and all rows that were dense meanwhile.

        Where a chunk outgrows the bound, only its end stays: the rest belongs to the caller's view
        and is gone with it.
        """
        count = units["keys"].shape[2]
        length, bound = self.length + count, self.memory.schedule.dense_bound
        self.fill_sinks(units)
        if bound is None or length - self.dense.first <= bound:
            dense = self.dense.extended(units, count)
            rows = Rows.of(dense)
        else:
            old = self.dense.tensors()
            both = {name: joined((tensor, units[name]), 2) for name, tensor in old.items()}
            rows = Rows.loose(both, self.dense.first)
            dense = self._end(rows, length)
        return Record(self.memory, length, dense, self._sealed(rows, length)), rows

    def expecting(self) -> Record:
        """The record with one more row, which is still to be written where it will lie.

        Memory stays where it is, as long as it is large enough: rows go to the front of it, and no
        older view can be read. A page that the row itself belongs to is not sealed here.
        """
        self.check_room(1)
        length, (span, due) = self.length + 1, self._owed(self.length + 1)
        self.dense.arena.close_up(self.dense.first, self.length, length)
        self.dense.make_room(length)
        dense = Span(self.dense.arena, self.dense.first, length)
        if span.stop < due and due * self.memory.spec.page < length:
            span.arena.close_up(span.first, span.stop, due)
            span = self._sealed(Rows.of(dense), length)
        return Record(self.memory, length, dense, span)

    def nbytes_with(self, count: int) -> int:
        """What `nbytes` of the record `extended` by so many rows is."""
        self.check_room(count)
        length, memory = self.length + count, self.memory
        bound, dense, sealed = memory.schedule.dense_bound, self.dense, self.sealed.arena.nbytes
        if bound is None or length - dense.first <= bound:
            rows = dense.arena.nbytes_for(dense.first, dense.stop, dense.stop + count)
        else:
            rows = memory.footprint.dense_nbytes(length)
        span, due = self._owed(length)
        if span.stop < due:
            sealed = span.arena.nbytes_for(span.first, span.stop, due)
        return rows + sealed + memory.nbytes

    def committed(self) -> Record:
        """Without what nobody will ask for, and without what a long chunk took."""
        schedule, length = self.memory.schedule, self.length
        dense = self.dense.cut(schedule.first_dense(length), length).settled()
        sealed = self.sealed.cut(schedule.first_page(length), self.sealed.stop).settled()
        if dense is self.dense and sealed is self.sealed:
            return self
        return Record(self.memory, length, dense, sealed)

    def emptied(self) -> Record:
        """No tokens, in the same memory."""
        memory = replace(self.memory, begins=0)
        return Record(memory, 0, Span(self.dense.arena), Span(self.sealed.arena))

    def shared(self, tally: Tally) -> Record:
        """A record that nothing done to this one can reach."""
        with lasting():
            sinks = {name: tensor.clone() for name, tensor in self.memory.sinks.items()}
        memory = replace(self.memory, sinks=sinks, tally=tally)
        return Record(memory, self.length, self.dense.shared(), self.sealed.shared())

    def selected(self, index: Tensor) -> Record:
        """The sequences `index`, in memory of their own."""
        old = self.memory
        index = index.to(old.start_tensor.device)
        with lasting():
            memory = replace(
                old,
                geometry=replace(old.geometry, batch=len(index)),
                start=tuple(old.start[i] for i in index.tolist()),
                start_tensor=old.start_tensor.index_select(0, index),
                sinks={name: tensor.index_select(0, index) for name, tensor in old.sinks.items()},
            )
        return Record(memory, self.length, self.dense.selected(index), self.sealed.selected(index))

    def moved(self, device: torch.device, tiles: Tiles | None) -> Record:
        """The same in the memory of another device, pages in these tiles or as it likes them."""
        old = self.memory
        with lasting():
            start_tensor = old.start_tensor.to(device)
            device = start_tensor.device  # which one, if only its kind was said
            memory = replace(
                old,
                geometry=replace(old.geometry, device=device),
                tiles=arrangement(device) if tiles is None else tiles,
                start_tensor=start_tensor,
                sinks={name: tensor.to(device) for name, tensor in old.sinks.items()},
            )
        return Record(memory, self.length, self.dense.moved(device), self._pages_in(memory))

    def _pages_in(self, memory: Memory) -> Span:
        """The sealed pages where, and as, this memory has them."""
        pages, here, there = self.sealed, self.memory.geometry.device, memory.geometry.device
        old, new = self.memory.tiles, memory.tiles
        if old == new:
            return pages.moved(there)
        by = here if there.type == "cpu" else there  # a GPU swaps bytes faster than they are sent
        span = pages.cut(pages.first, pages.first).moved(there)
        for first in range(pages.first, pages.stop, SEAL_AT_ONCE):
            part = pages.cut(first, first + SEAL_AT_ONCE)
            units = {n: retiled(n, t.to(by), old, new) for n, t in part.tensors().items()}
            span = span.extended(units, len(part))
        return span

    def _end(self, rows: Rows, length: int) -> Span:
        """A span of its own with the rows of a long chunk that stay dense."""
        memory = self.memory
        kept = rows.behind(max(rows.first, memory.schedule.first_dense(length)))
        arena = memory.geometry.dense(memory.spec)
        return Span.adopted(arena, kept.first, kept.tensors, length)

    def _owed(self, length: int) -> tuple[Span, int]:
        """What more pages are sealed behind, and where those end that `length` makes due."""
        span, spec = self.sealed, self.memory.spec
        if not spec.seals:
            return span, 0
        begin = max(span.stop, -(-self.dense.first // spec.page))
        if begin > span.stop:  # a window shorter than the tail lets pages go before they are due
            span = Span(span.arena, begin, begin)
        return span, spec.paging.due(length)

    def _sealed(self, rows: Rows, length: int) -> Span:
        """The sealed pages with those that `length` makes due."""
        span, due = self._owed(length)
        if span.stop < due:
            span.make_room(due)
        for first in range(span.stop, due, SEAL_AT_ONCE):
            count = min(SEAL_AT_ONCE, due - first)
            span = span.extended(self.pages(rows, first, count), count)
        return span

    def pages(self, rows: Rows, first: int, count: int, without: Collection[str] = ()) -> Fields:
        """Pages [first, first + count), sealed and arranged, but for the sides `without`."""
        page, tiles, tally = self.memory.spec.page, self.memory.tiles, self.memory.tally
        # Padding and sinks lie in pages too, but nobody reads them there.
        unread = min(self.memory.start) + self.memory.spec.retention.sinks - first * page
        units = {}
        for name, codec in self.memory.spec.sides.items():
            if name in without:
                continue
            part = rows.tensors[name].narrow(2, first * page - rows.first, count * page)
            count_clamped(codec, part[:, :, max(0, unread) :], name, tally)
            batch, heads, _, dim = part.shape
            pages = part.reshape(batch, heads, count, page, dim).transpose(1, 2)
            for field, tensor in seal(codec, pages, name, tiles, tally).items():
                units[f"{name}.{field}"] = tensor
        return units

    def fill_sinks(self, units: Fields) -> None:
        """Copy rows that are sinks to where they stay; what lies behind the length is not read."""
        memory, first = self.memory, self.length
        if memory.spec.retention.sinks == 0:
            return
        for name, kept in memory.sinks.items():
            count, new = kept.shape[2], units[name]
            if count == 0 or new.shape[2] == 0 or first >= memory.padding + count:
                continue
            column = memory.start_tensor[:, None] + torch.arange(count, device=kept.device) - first
            inside = (column >= 0) & (column < new.shape[2])
            index = column.clamp(0, new.shape[2] - 1)[:, None, :, None].expand_as(kept)
            kept.copy_(torch.where(inside[:, None, :, None], new.gather(2, index), kept))
