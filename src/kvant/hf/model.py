"""Which models of the host's a user means, and what tells one of them from another."""

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
    """The model that torch.compile or peft wraps, or itself; None where nobody knows of one.

    What is compiled is a copy of its forward, which `generate` of the host's does not call either.
    """
    while not isinstance(model, PreTrainedModel):
        inner = _get_wrapped_model(model) if isinstance(model, nn.Module) else None
        if inner is None or inner is model:
            return None
        model = inner
    return model


def get_transformers_model(model: Any) -> PreTrainedModel:
    """The model of the host's, or an error that says what is needed."""
    if isinstance(model, str):
        raise TypeError(
            f"{short(model)} is the name of a model: the loaded one is needed, "
            "AutoModelForCausalLM.from_pretrained(name)"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{type(model).__name__} is no model: a loaded one is needed; of a configuration "
            "kvant.plan(config, spec) tells the bytes"
        )
    found = unwrap_model(model)
    if found is None:
        raise TypeError(
            f"{type(model).__name__} is no model of transformers, and none that torch.compile or "
            "peft wraps: give the model inside; any other takes kvant.Cache(num_layers, spec)"
        )
    return found


def _get_wrapped_model(model: Any) -> Any:
    base = getattr(model, "get_base_model", None)
    if not callable(base):
        return getattr(model, "_orig_mod", None)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise TypeError(
            f"{type(model).__name__} puts a learnt prompt before the text, which the model inside "
            "knows nothing of: kvant takes adapters of weights, as LoRA's, or the model inside, "
            "model.get_base_model(), without its prompt"
        )
    return base()


def list_generating_parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model, and the parts of it that have a `generate` of their own."""
    inner = (module for module in model.modules() if module is not model)
    parts = (module for module in inner if isinstance(module, PreTrainedModel))
    return [model, *(part for part in parts if part.can_generate())]


NAMED_PARAMETER_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
CACHE_ARGUMENTS = (
    "cache",
    "past_key_values",
    "cache_params",
)  # from 5.24 on, before, and of Mamba before


def get_cache_argument(model: PreTrainedModel) -> str:
    """The name by which the host's forward, and its `generate`, take a cache."""
    taken = get_forward_arguments(model)
    return next((name for name in CACHE_ARGUMENTS if name in taken), CACHE_ARGUMENTS[0])


def get_forward_arguments(model: PreTrainedModel) -> set[str]:
    """Return the arguments that the forward of a model takes by name, of its bases' as well."""
    return _collect_argument_names(model.forward, *_list_forwards(type(model)))


def takes_cache(model: PreTrainedModel) -> bool:
    """Return whether the forward of the model's class, or of a part that generates, takes a cache.

    A forward of `*args, **kwargs` alone hands on what it is given: it may take one.
    """
    for kind in {type(part) for part in list_generating_parts(model)}:
        names = _collect_argument_names(*_list_forwards(kind))
        if not names or names & set(CACHE_ARGUMENTS):
            return True
    return False


def _collect_argument_names(*forwards: Callable[..., Any]) -> set[str]:
    """Return the arguments that the first forward names, and each next one that gets `**kwargs`."""
    names = set[str]()
    for forward in forwards:
        taken = inspect.signature(forward).parameters.values()
        names |= {
            one.name for one in taken if one.kind in NAMED_PARAMETER_KINDS and one.name != "self"
        }
        if all(one.kind is not one.VAR_KEYWORD for one in taken):
            break
    return names


def _list_forwards(model_class: type[nn.Module]) -> list[Callable[..., Any]]:
    """Return the forward of a class and those of its bases, in the order of `super()`."""
    return [vars(one)["forward"] for one in model_class.__mro__ if "forward" in vars(one)]


def list_required_inputs(model: PreTrainedModel) -> list[str]:
    """What every forward of a model needs beside tokens."""
    taken = inspect.signature(model.forward).parameters.values()
    named = [one for one in taken if one.kind is one.POSITIONAL_OR_KEYWORD]
    return [one.name for one in named if one.default is one.empty and one.name != "input_ids"]


def find_text_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """The model, or the first part that generates, which continues tokens and needs no more."""
    return next(
        (part for part in list_generating_parts(model) if not list_required_inputs(part)), None
    )


def get_text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The reader of a model, or an error that says what else it needs."""
    found = find_text_model(model)
    if found is None:
        raise TypeError(
            f"{_describe_required_inputs(model)}, and no part of it continues tokens alone"
        )
    return found


def check_text_model(model: PreTrainedModel) -> None:
    """Refuse a model that tokens are not enough for, and name the part that they are."""
    if list_required_inputs(model):
        part = get_text_model(model)
        name = next(name for name, module in model.named_modules() if module is part)
        raise TypeError(
            f"{_describe_required_inputs(model)}: give the part that continues text, model.{name}"
        )


def _describe_required_inputs(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} needs {', '.join(list_required_inputs(model))} in every forward"


NUM_SAMPLED_VALUES = 16  # values of each weight


def compute_model_fingerprint(model: PreTrainedModel) -> str:
    """The same for the same weights in the same dtype, wherever they lie."""
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
    """Some values, evenly spread; none of a weight that is not here."""
    if weight.is_meta or weight.numel() == 0:
        return torch.empty(0, dtype=torch.float64)
    spread = torch.linspace(0, weight.numel() - 1, NUM_SAMPLED_VALUES, dtype=torch.float64).long()
    place = torch.unravel_index(spread.to(weight.device), weight.shape)
    return weight.detach()[place].cpu().double()
