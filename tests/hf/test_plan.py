"""Test that the plan of a model equals the allocation of its cache, layer by layer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, DynamicCache, PreTrainedModel

import test_models
from hf.zoo import FAMILIES, build, family_names, valid_spec
from kvant import cache_for, plan
from kvant.cache.layers import PagedLayer
from kvant.cache.layout import make_layer_group
from kvant.models import layer_shapes
from kvant.pages.storage import pages_nbytes

HUB = {  # config.json as on the hub: many values are defaults of its class
    name: value
    for name, value in vars(test_models).items()
    if isinstance(value, dict) and ("model_type" in value or "text_config" in value)
}

DIFFERENT = (  # layers that differ, or store other tensors than keys and values
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


def allocate_states(
    model: PreTrainedModel, name: str, spec: str, context: int, sequences: int
) -> Any:
    """Return the states of a cache after a number of tokens, decoder rows only."""
    family, cache = FAMILIES[name], cache_for(model, spec)
    with torch.no_grad():
        inputs = family.inputs(sequences, context)
        floats = {k: v.to(model.dtype) for k, v in inputs.items() if v.is_floating_point()}
        model(**inputs | floats, **{family.cache_argument: cache, "use_cache": True})
    return getattr(cache, "self_attention_cache", cache).states


def leaves(states: Any, layer: int) -> list[Any]:
    layers = states.layers.get(layer, [])
    return [*layers.values()] if isinstance(layers, dict) else [layers] if layers else []


def measure_growth(leaf: Any, context: int, sequences: int) -> tuple[int, int]:
    """Return the peak bytes token by token, and those of a page of all sequences."""
    if not isinstance(leaf, PagedLayer):
        return leaf.nbytes, 0
    geometry, group = leaf.storage.geometry, make_layer_group(leaf.spec)
    peak = pages_nbytes(geometry, leaf.spec, group, [context] * sequences)
    step = max(1, group.step // group.page)
    return peak, step * sequences * (leaf.storage.open_nbytes + leaf.storage.sealed_nbytes)


def check_plan(model: PreTrainedModel, name: str, spec: str, context: int, sequences: int) -> None:
    """Check that one chunk allocates at most a page less than single tokens, and never more."""
    states = allocate_states(model, name, spec, context, sequences)
    planned = plan(model, spec, context=context, sequences=sequences)
    for layer, nbytes in enumerate(planned.layer_nbytes):
        variants = [measure_growth(leaf, context, sequences) for leaf in leaves(states, layer)]
        allocated = sum(leaf.nbytes for leaf in leaves(states, layer))
        assert nbytes == sum(peak for peak, _ in variants)
        assert 0 <= nbytes - allocated <= sum(page for _, page in variants)
    assert planned.spec == states.spec


@pytest.mark.parametrize("name", family_names())
def test_plan_equals_the_allocation_of_a_model_cache(name: str) -> None:
    """In bfloat16, where a recurrent state is wider than the rows."""
    spec = valid_spec(name, "affine4,step=64,tail=0,slack=3")
    check_plan(build(name).to(torch.bfloat16), name, spec, 150, 2)


@pytest.mark.parametrize("name", DIFFERENT)
def test_plan_covers_several_contexts_and_formats(name: str) -> None:
    model = build(name)
    for spec in SPECS:
        for context in CONTEXTS:
            check_plan(model, name, spec, context, 1)


@pytest.mark.parametrize("name", family_names())
def test_config_file_gives_the_same_plan_as_a_model(name: str) -> None:
    config = FAMILIES[name].config()
    config_data = json.loads(config.to_json_string())
    assert layer_shapes(config_data) == layer_shapes(config)


@pytest.mark.parametrize("name", HUB)
def test_config_file_is_parsed_like_transformers_does(name: str) -> None:
    config_ = HUB[name]
    family = config_.get("model_type") or config_["text_config"]["model_type"].removesuffix("_text")
    config = CONFIG_MAPPING[family].from_dict(dict(config_))
    assert layer_shapes(config_) == layer_shapes(config)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "deepseek_v3", "falcon_h1"])
@pytest.mark.parametrize("spec", ["raw", "affine4,tail=0"])
def test_raw_bytes_are_those_of_the_cache_of_transformers(name: str, spec: str) -> None:
    model = build(name)
    cache, stock = cache_for(model, spec), DynamicCache(config=model.config)
    ids = torch.randint(3, 50, (2, 150))
    with torch.no_grad():
        for past in (cache, stock):
            model(ids, cache=past)
            model(ids[:, :1], cache=past)  # a window keeps the whole chunk until the next token
    expected = 0
    for layer in stock.layers:
        row_tensors = [x for key in ("keys", "values") if (x := vars(layer).get(key)) is not None]
        for rows in row_tensors:
            is_window = rows.shape[2] == getattr(layer, "sliding_window", 0) - 1  # all but one row
            expected += rows.nbytes // rows.shape[2] * (rows.shape[2] + is_window)
    states = sum(state.nbytes for state in cache.states.holder.external_states.values())
    assert cache.raw_nbytes == expected + states
    assert cache.stats()["raw_nbytes"] == cache.raw_nbytes
