"""What the layers of a model remember, in numbers, and the recipes that follow from a spec.

A `LayerShape` describes one layer; a model is a tuple of them. A spec gives recipes to the layers
that attend, within what the model lets them see: so a window of the model's own is kept by any
spec, and nothing is stored for a layer that stores nothing. Where shapes come from, a configuration
or a host, is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

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

# Kinds of layers, in the words of transformers. Any other is one that only its host understands.
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, CONV = "linear_attention", "conv"
HYBRID, HYBRID_SLIDING = "hybrid", "hybrid_sliding"  # attention beside a recurrence, in one layer
EMPTY = "dummy"  # no memory of its own
CROSS = "cross_attention"  # rows of an image among the layers of a text: once, and not one a token
ATTENTION_KINDS = (FULL, SLIDING, CHUNKED, HYBRID, HYBRID_SLIDING)
RECURRENT_KINDS = (LINEAR, CONV, HYBRID, HYBRID_SLIDING)
WINDOWED_KINDS = (SLIDING, HYBRID_SLIDING)


class LayerInfo(Protocol):
    """What a spec has to know of a layer."""

    @property
    def attends(self) -> bool: ...
    @property
    def recurs(self) -> bool: ...
    @property
    def window(self) -> int | None:
        """How many positions the model lets a query see; a chunk counts as one."""

    @property
    def is_chunked(self) -> bool: ...
    @property
    def latent(self) -> int | None:
        """Channels of the compressed rows that keys and values unfold from."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer remembers: rows of every token, a state of fixed size, both, or nothing."""

    num_heads: int = 0  # of keys and values
    key_dim: int = 0
    value_dim: int = 0
    dtype: torch.dtype = torch.bfloat16  # of its rows: assumed, where nobody says
    kind: str = FULL
    window: int | None = None
    latent: int | None = None
    state_nbytes: int | None = 0  # of one sequence; None: nobody tells

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
class Shape:
    """A model whose layers all attend and are alike.

    >>> shape = kvant.Shape(num_layers=32, num_heads=8, key_dim=128, value_dim=128)
    >>> kvant.plan(shape, "raw").nbytes_per_token
    131072.0
    """

    num_layers: int
    num_heads: int  # of keys and values
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16  # assumed, where nobody says; a plan tells it

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        alike = LayerShape(self.num_heads, self.key_dim, self.value_dim, self.dtype)
        return (alike,) * self.num_layers


def fit_spec(layers: Sequence[LayerInfo], spec: AnySpec) -> CacheSpec:
    """One recipe a layer: the spec's for those that attend, within what the model lets them see.

    A CacheSpec has one recipe for each layer, as a file has, or for each that attends.
    """
    places = [index for index, layer in enumerate(layers) if layer.attends]
    if isinstance(spec, CacheSpec) and len(spec.layers) == len(layers):
        given: dict[int, Recipe] = dict(enumerate(as_spec(spec, len(layers)).layers))
    else:
        own = as_spec(spec, max(1, len(places))).layers  # it may be wrong where none attends, too
        given = dict(zip(places, own, strict=False))
    return CacheSpec(tuple(_make_recipe(layer, given.get(i)) for i, layer in enumerate(layers)))


def _make_recipe(layer: LayerInfo, recipe: Recipe | None) -> Recipe:
    parts = dict(recipe.parts) if isinstance(recipe, GroupSpec) else {}
    attention = (
        _make_attention_recipe(layer, parts.get("attention", recipe)) if layer.attends else None
    )
    told = parts.get("recurrence", recipe)
    recurrence = told if isinstance(told, RecurrentSpec) else RecurrentSpec()
    if attention is None:
        return recurrence if layer.recurs else EmptySpec()
    if layer.recurs:
        return GroupSpec((("attention", attention), ("recurrence", recurrence)))
    return attention


def _make_attention_recipe(layer: LayerInfo, recipe: Recipe | None) -> LayerSpec:
    if not isinstance(recipe, LayerSpec):
        raise SpecError(f"{recipe} for a layer that attends: a LayerSpec is needed")
    window, policy = layer.window, recipe.retention.window
    if window is not None:  # no sinks: the model would not see them beyond its window
        recipe = replace(recipe, retention=Window(min(window, policy or window)))
    chunk = window if layer.is_chunked else None
    if window is not None or chunk is not None or layer.latent is not None:
        recipe = replace(recipe, prune=None)  # these forget by themselves, or have no heads
    return replace(recipe, chunk=chunk, value_dim=layer.latent)
