"""From the layers that a host describes to memories of ours and layers in the host's list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, LinearAttentionLayer

from kvant.contracts import LayerState
from kvant.hf.context import Context
from kvant.hf.crossing import CrossLayer
from kvant.hf.detect import HostLayer
from kvant.hf.hybrid import HybridLayer
from kvant.hf.layers import AttentionLayer
from kvant.hf.recurrence import Recurrence
from kvant.layers import Group, build
from kvant.recipes import CacheSpec, GroupSpec, RecurrentSpec
from kvant.shapes import CROSS


def memories(layers: Sequence[HostLayer], spec: CacheSpec) -> dict[int, LayerState]:
    """Those whose present a layer of the host's keeps."""
    pairs = enumerate(zip(layers, spec.layers, strict=True))
    return {index: _memory(layer, recipe) for index, (layer, recipe) in pairs if layer.recurs}


def _memory(layer: HostLayer, recipe: Any) -> LayerState:
    if isinstance(recipe, GroupSpec):
        parts = dict(recipe.parts)
        recurrence = _memory(layer, parts["recurrence"])
        return Group({"attention": build(parts["attention"]), "recurrence": recurrence})
    assert isinstance(recipe, RecurrentSpec)
    kind = LinearAttentionLayer if layer.attends else DYNAMIC_LAYER_TYPE_MAPPING[layer.type]
    return Recurrence(recipe, kind(number_of_states=layer.options.get("number_of_states", 1)))


def layer_for(context: Context, index: int, layer: HostLayer, own: Any) -> Any:
    """What stands in the host's list; `own` is one of the host's classes that exists already."""
    if layer.attends:
        kind = HybridLayer if layer.recurs else AttentionLayer
        return kind(context, index, layer)
    if layer.recurs:
        state = context.states[index]
        assert isinstance(state, Recurrence)
        return state.layer
    if layer.type == CROSS:
        return own or CrossLayer(context, index)
    return own or DYNAMIC_LAYER_TYPE_MAPPING[layer.type](**layer.options)
