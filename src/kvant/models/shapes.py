"""The cached sizes of the layers of a model, and the recipes of a spec for them.

A `LayerShape` describes one layer; a model is a tuple of them. `fit_spec` gives each layer a
recipe, within the limits of the model: no window is wider than the model's, and a layer without a
cache gets an `EmptySpec`. Shapes may come from a configuration or from a loaded model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvant.errors import SpecError
from kvant.recipes import (
    AnySpec,
    CacheSpec,
    EmptySpec,
    GroupSpec,
    LayerSpec,
    Recipe,
    RecurrentSpec,
)
from kvant.retention import Window
from kvant.spec import as_spec

# Kinds of layers, as transformers names them. Other kinds are handled by transformers alone.
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, CONV = "linear_attention", "conv"
HYBRID, HYBRID_SLIDING = "hybrid", "hybrid_sliding"  # attention and a recurrence in one layer
EMPTY = "dummy"  # no cache
CROSS = "cross_attention"  # rows of an image, independent of the number of tokens
ATTENTION_KINDS = (FULL, SLIDING, CHUNKED, HYBRID, HYBRID_SLIDING)
RECURRENT_KINDS = (LINEAR, CONV, HYBRID, HYBRID_SLIDING)
WINDOWED_KINDS = (SLIDING, HYBRID_SLIDING)


@dataclass(frozen=True, kw_only=True)
class LayerInfo:
    """The properties of a layer that a spec depends on."""

    kind: str = FULL
    window: int | None = None  # newest rows that a query sees; if `is_chunked`, rows of a chunk
    latent_width: int | None = None  # of the rows that keys and values are computed from (MLA)

    @property
    def attends(self) -> bool:
        return self.kind in ATTENTION_KINDS

    @property
    def recurs(self) -> bool:
        return self.kind in RECURRENT_KINDS

    @property
    def is_chunked(self) -> bool:
        return self.kind == CHUNKED


@dataclass(frozen=True)
class LayerShape(LayerInfo):
    """The cached sizes of one layer: rows per token, a state of fixed size, both, or none."""

    num_heads: int = 0  # of keys and values
    key_dim: int = 0
    value_dim: int = 0
    dtype: torch.dtype = torch.bfloat16  # of its rows; a default if undeclared
    state_nbytes: int | None = 0  # per sequence; None: unknown


@dataclass(frozen=True)
class Shape:
    """A model of equal attention layers.

    >>> shape = kvant.Shape(num_layers=32, num_heads=8, key_dim=128, value_dim=128)
    >>> kvant.plan(shape, "raw").nbytes_per_token
    131072.0
    """

    num_layers: int
    num_heads: int  # of keys and values
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16  # the default; a plan reports it

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        alike = LayerShape(self.num_heads, self.key_dim, self.value_dim, self.dtype)
        return (alike,) * self.num_layers


def fit_spec(layers: Sequence[LayerInfo], spec: AnySpec) -> CacheSpec:
    """Return one recipe per layer: those of `spec` for attention, within the limits of the model.

    A CacheSpec has one recipe for each layer, as files do, or one for each attention layer.
    """
    attention_layers = [index for index, layer in enumerate(layers) if layer.attends]
    if isinstance(spec, CacheSpec) and len(spec.layers) == len(layers):
        recipes: dict[int, Recipe] = dict(enumerate(as_spec(spec, len(layers)).layers))
    else:
        attention_recipes = as_spec(
            spec, max(1, len(attention_layers))
        ).layers  # validated even without attention layers
        recipes = dict(zip(attention_layers, attention_recipes, strict=False))
    return CacheSpec(tuple(_make_recipe(layer, recipes.get(i)) for i, layer in enumerate(layers)))


def _make_recipe(layer: LayerInfo, recipe: Recipe | None) -> Recipe:
    """Return the recipe of a layer; `recipe` is what the spec has for it, or None."""
    parts = dict(recipe.parts) if isinstance(recipe, GroupSpec) else {}
    attention = (
        _make_attention_recipe(layer, parts.get("attention", recipe)) if layer.attends else None
    )
    recurrent = parts.get("recurrence", recipe)
    recurrence = recurrent if isinstance(recurrent, RecurrentSpec) else RecurrentSpec()
    if attention is None:
        return recurrence if layer.recurs else EmptySpec()
    if layer.recurs:
        return GroupSpec((("attention", attention), ("recurrence", recurrence)))
    return attention


def _make_attention_recipe(layer: LayerInfo, recipe: Recipe | None) -> LayerSpec:
    if not isinstance(recipe, LayerSpec):
        raise SpecError(f"{recipe} for an attention layer: a LayerSpec is needed")
    window, policy = layer.window, recipe.retention.window
    if window is not None:  # without sinks: the model masks them
        recipe = replace(recipe, retention=Window(min(window, policy or window)))
    chunk = window if layer.is_chunked else None
    if window is not None or chunk is not None or layer.latent_width is not None:
        recipe = replace(recipe, prune=None)  # the window bounds rows; latents have no key heads
    return replace(recipe, chunk=chunk, value_dim=layer.latent_width)
