"""Bytes before anything is allocated: the same arithmetic that allocates, on shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvant.errors import SpecError
from kvant.layers.geometry import Geometry
from kvant.layers.schedule import Schedule
from kvant.recipes import CacheSpec, LayerSpec, Recipe, SharedSpec
from kvant.sizes import format_size
from kvant.spec import as_spec

NAMES = {  # what a model's configuration calls it, the likeliest name first
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "dtype": ("dtype", "torch_dtype"),
}


@dataclass(frozen=True)
class Shape:
    """The shapes of a model's rows, alike in all layers."""

    num_layers: int
    num_heads: int  # of keys and values
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Plan:
    """What a cache of a model will take."""

    shape: Shape
    spec: CacheSpec
    context: int
    sequences: int
    layers: tuple[int, ...] = field(repr=False)  # bytes of each layer

    @property
    def nbytes(self) -> int:
        return sum(self.layers)

    @property
    def nbytes_per_token(self) -> float:
        """What one more token of one sequence costs in the long run: 0 under a window."""
        return sum(_token(recipe, self.shape) for recipe in self.spec.layers)

    def largest_context(self, budget: int) -> int:
        """The longest context that takes at most `budget` bytes; 0 where none does."""
        low, high = 0, 1
        while high < 1 << 40 and self._total(high) <= budget:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._total(middle) <= budget else (low, middle)
        return low

    def _total(self, context: int) -> int:
        return sum(_bytes(r, self.shape, self.sequences, context) for r in self.spec.layers)

    def __str__(self) -> str:
        return (
            f"{format_size(self.nbytes)} for {self.sequences} x {self.context} tokens, "
            f"{self.nbytes_per_token:.0f} bytes a token"
        )


def plan(
    model: Any,
    spec: str | LayerSpec | CacheSpec = "raw",
    *,
    context: int = 8192,
    sequences: int = 1,
) -> Plan:
    """What a cache will take: of a `Shape`, a configuration (object or mapping) or a model."""
    if context < 0 or sequences < 1:
        raise ValueError(f"context {context} and {sequences} sequences: >= 0 and >= 1 are needed")
    shape = model if isinstance(model, Shape) else read_shape(model)
    full = as_spec(spec, shape.num_layers)
    layers = tuple(_bytes(recipe, shape, sequences, context) for recipe in full.layers)
    return Plan(shape, full, context, sequences, layers)


def read_shape(model: Any) -> Shape:
    """The shapes that a model's configuration tells."""
    config = getattr(model, "config", model)
    entries = config if isinstance(config, Mapping) else vars(config)
    nested = entries.get("text_config")
    if nested is not None:
        return read_shape(nested)
    found = {what: _first(entries, names) for what, names in NAMES.items()}
    heads = _positive(found["heads"], "heads")
    dim = found["head_dim"] or _positive(found["hidden"], "hidden") // heads
    return Shape(
        num_layers=_positive(found["layers"], "layers"),
        num_heads=_positive(found["kv_heads"] or heads, "kv_heads"),
        key_dim=_positive(dim, "head_dim"),
        value_dim=_positive(entries.get("v_head_dim") or dim, "head_dim"),
        dtype=_dtype(found["dtype"]),
    )


def _first(entries: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((entries[name] for name in names if entries.get(name) is not None), None)


def _positive(value: Any, what: str) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{what} = {value!r}: the configuration needs one of {NAMES[what]}")
    return value


def _dtype(value: Any) -> torch.dtype:
    named = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    return named if isinstance(named, torch.dtype) else torch.bfloat16


def _bytes(recipe: Recipe, shape: Shape, sequences: int, context: int) -> int:
    """Bytes that one layer has taken once it has seen `context` tokens."""
    if isinstance(recipe, SharedSpec) or context == 0:
        return 0
    if not isinstance(recipe, LayerSpec):
        raise SpecError("only attention layers can be planned: a recurrent state has its own shape")
    geometry = _geometry(recipe, shape, sequences)
    dense, sealed = geometry.dense(recipe), geometry.sealed(recipe)
    rows = dense.growth.slots(_least(context, dense.growth.bound)) * dense.unit_nbytes
    due = Schedule(recipe).due(context)
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


def _least(need: int, bound: int | None) -> int:
    return need if bound is None else min(need, bound)


def _geometry(recipe: LayerSpec, shape: Shape, sequences: int) -> Geometry:
    dtype = recipe.dtype or shape.dtype
    dims = {"keys": shape.key_dim}
    if recipe.value_dim is None:
        dims["values"] = shape.value_dim
    dtypes = dict.fromkeys(dims, dtype)
    return Geometry(sequences, shape.num_heads, dims, dtypes, torch.device("meta"))
