"""What a host's model remembers, layer by layer, and the recipes that follow from it.

Shapes are not asked of the configuration: they come with the first rows. The host's own classes
keep what is not keys and values: recurrences, convolutions, indexers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from kvant.errors import SpecError
from kvant.recipes import CacheSpec, EmptySpec, GroupSpec, LayerSpec, Recipe, RecurrentSpec
from kvant.retention import Window
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
    def foreign(self) -> bool:
        """Does only the host know what it holds?"""
        return not (self.attends or self.recurs or self.type == "dummy")

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
    latents = {module.layer_idx: module.kv_lora_rank for module in unfolding(model)}
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


def unfolding(model: PreTrainedModel) -> Iterator[Any]:
    """The modules that cache compressed rows and unfold them with `expand_kv`."""
    return (m for m in model.modules() if callable(getattr(m, "expand_kv", None)))


def recipes(layers: tuple[HostLayer, ...], spec: str | LayerSpec | CacheSpec) -> CacheSpec:
    """One recipe a layer: the spec's for those that attend, within what the model lets them see.

    A CacheSpec has one recipe for each layer, as a file has, or for each that attends.
    """
    places = [index for index, layer in enumerate(layers) if layer.attends]
    if isinstance(spec, CacheSpec) and len(spec.layers) == len(layers):
        given: dict[int, Recipe] = dict(enumerate(as_spec(spec, len(layers)).layers))
    else:
        own = as_spec(spec, len(places)).layers if places else ()
        given = dict(zip(places, own, strict=True))
    return CacheSpec(tuple(_recipe(layer, given.get(i)) for i, layer in enumerate(layers)))


def _recipe(layer: HostLayer, given: Recipe | None) -> Recipe:
    parts = dict(given.parts) if isinstance(given, GroupSpec) else {}
    attention = _attention(layer, parts.get("attention", given)) if layer.attends else None
    told = parts.get("recurrence", given)
    recurrence = told if isinstance(told, RecurrentSpec) else RecurrentSpec()
    if attention is None:
        return recurrence if layer.recurs else EmptySpec()
    if layer.recurs:
        return GroupSpec((("attention", attention), ("recurrence", recurrence)))
    return attention


def _attention(layer: HostLayer, recipe: Recipe | None) -> LayerSpec:
    if not isinstance(recipe, LayerSpec):
        raise SpecError(f"{recipe} for a layer of {layer.type}: a LayerSpec is needed")
    window, policy = layer.window, recipe.retention.window
    if window is not None:  # no sinks: the model would not see them beyond its window
        recipe = replace(recipe, retention=Window(min(window, policy or window)))
    chunk = window if layer.chunked else None
    return replace(recipe, chunk=chunk, value_dim=layer.latent)


def narrows(layer: HostLayer, recipe: LayerSpec) -> bool:
    """Does the recipe let a query see less than the model would?"""
    window = recipe.retention.window
    return window is not None and (layer.window is None or window < layer.window)


def check_unwindowed(spec: CacheSpec) -> None:
    """An encoder-decoder's cross-attention needs every row of the encoder."""
    for index, recipe in enumerate(spec.layers):
        window = recipe.retention.window if isinstance(recipe, LayerSpec) else None
        if window is not None:
            raise SpecError(
                f"layer {index}: window={window} on an encoder-decoder, whose cross-attention "
                "needs every row of the encoder; leave the window out"
            )
