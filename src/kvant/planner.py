"""Predict the bytes of a cache from layer shapes, with the arithmetic that allocates them.

A plan covers the layers that the cache would have. A window of the model bounds its layer, and a
recurrent state has one size at every length. Layers whose state size the configuration does not
give are listed in `uncounted_layers`. Checkpoints of recurrent layers and the rows of an encoder
are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import Any

import torch

from kvant.cache.layout import has_per_head_tables, make_layer_group
from kvant.cache.pruning import count_retained_nbytes
from kvant.checkpoints import check_gguf_weights, find_gguf, make_meta_model, read_config
from kvant.errors import CapacityError, SpecError
from kvant.models import layer_shapes, max_context
from kvant.models.shapes import LayerShape, Shape, fit_spec
from kvant.page_table import LayerGroup
from kvant.pages.storage import Geometry, pages_nbytes
from kvant.platform.sizes import as_bytes, format_size
from kvant.recipes import (
    AnySpec,
    CacheSpec,
    GroupSpec,
    LayerSpec,
    Recipe,
    RecurrentSpec,
    WeightFormats,
    iterate_attention,
)
from kvant.spec import as_spec
from kvant.weights.packing import count_weight_nbytes

DEFAULT_CONTEXT = 8192  # tokens
UNLIMITED_CONTEXT = 1 << 40  # tokens: more than any memory holds
MAX_SHORT_LENGTH = 4096  # tokens, within which the usual formats begin to save memory
SHORT_LENGTH_STEP = 8  # divides pages: a sequence takes most for its length as a page begins


@dataclass(frozen=True)
class Plan:
    """The bytes that a cache of a model will allocate.

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
    weight_nbytes: int | None = None  # None: not asked for

    @property
    def nbytes(self) -> int:
        return sum(self.layer_nbytes)

    @cached_property
    def nbytes_kept(self) -> int:
        """Bytes after prompts of `context` tokens were pruned; `nbytes` if no layer prunes."""
        released = 0
        for recipe, layer in self._layer_pairs:
            for spec in iterate_attention(recipe):
                if spec.prune is not None and spec.capacity is None:
                    per_table, tables = _split_geometry(spec, layer)
                    count, group = self.sequences * tables, make_layer_group(spec)
                    retained = count_retained_nbytes(per_table, spec, group, self.context, count)
                    nbytes = _count_row_nbytes(spec, layer, self.sequences, self.context)
                    released += nbytes - retained
        return self.nbytes - max(0, released)

    @property
    def nbytes_per_token(self) -> float:
        """Bytes of each further token of one sequence, in the long run; 0 under a window."""
        return sum(_count_token_nbytes(recipe, layer) for recipe, layer in self._layer_pairs)

    @cached_property
    def row_nbytes(self) -> tuple[float, ...]:
        """Bytes of a sealed row of each layer, all heads; of an open row if it seals no pages."""
        return tuple(
            sum(_count_row(spec, layer) for spec in iterate_attention(recipe))
            for recipe, layer in self._layer_pairs
        )

    @property
    def bits_per_value(self) -> float:
        """Mean bits of a value of these rows, scales included; 0 if no layer attends."""
        num_values = sum(
            layer.num_heads * sum(_make_geometry(spec, layer).dims.values())
            for recipe, layer in self._layer_pairs
            for spec in iterate_attention(recipe)
        )
        return 8 * sum(self.row_nbytes) / num_values if num_values else 0.0

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of dense rows; bfloat16 if neither the spec nor the model names one."""
        dtypes = (
            spec.dtype or layer.dtype
            for recipe, layer in self._layer_pairs
            if layer.attends
            for spec in iterate_attention(recipe)
        )
        return tuple(dict.fromkeys(dtypes))

    @cached_property
    def page_nbytes(self) -> dict[LayerGroup, tuple[int, int]]:
        """Bytes of an open and of a sealed page, summed over the layers of each group."""
        nbytes: dict[LayerGroup, tuple[int, int]] = {}
        for recipe, layer in self._layer_pairs:
            for spec in iterate_attention(recipe):
                group, geometry = make_layer_group(spec), _make_geometry(spec, layer)
                opened, sealed = nbytes.get(group, (0, 0))
                nbytes[group] = (
                    opened + geometry.open_nbytes(spec),
                    sealed + geometry.sealed_nbytes(spec),
                )
        return nbytes

    @property
    def state_nbytes(self) -> int:
        """Bytes of the recurrent states of one sequence, at any length."""
        return sum(layer.state_nbytes or 0 for layer in self.layers if layer.recurs)

    @property
    def uncounted_layers(self) -> tuple[int, ...]:
        """Indices of layers whose state size is unknown."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.state_nbytes is None)

    uncounted = uncounted_layers  # the public name

    def largest_context(self, budget: int | str) -> int | None:
        """Return the longest context within `budget` bytes; None if the context needs no limit.

        Weights that the plan counts are within the budget too.
        """
        limit = as_bytes(budget) - (self.weight_nbytes or 0)
        low, high = 0, 1 + _find_max_context(self.spec)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._count_nbytes(middle) <= limit else (low, middle)
        return None if low == UNLIMITED_CONTEXT else low

    def count_raw_nbytes(self, context: int) -> int:
        """Return the bytes of the rows of `context` tokens without a format, and of the states."""
        row_nbytes = sum(
            min(context, layer.window or context)
            * (_make_geometry(spec, layer).open_nbytes(spec) // spec.page)
            for recipe, layer in self._layer_pairs
            for spec in iterate_attention(recipe)
        )
        return self.sequences * (row_nbytes + self.state_nbytes)

    def find_saving_length(self) -> int | None:
        """Return the number of tokens from which on the cache takes less than raw rows.

        A short sequence lies in a few pages, whole and partly open. None: no length up to 4,096,
        or up to the capacity.
        """

        def saves_memory(length: int) -> bool:
            return self._count_nbytes(length) < self.count_raw_nbytes(length)

        limit = min(MAX_SHORT_LENGTH, _find_max_context(self.spec))
        lengths = range(1, limit + 1, SHORT_LENGTH_STEP)
        longest = max((length for length in lengths if not saves_memory(length)), default=0)
        if longest == lengths[-1]:
            return None
        following = range(longest + 1, longest + 1 + SHORT_LENGTH_STEP)
        return next(length for length in following if saves_memory(length))

    @property
    def _layer_pairs(self) -> Sequence[tuple[Recipe, LayerShape]]:
        return tuple(zip(self.spec.layers, self.layers, strict=True))

    def _count_nbytes(self, context: int) -> int:
        return sum(
            count * _count_layer_nbytes(*pair, self.sequences, context)
            for pair, count in self._pair_counts.items()
        )

    @cached_property
    def _pair_counts(self) -> Counter[tuple[Recipe, LayerShape]]:
        """The numbers of equal layers."""
        return Counter(self._layer_pairs)

    def __str__(self) -> str:
        missing = self.uncounted_layers
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        return (
            f"{format_size(self.nbytes)} for {self.sequences} x {self.context} tokens, "
            f"{self.nbytes_per_token:.0f} bytes a token"
            + (f", rows in {' and '.join(dtypes)}" if dtypes else "")
            + ("" if self.weight_nbytes is None else f", weights {format_size(self.weight_nbytes)}")
            + (f", {len(missing)} layers not counted" if missing else "")
        )


def plan(
    model: Any,
    spec: AnySpec = "raw",
    *,
    context: int | None = None,
    sequences: int = 1,
    weights: WeightFormats | None = None,
) -> Plan:
    """Predict the bytes of a cache for layer shapes, a configuration or a model.

    A configuration is an object or a mapping. A string or a path names a `config.json`, a folder
    with one, or a model on the hub. The default context is 8192 tokens, or the spec's capacity if
    that is less. With `weights`, formats as in `kvant.pack`, the weights are counted too.

    >>> config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32}
    >>> config |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    >>> kvant.plan(config, "raw", context=8192).nbytes
    1073741824
    """
    layers, full = _resolve_layers(model, spec)
    limit = _find_max_context(full)
    context = min(DEFAULT_CONTEXT, limit) if context is None else context
    if context < 0 or sequences < 1:
        raise ValueError(f"context {context} and {sequences} sequences: >= 0 and >= 1 are needed")
    if context > limit:
        raise CapacityError(
            f"context {context} with capacity={limit}: give a context of at most {limit}"
        )
    pairs = zip(full.layers, layers, strict=True)
    layer_nbytes = tuple(
        _count_layer_nbytes(recipe, layer, sequences, context) for recipe, layer in pairs
    )
    weight_nbytes = None if weights is None else count_weights(model, weights)
    return Plan(layers, full, context, sequences, layer_nbytes, weight_nbytes)


def count_weights(model: Any, weights: WeightFormats) -> int:
    """Return the bytes of the weights of a model, or of one with this configuration or name."""
    if isinstance(model, Shape | Sequence) and not isinstance(model, str):
        raise ValueError("weights=: a model, a configuration or a name is needed, not shapes")
    if isinstance(model, str | PathLike):
        if (file := find_gguf(str(model))) is not None:
            from kvant.gguf.load import count_weight_nbytes as count_gguf_weights

            check_gguf_weights(file, weights)
            return count_gguf_weights(file)
        model = read_config(model)
    if not isinstance(model, torch.nn.Module):
        dtype = layer_shapes(model)[0].dtype
        model = make_meta_model(_make_config(model))
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return count_weight_nbytes(model, weights)


def _make_config(config: Any) -> Any:
    if not isinstance(config, Mapping):
        return config
    if "model_type" not in config:
        raise ValueError("weights=: the configuration has no model_type")
    from transformers import AutoConfig

    return AutoConfig.for_model(**config)


def find_default_context(model: Any) -> int:
    """Return the tokens at which formats are compared: 8192, or the model's context if shorter."""
    return min(DEFAULT_CONTEXT, max_context(model) or DEFAULT_CONTEXT)


def compute_share_of_raw(model: Any, spec: AnySpec) -> float:
    """Return the bytes of a cache, as a share of raw's, at the default context.

    A capacity of the spec may limit the context.
    """
    context = min(find_default_context(model), plan(model, spec).context)
    spec_nbytes, raw_nbytes = (plan(model, s, context=context).nbytes_kept for s in (spec, "raw"))
    return spec_nbytes / raw_nbytes


def _resolve_layers(model: Any, spec: AnySpec) -> tuple[tuple[LayerShape, ...], CacheSpec]:
    if isinstance(model, str | PathLike):
        model = read_config(model)
    if isinstance(model, Shape):  # its layers add nothing to the spec
        return model.layers, as_spec(spec, model.num_layers)
    has_shapes = isinstance(model, Sequence) and all(isinstance(s, LayerShape) for s in model)
    layers = tuple(model) if has_shapes else layer_shapes(model)
    return layers, fit_spec(layers, spec)


def _count_layer_nbytes(recipe: Recipe, layer: LayerShape, sequences: int, context: int) -> int:
    """Return the bytes that one layer allocates for `context` tokens."""
    if context == 0:
        return 0
    if isinstance(recipe, GroupSpec):
        return sum(_count_layer_nbytes(part, layer, sequences, context) for _, part in recipe.parts)
    if isinstance(recipe, RecurrentSpec):
        if not layer.recurs:
            raise SpecError("a recurrent recipe for a layer that attends: a LayerSpec is needed")
        return sequences * (layer.state_nbytes or 0)
    return (
        _count_row_nbytes(recipe, layer, sequences, context) if isinstance(recipe, LayerSpec) else 0
    )


def _count_row_nbytes(recipe: LayerSpec, layer: LayerShape, sequences: int, context: int) -> int:
    """Return the bytes of all rows: a layer that prunes holds them until the prompt ends."""
    per_table, tables = _split_geometry(recipe, layer)
    lengths = [context] * sequences * tables
    return pages_nbytes(per_table, recipe, make_layer_group(recipe), lengths)


def _split_geometry(recipe: LayerSpec, layer: LayerShape) -> tuple[Geometry, int]:
    """Return the geometry of one page table, and the tables of a sequence."""
    tables = layer.num_heads if has_per_head_tables(recipe) else 1
    geometry = _make_geometry(recipe, layer)
    return replace(geometry, heads=geometry.heads // tables), tables


def _count_token_nbytes(recipe: Recipe, layer: LayerShape) -> float:
    """Return the bytes of one more token in a layer without a window."""
    if isinstance(recipe, GroupSpec):
        return sum(_count_token_nbytes(part, layer) for _, part in recipe.parts)
    if not isinstance(recipe, LayerSpec) or recipe.retention.window is not None:
        return 0.0
    return _count_row(recipe, layer)


def _count_row(recipe: LayerSpec, layer: LayerShape) -> float:
    """Return the bytes of a row of all heads: sealed, unless the layer seals no pages."""
    geometry = _make_geometry(recipe, layer)
    page = geometry.sealed_nbytes(recipe) if recipe.seals else geometry.open_nbytes(recipe)
    return page / recipe.page


def _find_max_context(spec: CacheSpec) -> int:
    """Return the longest context that every capacity allows."""
    limits = (layer.capacity for layer in iterate_attention(*spec.layers))
    return min((limit for limit in limits if limit is not None), default=UNLIMITED_CONTEXT)


def _make_geometry(recipe: LayerSpec, layer: LayerShape) -> Geometry:
    dtype = recipe.dtype or layer.dtype
    dims = {"keys": layer.key_dim}
    if recipe.value_dim is None:
        dims["values"] = layer.value_dim
    dtypes = dict.fromkeys(dims, dtype)
    return Geometry(layer.num_heads, dims, dtypes, torch.device("meta"))
