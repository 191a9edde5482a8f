"""An attention layer as canonical rows and integers, and back; what does not fit is refused.

Anybody can write a file, so nothing of a snapshot is believed: all of its integers, and the shapes
of all of its tensors, are compared with each other and with the recipe before anything is allocated
or written. What a restored layer takes is then bounded by the tensors themselves; what the recipe
would let it take beyond that (`step`, `capacity`) is taken when the next rows come.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvant.arenas import Span, retiled
from kvant.contracts import Fields, Snapshot, Tally, Tiles
from kvant.errors import SnapshotMismatch
from kvant.layers.geometry import Geometry
from kvant.layers.record import Record
from kvant.layers.rows import stores
from kvant.recipes import LayerSpec

NUMBERS = ("length", "dense_first", "sealed_first", "begins")
MAX_PLACE = 1 << 53  # no overflow where positions are counted


@dataclass(frozen=True)
class Places:
    """The integers of a snapshot: which columns its rows are of."""

    length: int
    dense_first: int
    sealed_first: int  # a page; 0 where there is none
    begins: int

    @classmethod
    def of(cls, snapshot: Snapshot) -> Places:
        if set(snapshot.numbers) != set(NUMBERS):
            raise SnapshotMismatch(
                f"numbers {sorted(snapshot.numbers)}: {list(NUMBERS)} are needed"
            )
        for name, number in snapshot.numbers.items():
            if not 0 <= number <= MAX_PLACE:
                raise SnapshotMismatch(f"{name} is {number}: 0 to {MAX_PLACE} is needed")
        return cls(**snapshot.numbers)

    def check(self, spec: LayerSpec, pages: int) -> None:
        """Are the rows that the next query needs all there, and nothing else?"""
        length, stop = self.length, self.sealed_first + pages
        due, keep = spec.paging.due(length), spec.retention.keep(length)
        if spec.capacity is not None and length > spec.capacity:
            raise SnapshotMismatch(f"{length} tokens for a capacity of {spec.capacity}")
        if pages == 0 and self.sealed_first:
            raise SnapshotMismatch(f"no sealed pages, but they begin at {self.sealed_first}")
        if pages and stop != due:
            raise SnapshotMismatch(f"sealed pages up to {stop}, {due} are due at {length}")
        if pages == 0 and due > keep // spec.page:
            raise SnapshotMismatch(f"no sealed pages, {due} are due at {length}")
        if spec.seals and self.dense_first > max(due, keep // spec.page) * spec.page:
            raise SnapshotMismatch(f"dense rows from {self.dense_first} on, {due} pages are sealed")
        if pages and self.dense_first > stop * spec.page:
            raise SnapshotMismatch(
                f"dense rows from {self.dense_first} on, sealed pages up to {stop}"
            )
        stored = self.sealed_first * spec.page if pages else self.dense_first
        given = max(stored, self.begins)
        if given > keep:
            raise SnapshotMismatch(f"rows from {given} on, those from {keep} on are needed")


def exposed(record: Record | None) -> Snapshot:
    """A snapshot that shares memory with the record where it can: copy it, or read it at once."""
    if record is None or record.length == 0:
        return Snapshot({}, dict.fromkeys(NUMBERS, 0))
    memory = record.memory
    tensors: dict[str, Tensor] = {"start": memory.start_tensor}
    for name, rows in record.dense.tensors().items():
        tensors[f"{name}.dense"] = rows
        tensors[f"{name}.sinks"] = _without_leftovers(record, memory.sinks[name])
    for name, pages in record.sealed.tensors().items():
        tensors[name] = retiled(name, pages, memory.tiles, None).transpose(1, 2).flatten(2, 3)
    sealed_first = record.sealed.first if len(record.sealed) else 0
    begins = memory.begins if memory.begins > record.first_stored else 0
    numbers = (record.length, record.dense.first, sealed_first, begins)
    return Snapshot(tensors, dict(zip(NUMBERS, numbers, strict=True)))


def _without_leftovers(record: Record, sinks: Tensor) -> Tensor:
    """A rewind leaves sinks behind the length, which must not make two equal caches differ."""
    count = record.length - record.memory.start_tensor
    place = torch.arange(sinks.shape[2], device=sinks.device)
    return sinks.masked_fill((place >= count[:, None])[:, None, :, None], 0)


def restored(
    spec: LayerSpec, snapshot: Snapshot, tiles: Tiles | None, tally: Tally
) -> Record | None:
    """A record of its own with what the snapshot holds."""
    places = Places.of(snapshot)
    if places.length == 0:
        if snapshot.tensors or any(snapshot.numbers.values()):
            raise SnapshotMismatch("rows, but no tokens")
        return None
    geometry, pages = _checked(spec, snapshot, places)
    start = tuple(snapshot.tensors["start"].tolist())
    if not 0 <= min(start) <= max(start) <= MAX_PLACE:
        raise SnapshotMismatch(f"start {list(start)}: 0 to {MAX_PLACE} is needed")
    record = Record.fresh(spec, geometry, tiles, tally, start)
    for name, sinks in record.memory.sinks.items():
        sinks.copy_(snapshot.tensors[f"{name}.sinks"])
    rows = {name: snapshot.tensors[f"{name}.dense"] for name in spec.sides}
    dense = Span.tight(record.dense.arena, places.dense_first, rows, places.length)
    units = _units(record, snapshot, pages)
    first = places.sealed_first
    sealed = Span.tight(record.sealed.arena, first, units, first + pages)
    return Record(replace(record.memory, begins=places.begins), places.length, dense, sealed)


def _checked(spec: LayerSpec, snapshot: Snapshot, places: Places) -> tuple[Geometry, int]:
    """The geometry of the rows, and how many sealed pages there are; all of it agrees."""
    geometry = _geometry(spec, snapshot)
    lead = (geometry.batch, geometry.heads)
    if places.dense_first > places.length:
        raise SnapshotMismatch(
            f"dense rows from {places.dense_first} on with {places.length} tokens"
        )
    _check_tensor(snapshot, "start", lead[:1], torch.int64)
    for name, dim in geometry.dims.items():
        dtype, dense = geometry.dtypes[name], places.length - places.dense_first
        _check_tensor(snapshot, f"{name}.sinks", (*lead, spec.retention.sinks, dim), dtype)
        _check_tensor(snapshot, f"{name}.dense", (*lead, dense, dim), dtype)
    slabs = geometry.page_slabs(spec)
    counts = set()
    for name, slab in slabs.items():
        height, width = slab.shape[3:]
        tensor = snapshot.tensors.get(name)
        rows = tensor.shape[2] if tensor is not None and tensor.ndim == 4 else 0
        _check_tensor(snapshot, name, (*lead, rows // height * height, width), slab.dtype)
        counts.add(rows // height)
    if len(counts) > 1:
        raise SnapshotMismatch(f"fields with different numbers of pages: {sorted(counts)}")
    expected = {"start", *slabs}
    expected |= {f"{name}.{part}" for name in spec.sides for part in ("dense", "sinks")}
    if extra := set(snapshot.tensors) - expected:
        raise SnapshotMismatch(f"unknown tensors {sorted(extra)}")
    pages = sum(counts)
    places.check(spec, pages)
    # Now there is a row in memory, so a frame that looks at channels looks at no more than are.
    for name, codec in spec.sides.items():
        codec.frame.rows(snapshot.tensors[f"{name}.dense"][:, :, :0])  # refuses another width
    return geometry, pages


def _geometry(spec: LayerSpec, snapshot: Snapshot) -> Geometry:
    """What the dense rows say of all others."""
    rows = {}
    for name in spec.sides:
        tensor = snapshot.tensors.get(f"{name}.dense")
        if tensor is None or tensor.ndim != 4 or not stores(tensor.dtype):
            raise SnapshotMismatch(f"{name}.dense is missing or no [B, H, T, D] of floats")
        if 0 in (tensor.shape[0], tensor.shape[1], tensor.shape[3]):
            raise SnapshotMismatch(f"{name}.dense is {list(tensor.shape)}: only T may be 0")
        if spec.dtype not in (None, tensor.dtype):
            raise SnapshotMismatch(f"{name}.dense is {tensor.dtype}, the spec says {spec.dtype}")
        rows[name] = tensor
    width = rows["keys"].shape[3]
    if spec.value_dim is not None and spec.value_dim > width:
        raise SnapshotMismatch(f"values of {spec.value_dim} channels inside keys of {width}")
    return Geometry.of(rows)


def _check_tensor(
    snapshot: Snapshot, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = snapshot.tensors.get(name)
    if tensor is None:
        raise SnapshotMismatch(f"{name} is missing")
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise SnapshotMismatch(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, {dtype} {list(shape)} is needed"
        )


def _units(record: Record, snapshot: Snapshot, pages: int) -> Fields:
    """The fields of the sealed pages as this layer's memory arranges them."""
    units = {}
    for name, slab in record.memory.geometry.page_slabs(record.memory.spec).items():
        batch, _, heads, height, width = slab.shape
        rows = snapshot.tensors[name].reshape(batch, heads, pages, height, width)
        units[name] = retiled(name, rows.transpose(1, 2), None, record.memory.tiles)
    return units
