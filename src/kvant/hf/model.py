"""Find the transformers model that a user passes; describe its layers, forward and weights."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from kvant.errors import SpecError
from kvant.models.shapes import CROSS, EMPTY, LayerInfo, fit_spec
from kvant.recipes import AnySpec, CacheSpec, LayerSpec
from kvant.spec import parse
from kvant.weights.packing import named_weights

PLAIN_TYPES = (bool, int, float, str)
# transformers leaves this hook and this attribute on a module once hidden states were requested;
# they change nothing.
CAPTURING_HOOKS_MODULE = "transformers.utils.output_capturing"
CAPTURING_ATTRIBUTE = "_output_capturing_hooks_installed"
# Attributes of every module, and those that change nothing.
IGNORED_ATTRIBUTES = frozenset({*vars(nn.Module()), CAPTURING_ATTRIBUTE})


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules as `nn.Module.named_modules` does, but faster."""
    modules, visited = [], set[int]()
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        modules.append((name, module))
        children = [(key, child) for key, child in module._modules.items() if child is not None]
        stack += [(f"{name}.{key}" if name else key, child) for key, child in reversed(children)]
    return modules


def named_attributes(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the names and values of the attributes of all modules."""
    attributes = (item for _, module in named_modules(model) for item in vars(module).items())
    return [(name, value) for name, value in attributes if name not in IGNORED_ATTRIBUTES]


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks may change what a module computes."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", None) != CAPTURING_HOOKS_MODULE for hook in hooks)


@contextmanager
def restore_modules(model: nn.Module) -> Iterator[None]:
    """Restore the attributes and buffers of all modules after the context, including training mode.

    In-place changes to a tensor, a list or a dictionary are not undone.
    """
    modules = [module for _, module in named_modules(model)]
    saved = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    try:
        yield
    finally:
        for module, attributes, buffers in saved:
            for name in vars(module).keys() - attributes:
                del module.__dict__[name]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def make_comparable(value: Any) -> object:
    """Return a number or string as it is, a container as a tuple of them, None for other types.

    Keys of stored results contain these values, so that a changed attribute changes the key.
    """
    if isinstance(value, PLAIN_TYPES):
        return value
    if isinstance(value, Mapping):
        return tuple((key, item) for key, item in value.items() if isinstance(item, PLAIN_TYPES))
    if isinstance(value, list | tuple):
        return tuple(item for item in value if isinstance(item, PLAIN_TYPES))
    if isinstance(value, set | frozenset):
        return tuple(sorted((item for item in value if isinstance(item, PLAIN_TYPES)), key=repr))
    return None


def unwrap_model(model: Any) -> PreTrainedModel | None:
    """Return the transformers model inside wrappers of torch.compile or peft, else None.

    `generate` never calls the forward that torch.compile compiled. kvant's own loop
    runs the inner model uncompiled too.
    """
    while not isinstance(model, PreTrainedModel):
        inner = _get_wrapped_model(model) if isinstance(model, nn.Module) else None
        if inner is None or inner is model:
            return None
        model = inner
    return model


def get_transformers_model(model: Any) -> PreTrainedModel:
    """Return the transformers model, or raise a TypeError that tells what is needed."""
    if isinstance(model, str):
        raise TypeError(
            f"{short(model)} is the name of a model: load it with "
            "AutoModelForCausalLM.from_pretrained(name)"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{type(model).__name__} is no model: load one first; to compute the size "
            "of a cache from a configuration, use kvant.plan(config, spec)"
        )
    hf_model = unwrap_model(model)
    if hf_model is None:
        raise TypeError(
            f"{type(model).__name__} is neither a transformers model nor one wrapped by "
            "torch.compile or peft: give the model inside, or use kvant.Cache(num_layers, spec)"
        )
    return hf_model


def _get_wrapped_model(model: Any) -> Any:
    """Return the model inside a wrapper of peft or torch.compile, else None."""
    base = getattr(model, "get_base_model", None)
    if not callable(base):
        return getattr(model, "_orig_mod", None)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise TypeError(
            f"{type(model).__name__} adds a learnt prompt, which kvant does not support: use "
            "a weight adapter such as LoRA, or the model without the prompt, from "
            "model.get_base_model()"
        )
    return base()


def list_generating_parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the model, and its parts that have a `generate` of their own."""
    modules = (module for module in model.modules() if module is not model)
    parts = (module for module in modules if isinstance(module, PreTrainedModel))
    return [model, *(part for part in parts if part.can_generate())]


NAMED_PARAMETER_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# The name since transformers 5.24, the older name, and the older name in Mamba models.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


def get_cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the cache argument of the forward and of `generate`."""
    names = get_forward_arguments(model)
    return next((name for name in CACHE_ARGUMENTS if name in names), CACHE_ARGUMENTS[0])


def get_forward_arguments(model: PreTrainedModel) -> set[str]:
    """Return the names of a forward's arguments, also those that it passes on to base classes."""
    return _collect_argument_names(model.forward, *_list_forwards(type(model)))


def takes_cache(model: PreTrainedModel) -> bool:
    """Return whether the forward of the model's class, or of a part that generates, takes a cache.

    A forward with only `*args, **kwargs` counts too: it may pass a cache on.
    """
    part_classes = {type(part) for part in list_generating_parts(model)}
    arguments = [_collect_argument_names(*_list_forwards(part)) for part in part_classes]
    return any(not names or names & set(CACHE_ARGUMENTS) for names in arguments)


def _collect_argument_names(*forwards: Callable[..., Any]) -> set[str]:
    """Return the names of the arguments that the first forward accepts.

    A forward with `**kwargs` passes them on to the next forward, whose arguments count too.
    """
    names = set[str]()
    for forward in forwards:
        parameters = inspect.signature(forward).parameters.values()
        names |= {p.name for p in parameters if p.kind in NAMED_PARAMETER_KINDS}
        names.discard("self")
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return names


def _list_forwards(model_class: type[nn.Module]) -> list[Callable[..., Any]]:
    """Return the forward of a class and those of its bases, in the order of `super()`."""
    return [vars(base)["forward"] for base in model_class.__mro__ if "forward" in vars(base)]


def list_required_inputs(model: PreTrainedModel) -> list[str]:
    """List the arguments besides tokens that every forward of a model requires."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [p.name for p in named if p.default is p.empty and p.name != "input_ids"]


def find_text_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the model or its first generating part that needs only tokens; None if none does."""
    return next(
        (part for part in list_generating_parts(model) if not list_required_inputs(part)), None
    )


def get_text_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that continues text, or raise a TypeError."""
    text_model = find_text_model(model)
    if text_model is None:
        raise TypeError(
            f"{_describe_required_inputs(model)}, and no part of it continues tokens alone"
        )
    return text_model


def check_text_model(model: PreTrainedModel) -> None:
    """Refuse a model that needs more than tokens, and name its part that does not."""
    if list_required_inputs(model):
        part = get_text_model(model)
        name = next(name for name, module in model.named_modules() if module is part)
        raise TypeError(
            f"{_describe_required_inputs(model)}: give the part that continues text, model.{name}"
        )


def _describe_required_inputs(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} needs {', '.join(list_required_inputs(model))} in every forward"


NUM_SAMPLED_VALUES = 16  # per weight


def compute_model_fingerprint(model: PreTrainedModel) -> str:
    """Hash the names, shapes, dtypes and some values of the weights, and the RoPE settings.

    The device does not change the hash.
    """
    text_config = model.config.get_text_config(decoder=True)
    rope = repr(getattr(text_config, "rope_parameters", None))
    sha = hashlib.sha256(json.dumps(rope).encode())
    for name, weight in named_weights(model):
        sha.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        sha.update(_sample_values(weight).numpy().tobytes())
    return sha.hexdigest()[:32]


@torch.no_grad()
def _sample_values(weight: Tensor) -> Tensor:
    """Return evenly spaced values of a weight on the CPU; none for a weight on meta."""
    if weight.is_meta or weight.numel() == 0:
        return torch.empty(0, dtype=torch.float64)
    offsets = torch.linspace(0, weight.numel() - 1, NUM_SAMPLED_VALUES, dtype=torch.float64).long()
    indices = torch.unravel_index(offsets.to(weight.device), weight.shape)
    return weight.detach()[indices].cpu().double()


# In these models a forward of several tokens ignores the cached state, with any cache (seen in
# transformers 5.23). So after the first chunk they must read one token at a time.
UNCHUNKED_MODEL_TYPES = ("mamba", "falcon_mamba", "jamba", "zamba")

# Names, in configurations, of the number of decoder layers.
DECODER_LAYER_COUNTS = ("num_decoder_layers", "decoder_layers")
# Decoders with cross-attention that their configuration does not mention.
CROSS_ATTENTION_MODEL_TYPES = ("blip_text_model", "whisper")
# Decoders whose cross-attention reads decoder rows in place of encoder rows, with any cache.
BROKEN_CROSS_ATTENTION_MODEL_TYPES = ("big_bird",)

# Decoders whose decoded tokens attend to padding despite the mask (transformers 5.24). So their
# padding must be stored.
PADDING_VISIBLE_MODEL_TYPES = ("prophetnet",)


@dataclass(frozen=True)
class ModelLayer(LayerInfo):
    """One layer, as transformers describes it."""

    options: Mapping[str, Any]  # arguments of the transformers cache layer of this kind
    model_has_gqa: bool = True  # some layer of the model has grouped queries

    @property
    def is_opaque(self) -> bool:
        """Whether only transformers understands the state of the layer."""
        return not (self.attends or self.recurs or self.kind == EMPTY)


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
        ModelLayer(
            layer_options,
            has_gqa,
            kind=kind,
            window=layer_options.get("sliding_window"),
            latent_width=latents.get(index),
        )
        for index, (kind, layer_options) in enumerate(zip(types, options, strict=False))
    ]
    # transformers may list the layers of the encoder. If the decoder has another number of layers,
    # cut the list or repeat its last layer.
    counts = (getattr(model.config, name, None) for name in DECODER_LAYER_COUNTS)
    count = next((number for number in counts if number is not None), len(layers))
    return tuple(layers[:count] + layers[-1:] * (count - len(layers)))


def has_cross_attention(model: PreTrainedModel) -> bool:
    """Return whether the layers also read rows of an encoder."""
    config = model.config
    has_encoder = config.is_encoder_decoder or getattr(config, "add_cross_attention", False)
    return has_encoder or config.model_type in CROSS_ATTENTION_MODEL_TYPES


def supports_chunked_prefill(model: PreTrainedModel) -> bool:
    """Return whether a forward of several tokens continues from the cached state."""
    return model.config.model_type not in UNCHUNKED_MODEL_TYPES


def ignores_padding(model: PreTrainedModel) -> bool:
    """Return whether decoded tokens ignore padding, so that it need not be stored."""
    return model.config.model_type not in PADDING_VISIBLE_MODEL_TYPES


def find_latent_modules(model: PreTrainedModel) -> Iterator[Any]:
    """Return the attention modules (MLA) that cache latents, and expand them with `expand_kv`."""
    return (m for m in model.modules() if callable(getattr(m, "expand_kv", None)))


def make_cache_spec(layers: tuple[ModelLayer, ...], spec: AnySpec) -> CacheSpec:
    """Fit a spec to the layers of a model, as `kvant.plan` does.

    Refuse a format of keys and values for a model that has none.
    """
    cache_spec = fit_spec(layers, spec)
    has_rows = any(layer.attends for layer in layers)
    if isinstance(spec, str) and not has_rows and parse(spec, 1) != parse("raw", 1):
        types = ", ".join(sorted({layer.kind for layer in layers}))
        raise SpecError(
            f"spec {short(spec)} formats keys and values, but no layer of this model has any: "
            f"recurrent states ({types}) are stored as they are; allowed: raw; nearest: raw"
        )
    return cache_spec


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
                f"layer {index}: window={window} on a model that reads an encoder: "
                "cross-attention needs every row; leave the window out"
            )


class TokenForward:
    """Call a model for logits, with the argument names of its forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._cache_argument = get_cache_argument(model)
        names = get_forward_arguments(model)
        self.takes_positions = "position_ids" in names
        self._takes_logits_to_keep = "logits_to_keep" in names

    def __call__(
        self, ids: Tensor, positions: Tensor, cache: Any, num_logits: int = 1, **options: Any
    ) -> Tensor:
        """Return logits [sequences, >= num_logits, vocabulary] of `ids` [sequences, tokens].

        With `cache=None` nothing is cached. `options` are further arguments of the forward.
        """
        if self._takes_logits_to_keep:
            options["logits_to_keep"] = num_logits
        return cast(Tensor, self.run(ids, positions, cache, **options).logits)

    def run(self, ids: Tensor, positions: Tensor, cache: Any, **options: Any) -> Any:
        """Run a forward; return the model's output object."""
        arguments: dict[str, Any] = {self._cache_argument: cache, "use_cache": cache is not None}
        if self.takes_positions:
            arguments["position_ids"] = positions
        return self.model(input_ids=ids, **arguments, **options)


def get_model_without_head(model: PreTrainedModel) -> PreTrainedModel:
    """Return the base model, whose output is the last hidden states."""
    base: PreTrainedModel = model.base_model
    if base is not model:
        return base
    # Text models of Mllama and Llama 4 have a `base_model_prefix` that names an attribute of the
    # outer model only, so their `base_model` is the text model itself.
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise TypeError(
            f"{type(model).__name__}: embeddings of this architecture are not supported"
        )
    return parts[0]


def get_hidden_width(model: PreTrainedModel) -> int:
    """Return the number of channels of a hidden state after the last norm."""
    return int(model.get_output_embeddings().weight.shape[-1])


def is_bidirectional(model: PreTrainedModel) -> bool:
    """Return whether attention is bidirectional, which no KV cache supports."""
    config = model.config.get_text_config(decoder=True)
    sees_all = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    return sees_all or not getattr(config, "is_causal", True)
