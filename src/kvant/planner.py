"""Bytes before anything is allocated: the same arithmetic that allocates, on shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvant.errors import CapacityError, SpecError
from kvant.layers.geometry import Geometry
from kvant.recipes import CacheSpec, EmptySpec, LayerSpec, Recipe, SharedSpec
from kvant.shapes import Shape
from kvant.sizes import format_size
from kvant.spec import as_spec

FOREVER = 1 << 40  # tokens: a context that nothing but memory would end


@dataclass(frozen=True)
class Plan:
    """What a cache of a model will take."""

    shape: Shape
    spec: CacheSpec
    context: int
    sequences: int
    layer_nbytes: tuple[int, ...] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(self.layer_nbytes)

    @property
    def nbytes_per_token(self) -> float:
        """What one more token of one sequence costs in the long run: 0 under a window."""
        return sum(_token(recipe, self.shape) for recipe in self.spec.layers)

    def largest_context(self, budget: int) -> int | None:
        """The longest context that takes at most `budget` bytes; None where none takes more."""
        low, high = 0, 1 + _most(self.spec)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._total(middle) <= budget else (low, middle)
        return None if low == FOREVER else low

    def _total(self, context: int) -> int:
        return sum(_nbytes(r, self.shape, self.sequences, context) for r in self.spec.layers)

    def __str__(self) -> str:
        return (
            f"{format_size(self.nbytes)} for {self.sequences} x {self.context} tokens, "
            f"{self.nbytes_per_token:.0f} bytes a token"
        )


def plan(
    model: Any,
    spec: str | LayerSpec | CacheSpec = "raw",
    *,
    context: int | None = None,
    sequences: int = 1,
) -> Plan:
    """What a cache will take: of a `Shape`, a configuration (object or mapping) or a model.

    The context is 8192 tokens, or the spec's capacity where that is less, unless given.
    """
    shape = model if isinstance(model, Shape) else Shape.of(model)
    full = as_spec(spec, shape.num_layers)
    most = _most(full)
    context = min(8192, most) if context is None else context
    if context < 0 or sequences < 1:
        raise ValueError(f"context {context} and {sequences} sequences: >= 0 and >= 1 are needed")
    if context > most:
        raise CapacityError(f"context {context} with capacity={most}: plan for what fits")
    layers = tuple(_nbytes(recipe, shape, sequences, context) for recipe in full.layers)
    return Plan(shape, full, context, sequences, layers)


def _nbytes(recipe: Recipe, shape: Shape, sequences: int, context: int) -> int:
    """Bytes that one layer has taken once it has seen `context` tokens."""
    if isinstance(recipe, SharedSpec | EmptySpec) or context == 0:
        return 0
    if not isinstance(recipe, LayerSpec):
        raise SpecError("only attention layers can be planned: a recurrent state has its own shape")
    geometry = _geometry(recipe, shape, sequences)
    dense, sealed = geometry.dense(recipe), geometry.sealed(recipe)
    rows = dense.growth.slots(_least(context, dense.growth.bound)) * dense.unit_nbytes
    due = recipe.paging.due(context)
    pages = sealed.growth.slots(_least(due, sealed.growth.bound)) if due else 0
    sinks = sum(tensor.nbytes for tensor in geometry.sinks(recipe).values())
    return rows + pages * sealed.unit_nbytes + sinks


def _token(recipe: Recipe, shape: Shape) -> float:
    """What one more token takes in a layer that keeps them all: sealed, or dense for raw rows."""
    if not isinstance(recipe, LayerSpec) or recipe.retention.window is not None:
        return 0.0
    geometry = _geometry(recipe, shape, 1)
    if recipe.seals:
        return geometry.sealed(recipe).unit_nbytes / recipe.page
    return geometry.dense(recipe).unit_nbytes


def _most(spec: CacheSpec) -> int:
    """The longest context that no capacity forbids."""
    limits = [r.capacity for r in spec.layers if isinstance(r, LayerSpec)]
    return min((limit for limit in limits if limit is not None), default=FOREVER)


def _least(need: int, bound: int | None) -> int:
    return need if bound is None else min(need, bound)


def _geometry(recipe: LayerSpec, shape: Shape, sequences: int) -> Geometry:
    dtype = recipe.dtype or shape.dtype
    dims = {"keys": shape.key_dim}
    if recipe.value_dim is None:
        dims["values"] = shape.value_dim
    dtypes = dict.fromkeys(dims, dtype)
    nowhere = torch.device("meta")  # shapes without memory
    return Geometry(sequences, shape.num_heads, dims, dtypes, nowhere)
