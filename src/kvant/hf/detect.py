"""What a host's model remembers, layer by layer, and the recipes that follow from it.

Shapes are not asked of the configuration: they come with the first rows. The host's own classes
keep what is not keys and values: recurrences, convolutions, indexers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from kvant.errors import SpecError
from kvant.recipes import CacheSpec, EmptySpec, GroupSpec, LayerSpec, Recipe, RecurrentSpec
from kvant.retention import All, Window
from kvant.spec import as_spec

ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
HYBRID = ("hybrid", "hybrid_sliding")  # attention beside a recurrence, in one layer
RECURRENT = ("linear_attention", "conv")


@dataclass(frozen=True)
class HostLayer:
    """One layer, as the host describes it."""

    type: str
    options: Mapping[str, Any]  # of the host's own class for this type
    latent: int | None = None  # channels of the compressed rows that keys and values unfold from

    @property
    def attends(self) -> bool:
        return self.type in ATTENTION + HYBRID

    @property
    def recurs(self) -> bool:
        return self.type in RECURRENT + HYBRID

    @property
    def window(self) -> int | None:
        """How many positions the model lets a query see; a chunk counts as one."""
        return self.options.get("sliding_window")

    @property
    def chunked(self) -> bool:
        return self.type == "chunked_attention"


def host_layers(model: PreTrainedModel) -> tuple[HostLayer, ...]:
    """The layers of the decoder of a model."""
    if not model._supports_default_dynamic_cache():
        raise SpecError(
            f"{type(model).__name__} does not use the cache of transformers: its memory is its own"
        )
    config = model.config.get_text_config(decoder=True)
    types, options = get_layer_types_and_kwargs(config)
    unknown = sorted(set(types) - set(DYNAMIC_LAYER_TYPE_MAPPING))
    if unknown:
        raise SpecError(f"layers of {', '.join(unknown)}: this transformers cannot cache them")
    latents = _latents(model)
    layers = [
        HostLayer(kind, extra, latents.get(index))
        for index, (kind, extra) in enumerate(zip(types, options, strict=False))
    ]
    count = _decoder_layers(model.config, len(layers))
    return tuple(layers[:count] + layers[-1:] * (count - len(layers)))


def _decoder_layers(config: Any, count: int) -> int:
    """Layers of the decoder; of some encoder-decoders `count` is what the encoder has."""
    if not config.is_encoder_decoder:
        return count
    told = (getattr(config, name, None) for name in ("num_decoder_layers", "decoder_layers"))
    return next((number for number in told if number is not None), count)


def _latents(model: PreTrainedModel) -> dict[int, int]:
    """{layer: rank} of those that cache compressed rows and unfold them with `expand_kv`."""
    return {
        module.layer_idx: module.kv_lora_rank
        for module in model.modules()
        if callable(getattr(module, "expand_kv", None))
    }


def recipes(layers: tuple[HostLayer, ...], spec: str | LayerSpec | CacheSpec) -> CacheSpec:
    """One recipe a layer: the spec's for those that attend, within what the model lets them see.

    A CacheSpec of all layers is taken as it is: that is what a file holds.
    """
    if isinstance(spec, CacheSpec) and len(spec.layers) == len(layers):
        return as_spec(spec, len(layers))
    attending = [layer for layer in layers if layer.attends]
    if not attending:
        own: list[Recipe] = []
    else:
        own = list(as_spec(spec, len(attending)).layers)
    return CacheSpec(tuple(_recipe(layer, own) for layer in layers))


def _recipe(layer: HostLayer, own: list[Recipe]) -> Recipe:
    attention = _attention(layer, own.pop(0)) if layer.attends else None
    if attention is None:
        return RecurrentSpec() if layer.recurs else EmptySpec()
    if layer.recurs:
        return GroupSpec((("attention", attention), ("recurrence", RecurrentSpec())))
    return attention


def _attention(layer: HostLayer, recipe: Recipe) -> LayerSpec:
    if not isinstance(recipe, LayerSpec):
        raise SpecError(f"{recipe} for a layer of {layer.type}: a LayerSpec is needed")
    window, policy = layer.window, recipe.retention
    if window is not None and (policy.window is None or policy.window >= window):
        recipe = replace(recipe, retention=Window(window))
    elif window is not None:
        recipe = replace(recipe, retention=Window(policy.window or window, policy.sinks))
    chunk = window if layer.chunked else None
    return replace(recipe, chunk=chunk, value_dim=layer.latent)


def narrowed(layer: HostLayer, recipe: LayerSpec) -> bool:
    """Does the recipe let a query see less than the model would?"""
    window = recipe.retention.window
    return window is not None and (layer.window is None or window < layer.window)


def without_windows(spec: CacheSpec) -> CacheSpec:
    """The same formats for the rows of an encoder, which all stay."""
    layers = []
    for recipe in spec.layers:
        if not isinstance(recipe, LayerSpec) or recipe.retention.window is not None:
            raise SpecError(
                "a window on an encoder-decoder: its cross-attention needs every row of the "
                "encoder, and its decoders are short; leave the window out"
            )
        layers.append(replace(recipe, retention=All()))
    return CacheSpec(tuple(layers))
