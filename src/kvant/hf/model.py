"""Find the transformers model that a user passes, and describe its forward and weights."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvant.weights import named_weights


def unwrap_model(model: Any) -> PreTrainedModel | None:
    """Return the transformers model inside wrappers of torch.compile or peft; None inside others.

    `generate` of transformers never calls the forward that torch.compile compiled.
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
            f"{short(model)} is the name of a model: the loaded one is needed, "
            "AutoModelForCausalLM.from_pretrained(name)"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{type(model).__name__} is no model: a loaded one is needed; for a configuration, "
            "kvant.plan(config, spec) computes the bytes"
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
            f"{type(model).__name__} adds a learnt prompt, which the model inside does not have: "
            "kvant supports weight adapters such as LoRA, or the model inside without its prompt, "
            "model.get_base_model()"
        )
    return base()


def list_generating_parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the model, and its parts that have a `generate` of their own."""
    modules = (module for module in model.modules() if module is not model)
    parts = (module for module in modules if isinstance(module, PreTrainedModel))
    return [model, *(part for part in parts if part.can_generate())]


NAMED_PARAMETER_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# The name since transformers 5.24, the name before, and the name in Mamba before.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


def get_cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the cache argument of the forward and of `generate`."""
    names = get_forward_arguments(model)
    return next((name for name in CACHE_ARGUMENTS if name in names), CACHE_ARGUMENTS[0])


def get_forward_arguments(model: PreTrainedModel) -> set[str]:
    """Return the named arguments of a model's forward, also those that `**kwargs` pass to bases."""
    return _collect_argument_names(model.forward, *_list_forwards(type(model)))


def takes_cache(model: PreTrainedModel) -> bool:
    """Return whether the forward of the model's class, or of a part that generates, takes a cache.

    A forward with only `*args, **kwargs` passes its arguments on, and may take one.
    """
    for part_class in {type(part) for part in list_generating_parts(model)}:
        names = _collect_argument_names(*_list_forwards(part_class))
        if not names or names & set(CACHE_ARGUMENTS):
            return True
    return False


def _collect_argument_names(*forwards: Callable[..., Any]) -> set[str]:
    """Return the named arguments of the forwards up to, and with, the first without `**kwargs`."""
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
    sha = hashlib.sha256(json.dumps(_describe_rope(model.config), sort_keys=True).encode())
    for name, weight in named_weights(model):
        sha.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        sha.update(_sample_values(weight).numpy().tobytes())
    return sha.hexdigest()[:32]


def _describe_rope(config: Any) -> Any:
    text = config.get_text_config(decoder=True)
    return repr(getattr(text, "rope_parameters", None))


@torch.no_grad()
def _sample_values(weight: Tensor) -> Tensor:
    """Return evenly spaced values of a weight on the CPU; none for a weight on meta."""
    if weight.is_meta or weight.numel() == 0:
        return torch.empty(0, dtype=torch.float64)
    offsets = torch.linspace(0, weight.numel() - 1, NUM_SAMPLED_VALUES, dtype=torch.float64).long()
    indices = torch.unravel_index(offsets.to(weight.device), weight.shape)
    return weight.detach()[indices].cpu().double()
