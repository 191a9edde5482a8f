"""Which backend reads each layer of a cache, for `kvant.explain`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from kvant.attention import explain
from kvant.cache.cache import Cache
from kvant.cache.layers import PagedLayer
from kvant.recipes import (
    CacheSpec,
    EmptySpec,
    GroupSpec,
    LayerSpec,
    Recipe,
    RecurrentSpec,
    SharedSpec,
)
from kvant.spec import describe_spec


def explain_cache(cache: Cache) -> str:
    """Describe the format and the attention backend of each layer; merge equal lines."""
    texts = [_describe(recipe, cache.layers.get(i)) for i, recipe in enumerate(cache.spec.layers)]
    lines, first = [], 0
    for text, run in groupby(texts):
        stop = first + len(list(run))
        where = f"layer {first}" if stop == first + 1 else f"layers {first}-{stop - 1}"
        lines.append(f"{where}: {text}")
        first = stop
    return "\n".join(lines)


def _describe(recipe: Recipe, layer: Any) -> str:
    return DESCRIBE[type(recipe)](recipe, layer)


def _describe_attention(recipe: LayerSpec, layer: PagedLayer) -> str:
    layer_format = describe_spec(CacheSpec((recipe,)))
    if layer.storage is None:
        return f"{layer_format}; empty, so its backend is not known yet"
    explanation = explain(layer.view())
    refusals = "".join(f"; {name}: {reason}" for name, reason in explanation.refusals)
    return f"{layer_format}; {explanation.backend} reads it{refusals}"


def _describe_group(recipe: GroupSpec, layer: Any) -> str:
    parts = (f"{name}: {_describe(part, layer[name])}" for name, part in recipe.parts)
    return " and ".join(parts)


DESCRIBE: dict[type, Callable[[Any, Any], str]] = {
    LayerSpec: _describe_attention,
    GroupSpec: _describe_group,
    RecurrentSpec: lambda recipe, layer: "a recurrent state, read by the model",
    SharedSpec: lambda recipe, layer: f"reads the rows of layer {recipe.layer}",
    EmptySpec: lambda recipe, layer: "no cache",
}
