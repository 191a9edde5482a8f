"""Describe the state of each layer of a transformers model.

A description has no shapes: the cache takes them from the first keys and values. State other than
keys and values (recurrences, convolutions, indexers) stays in classes of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from kvant.errors import SpecError
from kvant.hf.model import takes_cache
from kvant.models.shapes import ATTENTION_KINDS, CHUNKED, CROSS, EMPTY, RECURRENT_KINDS, fit_spec
from kvant.recipes import AnySpec, CacheSpec, LayerSpec
from kvant.spec import parse

# In these models a forward of several tokens ignores the cached state, with the cache of
# transformers too (seen in 5.23). So after the first chunk they must read one token at a time.
UNCHUNKED_MODEL_TYPES = ("mamba", "falcon_mamba", "jamba", "zamba")

# Decoders with cross-attention that their configuration does not mention.
CROSS_ATTENTION_MODEL_TYPES = ("blip_text_model", "whisper")
# Decoders whose cross-attention reads decoder rows as encoder rows, from any cache.
BROKEN_CROSS_ATTENTION_MODEL_TYPES = ("big_bird",)

# Decoders whose decoded tokens attend to padding despite the mask (transformers 5.24). So their
# padding must be stored.
PADDING_VISIBLE_MODEL_TYPES = ("prophetnet",)


@dataclass(frozen=True)
class ModelLayer:
    """One layer, as transformers describes it."""

    type: str
    options: Mapping[str, Any]  # of the transformers cache layer of this type
    latent_width: int | None = None  # width of the latents that keys and values expand from
    model_has_gqa: bool = True  # some layer of the model has grouped queries

    @property
    def attends(self) -> bool:
        return self.type in ATTENTION_KINDS

    @property
    def recurs(self) -> bool:
        return self.type in RECURRENT_KINDS

    @property
    def is_opaque(self) -> bool:
        """Whether only transformers understands the state of the layer."""
        return not (self.attends or self.recurs or self.type == EMPTY)

    @property
    def window(self) -> int | None:
        """The attention window, or chunk size, of the model; None: all positions."""
        return self.options.get("sliding_window")

    @property
    def is_chunked(self) -> bool:
        return self.type == CHUNKED


def get_model_layers(model: PreTrainedModel) -> tuple[ModelLayer, ...]:
    """Return the layers of the decoder of a model."""
    if not model._supports_default_dynamic_cache():
        raise SpecError(
            f"{type(model).__name__} does not use the cache of transformers: kvant cannot replace "
            "its own; leave kvant out and call model.generate(...)"
        )
    if not takes_cache(model):
        raise SpecError(
            f"{type(model).__name__} keeps no cache: its forward takes none; leave kvant out and "
            "call model.generate(...)"
        )
    config = model.config.get_text_config(decoder=True)
    types, options = get_layer_types_and_kwargs(config)
    unknown = sorted(set(types) - set(DYNAMIC_LAYER_TYPE_MAPPING))
    if unknown:
        raise SpecError(
            f"layers of {', '.join(unknown)}: this version of transformers cannot cache them"
        )
    cross_layers = getattr(config, "cross_attention_layers", None) or ()
    types = [CROSS if index in cross_layers else name for index, name in enumerate(types)]
    latents = {module.layer_idx: module.kv_lora_rank for module in find_latent_modules(model)}
    has_gqa = any(getattr(module, "num_key_value_groups", 1) > 1 for module in model.modules())
    layers = [
        ModelLayer(layer_type, layer_options, latents.get(index), has_gqa)
        for index, (layer_type, layer_options) in enumerate(zip(types, options, strict=False))
    ]
    # If the decoder has another number of layers, cut the list or repeat its last layer.
    count = _count_decoder_layers(model.config, len(layers))
    return tuple(layers[:count] + layers[-1:] * (count - len(layers)))


def _count_decoder_layers(config: Any, count: int) -> int:
    """Return the number of decoder layers; `count` may be that of an encoder."""
    counts = (getattr(config, name, None) for name in ("num_decoder_layers", "decoder_layers"))
    return next((number for number in counts if number is not None), count)


def has_cross_attention(model: PreTrainedModel) -> bool:
    """Return whether the layers also read rows of an encoder."""
    config = model.config
    has_encoder = config.is_encoder_decoder or getattr(config, "add_cross_attention", False)
    return has_encoder or config.model_type in CROSS_ATTENTION_MODEL_TYPES


def supports_chunked_prefill(model: PreTrainedModel) -> bool:
    """Return whether a forward of several tokens continues from the cached state."""
    return model.config.model_type not in UNCHUNKED_MODEL_TYPES


def hides_padding(model: PreTrainedModel) -> bool:
    """Return whether decoded tokens do not attend to padding, so that it need not be stored."""
    return model.config.model_type not in PADDING_VISIBLE_MODEL_TYPES


def find_latent_modules(model: PreTrainedModel) -> Iterator[Any]:
    """Return the modules that cache latents and expand them with `expand_kv`."""
    return (m for m in model.modules() if callable(getattr(m, "expand_kv", None)))


def make_cache_spec(layers: tuple[ModelLayer, ...], spec: AnySpec) -> CacheSpec:
    """Fit a spec to the layers of a model, as `kvant.plan` does."""
    cache_spec = fit_spec(layers, spec)
    if isinstance(spec, str) and not any(layer.attends for layer in layers):
        _check_format_applies(spec, layers)
    return cache_spec


def _check_format_applies(spec: str, layers: tuple[ModelLayer, ...]) -> None:
    """Refuse a format for a model without keys and values."""
    if parse(spec, 1) != parse("raw", 1):
        types = ", ".join(sorted({layer.type for layer in layers}))
        raise SpecError(
            f"spec {short(spec)} formats keys and values, but no layer of this model has any "
            f"({types}): recurrent states are stored as they are; allowed: raw; nearest: raw"
        )


def is_window_narrowed(layer: ModelLayer, recipe: LayerSpec) -> bool:
    """Return whether the window of the recipe is narrower than that of the model."""
    window = recipe.retention.window
    return window is not None and (layer.window is None or window < layer.window)


def check_cross_attention(model: PreTrainedModel, spec: CacheSpec) -> None:
    """Refuse specs and models for which cross-attention would read wrong rows."""
    if model.config.model_type in BROKEN_CROSS_ATTENTION_MODEL_TYPES:
        raise SpecError(
            f"{type(model).__name__} with add_cross_attention reads decoder rows as encoder rows "
            "from any cache: generate with use_cache=False"
        )
    for index, recipe in enumerate(spec.layers):
        window = recipe.retention.window if isinstance(recipe, LayerSpec) else None
        if window is not None:
            raise SpecError(
                f"layer {index}: window={window} on a model that reads an encoder, whose "
                "cross-attention needs every row; leave the window out"
            )
