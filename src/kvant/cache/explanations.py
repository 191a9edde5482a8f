"""Which backend reads each layer of a cache, for `kvant.explain`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from kvant.attention import explain
from kvant.cache.cache import Cache
from kvant.cache.layer import PagedLayer
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
    """Describe how each layer is stored and by what it is read, alike layers in one line."""
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
    stored = describe_spec(CacheSpec((recipe,)))
    if layer.storage is None:
        return f"{stored}; empty, so what reads it is not known yet"
    found = explain(layer.view())
    refused = "".join(f"; {name}: {reason}" for name, reason in found.refusals)
    return f"{stored}; {found.backend} reads it{refused}"


def _describe_group(recipe: GroupSpec, layer: Any) -> str:
    parts = (f"{name}: {_describe(part, layer[name])}" for name, part in recipe.parts)
    return " beside ".join(parts)


DESCRIBE: dict[type, Callable[[Any, Any], str]] = {
    LayerSpec: _describe_attention,
    GroupSpec: _describe_group,
    RecurrentSpec: lambda recipe, layer: "a state, which the model reads itself",
    SharedSpec: lambda recipe, layer: f"reads the rows of layer {recipe.layer}",
    EmptySpec: lambda recipe, layer: "remembers nothing",
}
