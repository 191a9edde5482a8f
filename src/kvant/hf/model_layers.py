"""What a host's model remembers, layer by layer.

Shapes are not asked of the configuration: they come with the first rows. The host's own classes
keep what is not keys and values: recurrences, convolutions, indexers.
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

# Their forwards of several tokens begin anew, whatever state there is (seen in 5.23, where the
# host's own cache gives the same wrong logits): behind other tokens they take one at a time.
UNCHUNKED_MODEL_TYPES = ("mamba", "falcon_mamba", "jamba", "zamba")

# Decoders whose layers read an encoder by themselves, and whose configuration does not say so.
CROSS_ATTENTION_MODEL_TYPES = ("blip_text_model", "whisper")
# Theirs takes rows of its own for those of the encoder, in the host's cache as well.
BROKEN_CROSS_ATTENTION_MODEL_TYPES = ("big_bird",)

# Their decoded tokens see padding, whatever the mask says (5.24): it has to be stored.
PADDING_VISIBLE_MODEL_TYPES = ("prophetnet",)


@dataclass(frozen=True)
class ModelLayer:
    """One layer, as the host describes it."""

    type: str
    options: Mapping[str, Any]  # of the host's own class for this type
    latent: int | None = None  # channels of the compressed rows that keys and values unfold from
    model_has_gqa: bool = True  # the model has grouped queries, which the host packs for one token

    @property
    def attends(self) -> bool:
        return self.type in ATTENTION_KINDS

    @property
    def recurs(self) -> bool:
        return self.type in RECURRENT_KINDS

    @property
    def is_opaque(self) -> bool:
        """Does only the host know what it holds?"""
        return not (self.attends or self.recurs or self.type == EMPTY)

    @property
    def window(self) -> int | None:
        """How many positions the model lets a query see; a chunk counts as one."""
        return self.options.get("sliding_window")

    @property
    def is_chunked(self) -> bool:
        return self.type == CHUNKED


def get_model_layers(model: PreTrainedModel) -> tuple[ModelLayer, ...]:
    """The layers of the decoder of a model."""
    if not model._supports_default_dynamic_cache():
        raise SpecError(
            f"{type(model).__name__} does not use the cache of transformers: its memory is its own"
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
        raise SpecError(f"layers of {', '.join(unknown)}: this transformers cannot cache them")
    crossed = getattr(config, "cross_attention_layers", None) or ()
    types = [CROSS if index in crossed else kind for index, kind in enumerate(types)]
    latents = {module.layer_idx: module.kv_lora_rank for module in find_latent_modules(model)}
    packs = any(getattr(module, "num_key_value_groups", 1) > 1 for module in model.modules())
    layers = [
        ModelLayer(kind, extra, latents.get(index), packs)
        for index, (kind, extra) in enumerate(zip(types, options, strict=False))
    ]
    count = _count_decoder_layers(model.config, len(layers))
    return tuple(layers[:count] + layers[-1:] * (count - len(layers)))


def _count_decoder_layers(config: Any, count: int) -> int:
    """Layers of the decoder; where there was an encoder, `count` may be what that has."""
    told = (getattr(config, name, None) for name in ("num_decoder_layers", "decoder_layers"))
    return next((number for number in told if number is not None), count)


def has_cross_attention(model: PreTrainedModel) -> bool:
    """Do its layers read rows of an encoder, too?"""
    config = model.config
    told = config.is_encoder_decoder or getattr(config, "add_cross_attention", False)
    return told or config.model_type in CROSS_ATTENTION_MODEL_TYPES


def supports_chunked_prefill(model: PreTrainedModel) -> bool:
    """Does a forward of several tokens go on from what the cache holds?"""
    return model.config.model_type not in UNCHUNKED_MODEL_TYPES


def hides_padding(model: PreTrainedModel) -> bool:
    """Return whether decoded tokens see no padding, so that none needs to be stored."""
    return model.config.model_type not in PADDING_VISIBLE_MODEL_TYPES


def find_latent_modules(model: PreTrainedModel) -> Iterator[Any]:
    """The modules that cache compressed rows and unfold them with `expand_kv`."""
    return (m for m in model.modules() if callable(getattr(m, "expand_kv", None)))


def make_cache_spec(layers: tuple[ModelLayer, ...], spec: AnySpec) -> CacheSpec:
    """One recipe a layer: the spec's for those that attend, as a plan has them too."""
    full = fit_spec(layers, spec)
    if isinstance(spec, str) and not any(layer.attends for layer in layers):
        _check_format_applies(spec, layers)
    return full


def _check_format_applies(spec: str, layers: tuple[ModelLayer, ...]) -> None:
    """Who asks in words for a format, and would get none of it, is told so."""
    if parse(spec, 1) != parse("raw", 1):
        kinds = ", ".join(sorted({layer.type for layer in layers}))
        raise SpecError(
            f"spec {short(spec)} says how keys and values are stored, and no layer of this model "
            f"has any ({kinds}): its states stay as they are; allowed: raw; nearest: raw"
        )


def narrows_window(layer: ModelLayer, recipe: LayerSpec) -> bool:
    """Does the recipe let a query see less than the model would?"""
    window = recipe.retention.window
    return window is not None and (layer.window is None or window < layer.window)


def check_cross_attention(model: PreTrainedModel, spec: CacheSpec) -> None:
    """Cross-attention needs every row of the encoder, and rows that lie apart."""
    if model.config.model_type in BROKEN_CROSS_ATTENTION_MODEL_TYPES:
        raise SpecError(
            f"{type(model).__name__} with add_cross_attention takes cached rows of its own for "
            "those of the encoder, in any cache: generate with use_cache=False"
        )
    for index, recipe in enumerate(spec.layers):
        window = recipe.retention.window if isinstance(recipe, LayerSpec) else None
        if window is not None:
            raise SpecError(
                f"layer {index}: window={window} on a model that reads an encoder, of which its "
                "cross-attention needs every row; leave the window out"
            )
