"""From the layers that a host describes to memories of ours and layers in the host's classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, LinearAttentionLayer

from kvant.cache import Cache
from kvant.contracts import LayerState
from kvant.hf.detect import HostLayer
from kvant.hf.layers import AttentionLayer, Context, HybridLayer
from kvant.hf.recurrence import Recurrence
from kvant.layers import Group, build
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, Recipe, RecurrentSpec


def memories(
    layers: Sequence[HostLayer], spec: CacheSpec, old: Cache | None = None
) -> dict[int, LayerState]:
    """Those whose present a layer of the host's keeps; it is the old one, where there is one."""
    return {
        index: _memory(layer, recipe, None if old is None else old[index])
        for index, (layer, recipe) in enumerate(zip(layers, spec.layers, strict=True))
        if layer.recurs
    }


def _memory(layer: HostLayer, recipe: Recipe, old: LayerState | None) -> LayerState:
    if isinstance(recipe, GroupSpec):
        parts = dict(recipe.parts)
        before = old["recurrence"] if isinstance(old, Group) else None
        recurrence = _memory(layer, parts["recurrence"], before)
        return Group({"attention": build(parts["attention"]), "recurrence": recurrence})
    if old is not None:
        return old
    assert isinstance(recipe, RecurrentSpec)
    kind = LinearAttentionLayer if layer.attends else DYNAMIC_LAYER_TYPE_MAPPING[layer.type]
    return Recurrence(recipe, kind(number_of_states=layer.options.get("number_of_states", 1)))


def host_layer(context: Context, index: int, layer: HostLayer, own: Any) -> Any:
    """What stands in the host's list of layers; `own` is one of its classes that exists already."""
    if layer.attends:
        kind = HybridLayer if layer.recurs else AttentionLayer
        return kind(context, index, layer)
    if layer.recurs:
        state = context.states[index]
        assert isinstance(state, Recurrence)
        return state.host
    return own or DYNAMIC_LAYER_TYPE_MAPPING[layer.type](**layer.options)


def foreign(layer: Any) -> bool:
    """Does only the host know what this layer holds?"""
    return not isinstance(layer, AttentionLayer | LinearAttentionLayer)


def widened(spec: CacheSpec, slack: int) -> CacheSpec:
    """The same cache, but able to go back `slack` rows exactly."""
    return CacheSpec(tuple(_widened(recipe, slack) for recipe in spec.layers))


def _widened(recipe: Any, slack: int) -> Any:
    if isinstance(recipe, GroupSpec):
        return GroupSpec(tuple((name, _widened(part, slack)) for name, part in recipe.parts))
    if isinstance(recipe, LayerSpec):
        return replace(recipe, slack=max(recipe.slack, slack))
    return recipe
