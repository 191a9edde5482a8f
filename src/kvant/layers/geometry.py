"""The shapes of one attention layer's rows, and the memory they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvant.arenas import GROWING, Buffer, Growth, Slab
from kvant.contracts import Fields
from kvant.lasting import lasting
from kvant.layers.schedule import Schedule
from kvant.recipes import LayerSpec


@dataclass(frozen=True)
class Footprint:
    """What the rows of a layer take by a recipe, before anything is allocated."""

    spec: LayerSpec
    dense: Growth  # in rows
    sealed: Growth  # in pages
    row: int  # bytes
    page: int
    sinks: int

    def nbytes(self, length: int) -> int:
        """Bytes that a layer has taken once it has seen `length` tokens."""
        if length == 0:
            return 0
        pages = _slots(self.sealed, self.spec.paging.due(length))
        return self.dense_nbytes(length) + pages * self.page + self.sinks

    def dense_nbytes(self, length: int) -> int:
        """Those of them for dense rows."""
        return _slots(self.dense, length) * self.row


@dataclass(frozen=True)
class Geometry:
    """What all rows of a layer have in common once the first ones came."""

    batch: int
    heads: int
    dims: Mapping[str, int]
    dtypes: Mapping[str, torch.dtype]
    device: torch.device

    @classmethod
    def of(cls, rows: Fields) -> Geometry:
        keys = rows["keys"]
        dims = {name: tensor.shape[3] for name, tensor in rows.items()}
        dtypes = {name: tensor.dtype for name, tensor in rows.items()}
        return cls(keys.shape[0], keys.shape[1], dims, dtypes, keys.device)

    def fits(self, rows: Fields) -> bool:
        """Is this the geometry of these rows? Asked at every token."""
        lead = (*rows["keys"].shape[:3],)
        if lead[:2] != (self.batch, self.heads):
            return False
        for name, tensor in rows.items():
            if tensor.shape != (*lead, self.dims[name]) or tensor.dtype != self.dtypes[name]:
                return False
            if tensor.device != self.device:
                return False
        return True

    def __str__(self) -> str:
        parts = [f"{name} {self.dims[name]} wide in {self.dtypes[name]}" for name in self.dims]
        return f"batch {self.batch}, {self.heads} heads, {', '.join(parts)} on {self.device}"

    def dense(self, spec: LayerSpec) -> Buffer:
        """Footprint for dense rows."""
        shape = (self.batch, self.heads, GROWING)
        slabs = {name: Slab((*shape, dim), self.dtypes[name]) for name, dim in self.dims.items()}
        growth = Growth(spec.step, spec.capacity, Schedule(spec).dense_bound)
        return Buffer(slabs, growth, self.device)

    def sealed(self, spec: LayerSpec) -> Buffer:
        """Footprint for sealed pages, the keys and values of a page together."""
        pages = None if spec.capacity is None else spec.paging.due(spec.capacity)
        growth = Growth(max(1, spec.step // spec.page), pages, Schedule(spec).page_bound)
        return Buffer(self.page_slabs(spec), growth, self.device)

    def page_slabs(self, spec: LayerSpec) -> dict[str, Slab]:
        """The shapes of the fields of sealed pages; nothing is allocated."""
        slabs = {}
        if spec.seals:
            for name, codec in spec.sides.items():
                for part, field in codec.fields(self.dims[name]).items():
                    height = field.height(spec.page)
                    shape = (self.batch, GROWING, self.heads, height, field.width)
                    slabs[f"{name}.{part}"] = Slab(shape, field.dtype or self.dtypes[name])
        return slabs

    def footprint(self, spec: LayerSpec) -> Footprint:
        """What rows of this geometry take by a recipe."""
        nowhere = replace(self, device=torch.device("meta"))  # shapes without memory
        sinks = sum(tensor.nbytes for tensor in nowhere.sinks(spec).values())
        dense, sealed = nowhere.dense(spec), nowhere.sealed(spec)
        units = dense.unit_nbytes, sealed.unit_nbytes
        return Footprint(spec, dense.growth, sealed.growth, *units, sinks)

    def sinks(self, spec: LayerSpec) -> dict[str, Tensor]:
        """Footprint for the first rows of every sequence."""
        shape = (self.batch, self.heads, spec.retention.sinks)
        with lasting():
            return {
                name: torch.zeros(*shape, dim, dtype=self.dtypes[name], device=self.device)
                for name, dim in self.dims.items()
            }


def _slots(growth: Growth, need: int) -> int:
    """Those taken for the first `need` units, where old ones go once there are enough."""
    return growth.slots(need if growth.bound is None else min(need, growth.bound))
