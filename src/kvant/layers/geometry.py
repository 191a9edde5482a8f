"""The shapes of one attention layer's rows, checked at the door, and the memory they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.arenas import GROWING, Buffer, Growth, Slab
from kvant.contracts import Codec, Fields, Order
from kvant.layers.schedule import Schedule
from kvant.recipes import LayerSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sides(spec: LayerSpec) -> dict[str, Codec]:
    """The rows a layer stores, by name: keys, and values unless they lie inside the keys."""
    if spec.value_dim is not None:
        return {"keys": spec.keys}
    return {"keys": spec.keys, "values": spec.values}


def check_order(order: str) -> None:
    if order not in ("BHTD", "BTHD"):
        raise ValueError(f"order {order!r}: 'BHTD' or 'BTHD' is needed")


def incoming(spec: LayerSpec, keys: Tensor, values: Tensor | None, order: Order) -> Fields:
    """The tensors of an append as {side: [B, H, T, D]}, or a ValueError."""
    check_order(order)
    if (values is None) != (spec.value_dim is not None):
        raise ValueError("values come with the keys, unless the spec's value_dim finds them there")
    rows = {"keys": keys} if values is None else {"keys": keys, "values": values}
    for name, tensor in rows.items():
        if tensor.ndim != 4:
            raise ValueError(f"{name} of shape {list(tensor.shape)}: {order} needs 4 dimensions")
        heads = tensor.shape[1 if order == "BHTD" else 2]
        if 0 in (tensor.shape[0], heads, tensor.shape[3]):
            raise ValueError(f"{name} of shape {list(tensor.shape)}: only T may be 0")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} of {tensor.dtype}: one of {list(map(str, DTYPES))} is needed")
    if spec.value_dim is not None and spec.value_dim > keys.shape[3]:
        raise ValueError(f"values of {spec.value_dim} channels inside keys of {keys.shape[3]}")
    if values is not None and (keys.shape[:3], keys.device) != (values.shape[:3], values.device):
        raise ValueError(
            f"keys {list(keys.shape)} on {keys.device} and values {list(values.shape)} on "
            f"{values.device} differ in more than their last dimension and dtype"
        )
    ordered = {k: t.transpose(1, 2) if order == "BTHD" else t for k, t in rows.items()}
    return {k: t.detach().to(spec.dtype or t.dtype) for k, t in ordered.items()}


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

    def __str__(self) -> str:
        parts = [f"{name} {self.dims[name]} wide in {self.dtypes[name]}" for name in self.dims]
        return f"batch {self.batch}, {self.heads} heads, {', '.join(parts)} on {self.device}"

    def dense(self, spec: LayerSpec) -> Buffer:
        """Room for dense rows."""
        shape = (self.batch, self.heads, GROWING)
        slabs = {name: Slab((*shape, dim), self.dtypes[name]) for name, dim in self.dims.items()}
        return Buffer(slabs, dense_growth(spec), self.device)

    def sealed(self, spec: LayerSpec) -> Buffer:
        """Room for sealed pages, the keys and values of a page together."""
        slabs = {}
        if spec.seals:
            for name, codec in sides(spec).items():
                for part, field in codec.fields(self.dims[name]).items():
                    height = field.height(spec.page)
                    shape = (self.batch, GROWING, self.heads, height, field.width)
                    slabs[f"{name}.{part}"] = Slab(shape, field.dtype or self.dtypes[name])
        return Buffer(slabs, page_growth(spec), self.device)

    def sinks(self, spec: LayerSpec) -> dict[str, Tensor]:
        """Room for the first rows of every sequence."""
        shape = (self.batch, self.heads, spec.retention.sinks)
        with torch.inference_mode(False):
            return {
                name: torch.zeros(*shape, dim, dtype=self.dtypes[name], device=self.device)
                for name, dim in self.dims.items()
            }


def dense_growth(spec: LayerSpec) -> Growth:
    return Growth(spec.step, spec.capacity, Schedule(spec).dense_bound)


def page_growth(spec: LayerSpec) -> Growth:
    pages = None if spec.capacity is None else Schedule(spec).due(spec.capacity)
    return Growth(max(1, spec.step // spec.page), pages, Schedule(spec).page_bound)
