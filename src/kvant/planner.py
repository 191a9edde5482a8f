"""Bytes before anything is allocated: the same arithmetic that allocates, on shapes alone.

A plan is of the layers that a cache would have: a window of the model's own bounds its layer, a
recurrent state has one size at every length, and what a configuration does not tell is not counted
but named in `uncounted`. Left out are the checkpoints of recurrent layers, and what holds the rows
of an encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import Any

import torch

from kvant.cache.layer import kind_of, lies_apart, pages_nbytes
from kvant.cache.pruning import kept_nbytes
from kvant.cache.storage import Geometry
from kvant.checkpoints import told_by
from kvant.errors import CapacityError, SpecError
from kvant.extent import Kind
from kvant.models import layer_shapes
from kvant.models.shapes import LayerShape, Shape, fitted
from kvant.recipes import (
    AnySpec,
    CacheSpec,
    GroupSpec,
    LayerSpec,
    Recipe,
    RecurrentSpec,
    attention_in,
)
from kvant.sizes import as_bytes, format_size
from kvant.spec import as_spec

FOREVER = 1 << 40  # tokens: a context that nothing but memory would end


@dataclass(frozen=True)
class Plan:
    """What a cache of a model will take.

    >>> plan = kvant.plan(kvant.Shape(32, 8, 128, 128), "raw", context=8192)
    >>> plan.nbytes, plan.nbytes_per_token
    (1073741824, 131072.0)
    >>> plan.largest_context("4GiB")
    32768
    """

    layers: tuple[LayerShape, ...] = field(repr=False)
    spec: CacheSpec = field(repr=False)
    context: int
    sequences: int
    layer_nbytes: tuple[int, ...] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(self.layer_nbytes)

    @cached_property
    def nbytes_kept(self) -> int:
        """What stays of prompts of `context` tokens: less than `nbytes` where layers prune."""
        gone = 0
        for recipe, layer in self._pairs:
            for one in attention_in(recipe):
                if one.prune is not None and one.capacity is None:
                    tables = layer.num_heads if lies_apart(one) else 1
                    geometry = _geometry(one, layer)
                    alone = replace(geometry, heads=geometry.heads // tables)
                    kept = kept_nbytes(
                        alone, one, kind_of(one), self.context, self.sequences * tables
                    )
                    gone += _rows(one, layer, self.sequences, self.context) - kept
        return self.nbytes - max(0, gone)

    @property
    def nbytes_per_token(self) -> float:
        """What one more token of one sequence costs in the long run: 0 under a window."""
        return sum(_token(recipe, layer) for recipe, layer in self._pairs)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """What dense rows are in: bfloat16 where neither the spec nor the model says so."""
        found = ((recipe, layer) for recipe, layer in self._pairs if layer.attends)
        kinds = (
            one.dtype or layer.dtype for recipe, layer in found for one in attention_in(recipe)
        )
        return tuple(dict.fromkeys(kinds))

    @cached_property
    def page_nbytes(self) -> dict[Kind, tuple[int, int]]:
        """Bytes of an open page and of a sealed one, in all layers of a kind."""
        found: dict[Kind, tuple[int, int]] = {}
        for recipe, layer in self._pairs:
            for one in attention_in(recipe):
                geometry, (opened, sealed) = _geometry(one, layer), found.get(kind_of(one), (0, 0))
                sizes = opened + geometry.open_nbytes(one), sealed + geometry.sealed_nbytes(one)
                found[kind_of(one)] = sizes
        return found

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states of one sequence, whatever its length."""
        return sum(layer.state_nbytes or 0 for layer in self.layers if layer.recurs)

    @property
    def uncounted(self) -> tuple[int, ...]:
        """The layers whose state is of a size that nobody told."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.state_nbytes is None)

    def largest_context(self, budget: int | str) -> int | None:
        """The longest context that takes at most `budget` bytes; None where none takes more."""
        low, high, most = 0, 1 + _most(self.spec), as_bytes(budget)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._total(middle) <= most else (low, middle)
        return None if low == FOREVER else low

    @property
    def _pairs(self) -> Sequence[tuple[Recipe, LayerShape]]:
        return tuple(zip(self.spec.layers, self.layers, strict=True))

    def _total(self, context: int) -> int:
        return sum(_nbytes(*pair, self.sequences, context) for pair in self._pairs)

    def __str__(self) -> str:
        missing, kinds = self.uncounted, [str(one).removeprefix("torch.") for one in self.dtypes]
        return (
            f"{format_size(self.nbytes)} for {self.sequences} x {self.context} tokens, "
            f"{self.nbytes_per_token:.0f} bytes a token"
            + (f", of rows that come in {' and '.join(kinds)}" if kinds else "")
            + (f", {len(missing)} layers not counted" if missing else "")
        )


def plan(
    model: Any,
    spec: AnySpec = "raw",
    *,
    context: int | None = None,
    sequences: int = 1,
) -> Plan:
    """What a cache will take: of layer shapes, a configuration (object or mapping) or a model.

    A string or a path is a `config.json`, a folder with one, or a name on the hub.

    The context is 8192 tokens, or the spec's capacity where that is less, unless given.

    >>> config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32}
    >>> config |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    >>> kvant.plan(config, "raw", context=8192).nbytes
    1073741824
    """
    layers, full = _layers(model, spec)
    most = _most(full)
    context = min(8192, most) if context is None else context
    if context < 0 or sequences < 1:
        raise ValueError(f"context {context} and {sequences} sequences: >= 0 and >= 1 are needed")
    if context > most:
        raise CapacityError(f"context {context} with capacity={most}: plan for what fits")
    pairs = zip(full.layers, layers, strict=True)
    counted = tuple(_nbytes(recipe, layer, sequences, context) for recipe, layer in pairs)
    return Plan(layers, full, context, sequences, counted)


def _layers(model: Any, spec: Any) -> tuple[tuple[LayerShape, ...], CacheSpec]:
    if isinstance(model, str | PathLike):
        model = told_by(model)
    if isinstance(model, Shape):  # no layer of it wants anything but what the spec says
        return model.layers, as_spec(spec, model.num_layers)
    given = isinstance(model, Sequence) and all(isinstance(layer, LayerShape) for layer in model)
    layers = tuple(model) if given else layer_shapes(model)
    return layers, fitted(layers, spec)


def _nbytes(recipe: Recipe, layer: LayerShape, sequences: int, context: int) -> int:
    """Bytes that one layer has taken once it has seen `context` tokens."""
    if context == 0:
        return 0
    if isinstance(recipe, GroupSpec):
        return sum(_nbytes(part, layer, sequences, context) for _, part in recipe.parts)
    if isinstance(recipe, RecurrentSpec):
        _check_recurrent(layer)
        return sequences * (layer.state_nbytes or 0)
    return _rows(recipe, layer, sequences, context) if isinstance(recipe, LayerSpec) else 0


def _rows(recipe: LayerSpec, layer: LayerShape, sequences: int, context: int) -> int:
    """Behind a prompt a layer that prunes has less; what it takes while that is read is all."""
    geometry, kind = _geometry(recipe, layer), kind_of(recipe)
    tables = layer.num_heads if lies_apart(recipe) else 1
    geometry = replace(geometry, heads=geometry.heads // tables)
    return pages_nbytes(geometry, recipe, kind, [context] * sequences * tables)


def _token(recipe: Recipe, layer: LayerShape) -> float:
    """What one more token takes in a layer that keeps them all: sealed, or dense for raw rows."""
    if isinstance(recipe, GroupSpec):
        return sum(_token(part, layer) for _, part in recipe.parts)
    if not isinstance(recipe, LayerSpec) or recipe.retention.window is not None:
        return 0.0
    geometry = _geometry(recipe, layer)
    page = geometry.sealed_nbytes(recipe) if recipe.seals else geometry.open_nbytes(recipe)
    return page / recipe.page


def _check_recurrent(layer: LayerShape) -> None:
    if not layer.recurs:
        raise SpecError("a recurrent recipe for a layer that attends: a LayerSpec is needed")


def _most(spec: CacheSpec) -> int:
    """The longest context that no capacity forbids."""
    limits = (layer.capacity for layer in attention_in(*spec.layers))
    return min((limit for limit in limits if limit is not None), default=FOREVER)


def _geometry(recipe: LayerSpec, layer: LayerShape) -> Geometry:
    dtype = recipe.dtype or layer.dtype
    dims = {"keys": layer.key_dim}
    if recipe.value_dim is None:
        dims["values"] = layer.value_dim
    dtypes = dict.fromkeys(dims, dtype)
    nowhere = torch.device("meta")  # shapes without memory
    return Geometry(layer.num_heads, dims, dtypes, nowhere)
