"""From the layers that a host describes to memories of ours and layers in the host's list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, LinearAttentionLayer

from kvant.hf.context import Context
from kvant.hf.crossing import CrossLayer
from kvant.hf.detect import HostLayer
from kvant.hf.hybrid import HybridLayer
from kvant.hf.layers import AttentionLayer
from kvant.hf.recurrence import Recurrence
from kvant.recipes import CacheSpec, GroupSpec, RecurrentSpec
from kvant.shapes import CROSS


def recurrences(layers: Sequence[HostLayer], spec: CacheSpec) -> dict[str, Recurrence]:
    """States whose present a layer of the host's keeps, by the name of their memory."""
    found = {}
    for index, (layer, recipe) in enumerate(zip(layers, spec.layers, strict=True)):
        if layer.recurs:
            grouped = isinstance(recipe, GroupSpec)
            own = dict(recipe.parts)["recurrence"] if isinstance(recipe, GroupSpec) else recipe
            assert isinstance(own, RecurrentSpec)
            kind = LinearAttentionLayer if layer.attends else DYNAMIC_LAYER_TYPE_MAPPING[layer.type]
            kept = kind(number_of_states=layer.options.get("number_of_states", 1))
            found[f"{index}/recurrence" if grouped else str(index)] = Recurrence(own, kept)
    return found


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
