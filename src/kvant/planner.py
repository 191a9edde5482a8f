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

from kvant.cache.layer import has_per_head_tables, make_layer_group, pages_nbytes
from kvant.cache.pruning import count_retained_nbytes
from kvant.cache.storage import Geometry
from kvant.checkpoints import read_config
from kvant.errors import CapacityError, SpecError
from kvant.models import layer_shapes
from kvant.models.shapes import LayerShape, Shape, fit_spec
from kvant.page_table import LayerGroup
from kvant.recipes import (
    AnySpec,
    CacheSpec,
    GroupSpec,
    LayerSpec,
    Recipe,
    RecurrentSpec,
    iterate_attention,
)
from kvant.sizes import as_bytes, format_size
from kvant.spec import as_spec

UNLIMITED_CONTEXT = 1 << 40  # tokens: a context that nothing but memory would end


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
        for recipe, layer in self._layer_pairs:
            for one in iterate_attention(recipe):
                if one.prune is not None and one.capacity is None:
                    tables = layer.num_heads if has_per_head_tables(one) else 1
                    geometry = _make_geometry(one, layer)
                    alone = replace(geometry, heads=geometry.heads // tables)
                    kept = count_retained_nbytes(
                        alone, one, make_layer_group(one), self.context, self.sequences * tables
                    )
                    gone += _count_row_nbytes(one, layer, self.sequences, self.context) - kept
        return self.nbytes - max(0, gone)

    @property
    def nbytes_per_token(self) -> float:
        """What one more token of one sequence costs in the long run: 0 under a window."""
        return sum(_count_token_nbytes(recipe, layer) for recipe, layer in self._layer_pairs)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """What dense rows are in: bfloat16 where neither the spec nor the model says so."""
        found = ((recipe, layer) for recipe, layer in self._layer_pairs if layer.attends)
        kinds = (
            one.dtype or layer.dtype for recipe, layer in found for one in iterate_attention(recipe)
        )
        return tuple(dict.fromkeys(kinds))

    @cached_property
    def page_nbytes(self) -> dict[LayerGroup, tuple[int, int]]:
        """Bytes of an open page and of a sealed one, in all layers of a kind."""
        found: dict[LayerGroup, tuple[int, int]] = {}
        for recipe, layer in self._layer_pairs:
            for one in iterate_attention(recipe):
                geometry, (opened, sealed) = (
                    _make_geometry(one, layer),
                    found.get(make_layer_group(one), (0, 0)),
                )
                sizes = opened + geometry.open_nbytes(one), sealed + geometry.sealed_nbytes(one)
                found[make_layer_group(one)] = sizes
        return found

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states of one sequence, whatever its length."""
        return sum(layer.state_nbytes or 0 for layer in self.layers if layer.recurs)

    @property
    def uncounted_layers(self) -> tuple[int, ...]:
        """The layers whose state is of a size that nobody told."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.state_nbytes is None)

    uncounted = uncounted_layers  # the public name

    def largest_context(self, budget: int | str) -> int | None:
        """The longest context that takes at most `budget` bytes; None where none takes more."""
        low, high, most = 0, 1 + _find_max_context(self.spec), as_bytes(budget)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._count_nbytes(middle) <= most else (low, middle)
        return None if low == UNLIMITED_CONTEXT else low

    @property
    def _layer_pairs(self) -> Sequence[tuple[Recipe, LayerShape]]:
        return tuple(zip(self.spec.layers, self.layers, strict=True))

    def _count_nbytes(self, context: int) -> int:
        return sum(
            _count_layer_nbytes(*pair, self.sequences, context) for pair in self._layer_pairs
        )

    def __str__(self) -> str:
        missing, kinds = (
            self.uncounted_layers,
            [str(one).removeprefix("torch.") for one in self.dtypes],
        )
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
    layers, full = _resolve_layers(model, spec)
    most = _find_max_context(full)
    context = min(8192, most) if context is None else context
    if context < 0 or sequences < 1:
        raise ValueError(f"context {context} and {sequences} sequences: >= 0 and >= 1 are needed")
    if context > most:
        raise CapacityError(f"context {context} with capacity={most}: plan for what fits")
    pairs = zip(full.layers, layers, strict=True)
    counted = tuple(
        _count_layer_nbytes(recipe, layer, sequences, context) for recipe, layer in pairs
    )
    return Plan(layers, full, context, sequences, counted)


def _resolve_layers(model: Any, spec: Any) -> tuple[tuple[LayerShape, ...], CacheSpec]:
    if isinstance(model, str | PathLike):
        model = read_config(model)
    if isinstance(model, Shape):  # no layer of it wants anything but what the spec says
        return model.layers, as_spec(spec, model.num_layers)
    given = isinstance(model, Sequence) and all(isinstance(layer, LayerShape) for layer in model)
    layers = tuple(model) if given else layer_shapes(model)
    return layers, fit_spec(layers, spec)


def _count_layer_nbytes(recipe: Recipe, layer: LayerShape, sequences: int, context: int) -> int:
    """Bytes that one layer has taken once it has seen `context` tokens."""
    if context == 0:
        return 0
    if isinstance(recipe, GroupSpec):
        return sum(_count_layer_nbytes(part, layer, sequences, context) for _, part in recipe.parts)
    if isinstance(recipe, RecurrentSpec):
        _check_recurrent(layer)
        return sequences * (layer.state_nbytes or 0)
    return (
        _count_row_nbytes(recipe, layer, sequences, context) if isinstance(recipe, LayerSpec) else 0
    )


def _count_row_nbytes(recipe: LayerSpec, layer: LayerShape, sequences: int, context: int) -> int:
    """Behind a prompt a layer that prunes has less; what it takes while that is read is all."""
    geometry, kind = _make_geometry(recipe, layer), make_layer_group(recipe)
    tables = layer.num_heads if has_per_head_tables(recipe) else 1
    geometry = replace(geometry, heads=geometry.heads // tables)
    return pages_nbytes(geometry, recipe, kind, [context] * sequences * tables)


def _count_token_nbytes(recipe: Recipe, layer: LayerShape) -> float:
    """What one more token takes in a layer that keeps them all: sealed, or dense for raw rows."""
    if isinstance(recipe, GroupSpec):
        return sum(_count_token_nbytes(part, layer) for _, part in recipe.parts)
    if not isinstance(recipe, LayerSpec) or recipe.retention.window is not None:
        return 0.0
    geometry = _make_geometry(recipe, layer)
    page = geometry.sealed_nbytes(recipe) if recipe.seals else geometry.open_nbytes(recipe)
    return page / recipe.page


def _check_recurrent(layer: LayerShape) -> None:
    if not layer.recurs:
        raise SpecError("a recurrent recipe for a layer that attends: a LayerSpec is needed")


def _find_max_context(spec: CacheSpec) -> int:
    """The longest context that no capacity forbids."""
    limits = (layer.capacity for layer in iterate_attention(*spec.layers))
    return min((limit for limit in limits if limit is not None), default=UNLIMITED_CONTEXT)


def _make_geometry(recipe: LayerSpec, layer: LayerShape) -> Geometry:
    dtype = recipe.dtype or layer.dtype
    dims = {"keys": layer.key_dim}
    if recipe.value_dim is None:
        dims["values"] = layer.value_dim
    dtypes = dict.fromkeys(dims, dtype)
    nowhere = torch.device("meta")  # shapes without memory
    return Geometry(layer.num_heads, dims, dtypes, nowhere)
