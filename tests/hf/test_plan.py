"""What is planned for a model is what its cache then takes, layer by layer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

import test_models
from hf.zoo import FAMILIES, build, names, worded
from kvant import cache_for, plan
from kvant.cache.layer import PagedLayer, make_layer_group, pages_nbytes
from kvant.models import layer_shapes

HUB = {  # config.json as the hub has it: much is left to the class that reads it
    name: value
    for name, value in vars(test_models).items()
    if isinstance(value, dict) and ("model_type" in value or "text_config" in value)
}

DIFFERENT = (  # layers that differ, or store something else than keys and values
    "gemma3",
    "gpt_oss",
    "mistral",
    "llama4",
    "gemma3n",
    "gemma4",
    "deepseek_v3",
    "qwen3_next",
    "jamba",
    "falcon_h1",
    "lfm2",
)
SPECS = ("raw", "raw,step=1", "affine8", "affine4,sinks=3,tail=0,step=64", "turbo4v2,edge=1:raw")
CONTEXTS = (1, 70, 200)


def allocated(model: PreTrainedModel, name: str, spec: str, context: int, sequences: int) -> Any:
    """The states of a cache that has seen so many tokens, of a decoder's own rows."""
    family, cache = FAMILIES[name], cache_for(model, spec)
    with torch.no_grad():
        inputs = family.inputs(sequences, context)
        floats = {k: v.to(model.dtype) for k, v in inputs.items() if v.is_floating_point()}
        model(**inputs | floats, **{family.cache_argument: cache, "use_cache": True})
    return getattr(cache, "self_attention_cache", cache).states


def leaves(states: Any, layer: int) -> list[Any]:
    found = states.layers.get(layer, [])
    return [*found.values()] if isinstance(found, dict) else [found] if found else []


def on_the_way(leaf: Any, context: int, sequences: int) -> tuple[int, int]:
    """Bytes of rows as they really came, token by token; and of a page of all sequences."""
    if not isinstance(leaf, PagedLayer):
        return leaf.nbytes, 0
    geometry, kind = leaf.storage.geometry, make_layer_group(leaf.spec)
    most = pages_nbytes(geometry, leaf.spec, kind, [context] * sequences)
    step = max(1, kind.step // kind.page)
    return most, step * sequences * (leaf.storage.open_nbytes + leaf.storage.sealed_nbytes)


def check(model: PreTrainedModel, name: str, spec: str, context: int, sequences: int) -> None:
    """One chunk may take a page less than its tokens one by one, and never more."""
    states = allocated(model, name, spec, context, sequences)
    planned = plan(model, spec, context=context, sequences=sequences)
    for layer, nbytes in enumerate(planned.layer_nbytes):
        ways = [on_the_way(leaf, context, sequences) for leaf in leaves(states, layer)]
        found = sum(leaf.nbytes for leaf in leaves(states, layer))
        assert nbytes == sum(most for most, _ in ways)
        assert 0 <= nbytes - found <= sum(page for _, page in ways)
    assert planned.spec == states.spec


@pytest.mark.parametrize("name", names())
def test_a_plan_is_what_the_cache_of_a_model_takes(name: str) -> None:
    """In bfloat16, where a recurrent state stays wider than the rows."""
    spec = worded(name, "affine4,step=64,tail=0,slack=3")
    check(build(name).to(torch.bfloat16), name, spec, 150, 2)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_plan_at_several_contexts_and_formats(name: str) -> None:
    model = build(name)
    for spec in SPECS:
        for context in CONTEXTS:
            check(model, name, spec, context, 1)


@pytest.mark.parametrize("name", names())
def test_a_file_tells_the_same_as_a_model(name: str) -> None:
    config = FAMILIES[name].config()
    told = json.loads(config.to_json_string())
    assert layer_shapes(told) == layer_shapes(config)


@pytest.mark.parametrize("name", HUB)
def test_a_file_is_understood_as_transformers_does(name: str) -> None:
    told = HUB[name]
    family = told.get("model_type") or told["text_config"]["model_type"].removesuffix("_text")
    config = CONFIG_MAPPING[family].from_dict(dict(told))
    assert layer_shapes(told) == layer_shapes(config)
