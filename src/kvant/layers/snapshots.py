"""An attention layer as canonical rows and integers, and back; what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvant.arenas import Span, retiled
from kvant.contracts import Snapshot, Tally, Tiles
from kvant.errors import SnapshotMismatch
from kvant.layers.geometry import Geometry
from kvant.layers.record import Record
from kvant.layers.rows import stores
from kvant.recipes import LayerSpec

NUMBERS = ("length", "dense_first", "sealed_first", "begins")
MAX_START = 1 << 53  # no overflow where positions are counted


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
    if set(snapshot.numbers) != set(NUMBERS):
        raise SnapshotMismatch(f"numbers {sorted(snapshot.numbers)}: {list(NUMBERS)} are needed")
    length, dense_first, sealed_first, begins = (snapshot.numbers[name] for name in NUMBERS)
    if length == 0:
        if snapshot.tensors or any((dense_first, sealed_first, begins)):
            raise SnapshotMismatch("rows, but no tokens")
        return None
    geometry = _geometry(spec, snapshot)
    start = tuple(int(s) for s in _tensor(snapshot, "start", (geometry.batch,)))
    if not 0 <= min(start) <= max(start) <= MAX_START:
        raise SnapshotMismatch(f"start {list(start)}: 0 to {MAX_START} is needed")
    record = Record.fresh(spec, geometry, tiles, tally, start)
    for name, sinks in record.memory.sinks.items():
        sinks.copy_(_tensor(snapshot, f"{name}.sinks", tuple(sinks.shape), sinks.dtype))
    dense = _dense(record, snapshot, dense_first, length)
    sealed = _pages(record, snapshot, sealed_first)
    record = Record(replace(record.memory, begins=begins), length, dense, sealed)
    _check(record, snapshot)
    return record


def _geometry(spec: LayerSpec, snapshot: Snapshot) -> Geometry:
    rows = {}
    for name, codec in spec.sides.items():
        tensor = snapshot.tensors.get(f"{name}.dense")
        if tensor is None or tensor.ndim != 4 or not stores(tensor.dtype):
            raise SnapshotMismatch(f"{name}.dense is missing or no [B, H, T, D] of floats")
        if 0 in (tensor.shape[0], tensor.shape[1], tensor.shape[3]):
            raise SnapshotMismatch(f"{name}.dense is {list(tensor.shape)}: only T may be 0")
        if spec.dtype not in (None, tensor.dtype):
            raise SnapshotMismatch(f"{name}.dense is {tensor.dtype}, the spec says {spec.dtype}")
        codec.frame.rows(tensor[:, :, :0])  # refuses a frame of another width
        rows[name] = tensor
    return Geometry.of(rows)


def _dense(record: Record, snapshot: Snapshot, first: int, length: int) -> Span:
    geometry = record.memory.geometry
    if not 0 <= first <= length:
        raise SnapshotMismatch(f"dense rows from {first} on with {length} tokens")
    units = {}
    for name, dim in geometry.dims.items():
        shape = (geometry.batch, geometry.heads, length - first, dim)
        units[name] = _tensor(snapshot, f"{name}.dense", shape, geometry.dtypes[name])
    return Span.adopted(record.dense.arena, first, units, length)


def _pages(record: Record, snapshot: Snapshot, first: int) -> Span:
    spec, geometry, tiles = record.memory.spec, record.memory.geometry, record.memory.tiles
    slabs = geometry.sealed(spec).slabs
    if first < 0:
        raise SnapshotMismatch(f"sealed pages from {first} on")
    units, counts = {}, set()
    for name, slab in slabs.items():
        height, width = slab.shape[3:]
        tensor = snapshot.tensors.get(name)
        rows = tensor.shape[2] if tensor is not None and tensor.ndim == 4 else 0
        lead = (geometry.batch, geometry.heads)
        rows = rows // height * height
        canonical = _tensor(snapshot, name, (*lead, rows, width), slab.dtype)
        pages = canonical.reshape(*lead, rows // height, height, width).transpose(1, 2)
        units[name] = retiled(name, pages, None, tiles)
        counts.add(rows // height)
    if len(counts) > 1:
        raise SnapshotMismatch(f"fields with different numbers of pages: {sorted(counts)}")
    return Span.adopted(record.sealed.arena, first, units, first + sum(counts))


def _tensor(
    snapshot: Snapshot, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.int64
) -> Tensor:
    tensor = snapshot.tensors.get(name)
    if tensor is None:
        raise SnapshotMismatch(f"{name} is missing")
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise SnapshotMismatch(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, {dtype} {list(shape)} is needed"
        )
    return tensor


def _check(record: Record, snapshot: Snapshot) -> None:
    """Are the rows that the next query needs all there, and nothing else?"""
    spec = record.memory.spec
    expected = {"start", *record.memory.geometry.sealed(spec).slabs}
    expected |= {f"{name}.{part}" for name in spec.sides for part in ("dense", "sinks")}
    if extra := set(snapshot.tensors) - expected:
        raise SnapshotMismatch(f"unknown tensors {sorted(extra)}")
    length = record.length
    if spec.capacity is not None and length > spec.capacity:
        raise SnapshotMismatch(f"{length} tokens for a capacity of {spec.capacity}")
    due, sealed, dense = spec.paging.due(length), record.sealed, record.dense
    if len(sealed) and sealed.stop != due:
        raise SnapshotMismatch(f"sealed pages up to {sealed.stop}, {due} are due at {length}")
    keep = spec.retention.keep(length)
    if spec.seals and (dense.first > max(due, keep // spec.page) * spec.page):
        raise SnapshotMismatch(f"dense rows from {dense.first} on, {due} pages are sealed")
    if len(sealed) and dense.first > sealed.stop * spec.page:
        raise SnapshotMismatch(
            f"dense rows from {dense.first} on, sealed pages up to {sealed.stop}"
        )
    if not len(sealed) and due > keep // spec.page:
        raise SnapshotMismatch(f"no sealed pages, {due} are due at {length}")
    if not 0 <= record.memory.begins <= record.first_given <= keep:
        raise SnapshotMismatch(
            f"rows from {record.first_given} on, those from {keep} on are needed"
        )
