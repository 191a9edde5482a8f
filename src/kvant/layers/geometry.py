"""The shapes of one attention layer's rows, and the memory they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.arenas import GROWING, Buffer, Growth, Slab
from kvant.contracts import Fields
from kvant.lasting import lasting
from kvant.layers.schedule import Schedule
from kvant.recipes import LayerSpec


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
        keys = rows["keys"]
        if keys.shape[:2] != (self.batch, self.heads) or keys.device != self.device:
            return False
        dims, dtypes = self.dims, self.dtypes
        return all(t.shape[3] == dims[n] and t.dtype == dtypes[n] for n, t in rows.items())

    def __str__(self) -> str:
        parts = [f"{name} {self.dims[name]} wide in {self.dtypes[name]}" for name in self.dims]
        return f"batch {self.batch}, {self.heads} heads, {', '.join(parts)} on {self.device}"

    def dense(self, spec: LayerSpec) -> Buffer:
        """Room for dense rows."""
        shape = (self.batch, self.heads, GROWING)
        slabs = {name: Slab((*shape, dim), self.dtypes[name]) for name, dim in self.dims.items()}
        growth = Growth(spec.step, spec.capacity, Schedule(spec).dense_bound)
        return Buffer(slabs, growth, self.device)

    def sealed(self, spec: LayerSpec) -> Buffer:
        """Room for sealed pages, the keys and values of a page together."""
        slabs = {}
        if spec.seals:
            for name, codec in spec.sides.items():
                for part, field in codec.fields(self.dims[name]).items():
                    height = field.height(spec.page)
                    shape = (self.batch, GROWING, self.heads, height, field.width)
                    slabs[f"{name}.{part}"] = Slab(shape, field.dtype or self.dtypes[name])
        pages = None if spec.capacity is None else spec.paging.due(spec.capacity)
        growth = Growth(max(1, spec.step // spec.page), pages, Schedule(spec).page_bound)
        return Buffer(slabs, growth, self.device)

    def sinks(self, spec: LayerSpec) -> dict[str, Tensor]:
        """Room for the first rows of every sequence."""
        shape = (self.batch, self.heads, spec.retention.sinks)
        with lasting():
            return {
                name: torch.zeros(*shape, dim, dtype=self.dtypes[name], device=self.device)
                for name, dim in self.dims.items()
            }
