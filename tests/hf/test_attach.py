"""Test that attaching changes one model only, and that detaching leaves no trace."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

import kvant
from hf.zoo import NO_ROWS, build
from kvant import SpecError, hf
from kvant.hf import TransformersCache

FAMILIES = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "falcon", "bloom", "falcon_h1")


def tokens(count: int, batch: int = 1) -> Tensor:
    return torch.randint(3, 128, (batch, count), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def outputs(model: PreTrainedModel) -> list[Tensor]:
    """Return all outputs that attaching might affect: with and without a cache, padded, and
    steps.
    """
    ids, mask = tokens(12, batch=2), torch.ones(2, 12, dtype=torch.long)
    padded = mask.clone()
    padded[0, :4] = 0
    cache = DynamicCache(config=model.config)
    return [
        model(ids, use_cache=False).logits,
        model(ids, attention_mask=mask, use_cache=False).logits,
        model(ids, attention_mask=padded, use_cache=False).logits,
        model(ids, past_key_values=cache).logits,
        model(ids[:, :1], past_key_values=cache, position_ids=torch.full((2, 1), 12)).logits,
        model.generate(ids, attention_mask=padded, max_new_tokens=5, do_sample=False),
    ]


def same_outputs(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_unattached_model_is_unchanged_bit_for_bit(name: str) -> None:
    """Even a model that shares the configuration."""
    model = build(name)
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    other.generation_config = copy.deepcopy(model.generation_config)
    expected = outputs(other)
    kvant.attach(model, "affine8", guard=False)
    assert same_outputs(outputs(other), expected)
    assert type(other)._prepare_cache_for_generation is type(model)._prepare_cache_for_generation


@pytest.mark.parametrize("name", FAMILIES)
def test_detaching_leaves_no_trace(name: str) -> None:
    model = build(name)
    before, expected = set(model.__dict__), outputs(model)
    implementation = model.config._attn_implementation
    kvant.attach(model, "affine4", guard=False)
    kvant.detach(model)
    assert set(model.__dict__) == before
    assert model.config._attn_implementation == implementation
    assert not any("expand_kv" in module.__dict__ for module in model.modules())
    assert same_outputs(outputs(model), expected)


def test_attachment_of_an_earlier_version_is_detached() -> None:
    """It has no list of the methods that it replaced, since it always replaced one."""
    model = build("llama")
    before = set(model.__dict__)
    hf.attach(model, "affine8")
    vars(hf.get_attachments(model)[model]).pop("replaced_methods")
    kvant.detach(model)
    assert set(model.__dict__) == before


def test_transformers_cache_is_unchanged() -> None:
    """No kvant class replaces one of transformers."""
    assert all(
        "kvant" not in layer_class.__module__ for layer_class in DYNAMIC_LAYER_TYPE_MAPPING.values()
    )
    assert type(DynamicCache(config=build("llama").config).layers[0]).__name__ == "DynamicLayer"


def test_importing_kvant_imports_no_transformers() -> None:
    code = "import kvant, sys; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def generate_ids(model: PreTrainedModel, **kwargs: object) -> TransformersCache:
    kwargs = {"max_new_tokens": 4, "do_sample": False} | kwargs
    out = model.generate(tokens(6), return_dict_in_generate=True, **kwargs)
    cache: TransformersCache = out.past_key_values
    return cache


def test_plain_generate_uses_the_cache() -> None:
    model = build("llama")
    kvant.attach(model, "affine8", guard=False)
    cache = generate_ids(model)
    assert isinstance(cache, TransformersCache)
    assert cache.stats()["fused"] == 3 * len(cache)  # the first token comes from the prompt


def test_reattaching_replaces_the_spec() -> None:
    model = build("llama")
    kvant.attach(model, "affine8", guard=False)
    kvant.attach(model, "raw,window=16,sinks=2")
    assert generate_ids(model).spec.layers[0].retention.window == 16  # type: ignore[union-attr]
    kvant.detach(model)
    assert isinstance(generate_ids(model), DynamicCache)


def test_explicit_cache_takes_precedence() -> None:
    model = build("llama")
    kvant.attach(model, "affine8", guard=False)
    own_cache = DynamicCache(config=model.config)
    assert generate_ids(model, past_key_values=own_cache) is own_cache
    assert generate_ids(model, use_cache=False) is None


def test_other_transformers_cache_is_refused() -> None:
    model = build("llama")
    kvant.attach(model, "affine8", guard=False)
    with pytest.raises(ValueError, match=r"cache_implementation='static'.*detach"):
        generate_ids(model, cache_implementation="static")


def test_copy_of_an_attached_model_is_attached_separately() -> None:
    model = build("llama")
    kvant.attach(model, "affine8", guard=False)
    clone = copy.deepcopy(model)
    kvant.detach(model)
    assert isinstance(generate_ids(clone), TransformersCache)
    assert isinstance(generate_ids(model), DynamicCache)


def test_unsupported_spec_is_refused_before_anything_changes() -> None:
    model = build("llama")
    before = dict(model.__dict__)
    with pytest.raises(SpecError):
        kvant.attach(model, "affine9")
    assert model.__dict__ == before
    with pytest.raises(ValueError, match="not attached"):
        kvant.detach(model)


@pytest.mark.parametrize("name", NO_ROWS)
@pytest.mark.parametrize("spec", ["affine4", "raw,window=64", "f32"])
def test_format_for_a_model_without_keys_is_refused(name: str, spec: str) -> None:
    """Regression: `affine4` on a mamba was accepted, and nothing was stored in 4 bits."""
    model = build(name)
    for take in (kvant.cache_for, kvant.attach):
        with pytest.raises(SpecError, match=f"spec '{spec}' .* no layer of this model has any"):
            take(model, spec)
    with pytest.raises(ValueError, match="not attached"):
        kvant.detach(model)
    assert kvant.plan(model, "affine4").nbytes == kvant.plan(model, "raw").nbytes


@pytest.mark.parametrize("name", NO_ROWS)
def test_model_without_keys_accepts_raw_and_any_recipes(name: str) -> None:
    model = build(name)
    recipes = kvant.cache_for(model, "raw").spec
    assert kvant.cache_for(model, recipes).spec == recipes
    kvant.attach(model)
    kvant.detach(model)


@pytest.mark.parametrize("take", [kvant.cache_for, kvant.plan])
def test_invalid_spec_is_refused_even_if_no_layer_attends(take: Any) -> None:
    """Regression: the spec was not even parsed there."""
    with pytest.raises(SpecError, match="nearest: affine8"):
        take(build("mamba"), "affine9")


def test_model_without_a_cache_is_refused() -> None:
    class RwkvForNothing(LlamaForCausalLM): ...  # recognized by its name, as in transformers

    model = RwkvForNothing(build("llama").config)
    with pytest.raises(SpecError, match="does not use the cache of transformers"):
        kvant.cache_for(model, "raw")


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_a_window_on_an_encoder_decoder_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="cross-attention"):
        kvant.cache_for(build(name), "affine8,window=64")


def test_an_unknown_version_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    building = sys.modules["kvant.hf.attach"]
    monkeypatch.setattr(building, "version", lambda _: "6.0.0")
    building.check_transformers_version.cache_clear()
    try:
        for _ in range(2):
            with caplog.at_level(logging.WARNING, logger="kvant"):
                kvant.cache_for(build("llama"), "raw")
        assert [record.message for record in caplog.records] == [
            "transformers 6.0.0 is outside <5.25,>=5.23, the versions that kvant is known to work "
            "with"
        ]
    finally:
        building.check_transformers_version.cache_clear()


def test_invalid_spec_keeps_the_previous_one() -> None:
    model = build("llama")
    kvant.attach(model, "affine8", guard=False)
    with pytest.raises(SpecError):
        kvant.attach(model, "affine9")
    assert isinstance(generate_ids(model), TransformersCache)


def test_explain_recommends_attaching_only_where_it_helps() -> None:
    for name, attached, helps in (
        ("gpt_oss", False, True),
        ("gpt_oss", True, False),
        ("bloom", False, False),
    ):
        model = build(name)
        if attached:
            kvant.attach(model, "affine8", guard=False)
        cache = kvant.cache_for(model, "affine8")
        model.generate(tokens(6), past_key_values=cache, max_new_tokens=3)
        assert ("kvant.attach" in str(cache.explain())) == helps, (name, attached)
