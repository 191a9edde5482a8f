"""Test channel scales fitted to a model: equal scores, and rows without outliers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvant
from hf.outliers import scale_key_channels, scale_value_channels
from hf.zoo import FAMILIES, build, family_names, valid_spec
from kvant import SpecError, demo
from kvant.recipes import iterate_attention

TEXT = "def outliers(model, factor):\n    return [layer.scaled(factor) for layer in model]\n" * 9


def list_scales(cache: kvant.hf.HostCache, side: str = "keys") -> list[torch.Tensor]:
    frames = [layer.sides[side].frame for layer in iterate_attention(*cache.spec.layers)]
    return [torch.tensor(getattr(f, "frames", (f,))[0].scale) for f in frames]


@pytest.mark.parametrize("name", family_names("decoder", "hybrid"))
def test_scores_are_preserved(name: str) -> None:
    model, ids = build(name), torch.randint(3, 100, (1, 40))
    raw, ours = (
        kvant.cache_for(model, valid_spec(name, spec))
        for spec in ("raw", "affine8,smooth,group=16,start=99999")
    )
    argument = FAMILIES[name].cache_argument
    with torch.no_grad():
        for part in ids.split([36, *[1] * 4], 1):
            theirs = model(part, **{argument: raw}).logits
            logits = model(part, **{argument: ours}).logits
            assert (logits - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.parametrize(
    ("larger", "side"), [(scale_key_channels, "keys"), (scale_value_channels, "values")]
)
def test_scale_is_inverse_to_the_channel_magnitude(larger: Any, side: str) -> None:
    plain = build("qwen3")
    models = plain, larger(plain, 30.0, channels=(3,))
    pairs = [list_scales(kvant.cache_for(m, "affine8,smooth,group=16"), side) for m in models]
    for before, after in zip(*pairs, strict=True):
        change, pair = after / before, [3, 3 + after.shape[-1] // 2]
        assert (change[:, pair] / change[:, [0, 9]] - 1 / 30).abs().max() < 1e-4


@pytest.mark.parametrize("larger", [scale_key_channels, scale_value_channels])
@pytest.mark.parametrize("spec", ["affine8", "affine4", "turbo4v4"])
def test_model_with_outliers_has_the_error_of_one_without(spec: str, larger: Any) -> None:
    plain = AutoModelForCausalLM.from_pretrained(demo.PATH, dtype=torch.float32).eval()
    large = larger(plain, 30.0)
    ids = AutoTokenizer.from_pretrained(demo.PATH)(TEXT, return_tensors="pt").input_ids

    def divergence(model: torch.nn.Module, text: str) -> float:
        with torch.no_grad():
            right = model(ids, use_cache=False).logits[0].log_softmax(-1)
            cache = kvant.cache_for(model, f"{text},prefill=stored,tail=0")
            got = model(ids, past_key_values=cache).logits[0].log_softmax(-1)
        return float((right.exp() * (right - got)).sum(-1).mean())

    single = divergence(plain, spec)
    assert divergence(large, spec) > 10 * single
    assert divergence(large, f"{spec},smooth") < 1.5 * single


def test_scales_are_fitted_once_and_belong_to_the_model() -> None:
    model = build("llama")
    calls = []
    model.register_forward_hook(lambda *args: calls.append(1))
    first = kvant.cache_for(model, "affine4,smooth")
    assert len(calls) == 2  # one token, and the rest of the text
    second = kvant.cache_for(model, "turbo4,smooth,window=9")
    assert len(calls) == 2
    for left, other in zip(list_scales(first), list_scales(second), strict=True):
        assert torch.equal(left, other)


def test_saved_cache_includes_its_scales(tmp_path) -> None:
    model = build("llama")
    cache = kvant.cache_for(model, "affine4,smooth,tail=0")
    with torch.no_grad():
        model(torch.randint(3, 100, (1, 150)), past_key_values=cache)
    kvant.save(cache, tmp_path / "s.kv.safetensors")
    loaded = kvant.load(tmp_path / "s.kv.safetensors")
    assert loaded.spec == cache.spec
    for first, second in zip(cache.states, loaded, strict=True):
        assert torch.equal(first.read()[0], second.read()[0])


def test_attached_model_has_fitted_scales_too() -> None:
    model, ids = build("llama"), torch.randint(3, 100, (1, 30))
    plain = model.generate(ids, max_new_tokens=5, do_sample=False)
    kvant.attach(model, "affine8,smooth,group=16,start=9999", guard=False)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), plain)


def test_cache_without_a_model_explains_where_scales_come_from() -> None:
    with pytest.raises(SpecError, match="cache_for"):
        kvant.Cache(2, "affine8,smooth")
    cache = kvant.Cache(2, "affine8")
    with pytest.raises(SpecError, match="cache_for"):
        cache.recode("affine4,smooth")
    assert cache.spec == kvant.parse("affine8", 2)


def test_a_plan_needs_no_scales() -> None:
    shape = kvant.Shape(2, 4, 64, 64)
    assert kvant.plan(shape, "affine4,smooth").nbytes == kvant.plan(shape, "affine4").nbytes


def test_short_context_models_are_fitted_on_as_many_tokens() -> None:
    model = build("gpt2", n_positions=100)
    assert list_scales(kvant.cache_for(model, "affine8,smooth,group=16"))


@pytest.mark.parametrize("side", ["q_proj", "k_proj"])
def test_all_zero_layer_needs_no_scale(side: str) -> None:
    model = build("llama")
    getattr(model.model.layers[1].self_attn, side).weight.data.zero_()
    layer_scales = list_scales(kvant.cache_for(model, "affine8,smooth,group=16"))
    assert all(scale.isfinite().all() for scale in layer_scales)


def test_fitting_keeps_training_mode() -> None:
    model = build("gpt2").train()
    before = torch.get_rng_state()
    kvant.cache_for(model, "affine8,smooth,group=16")
    assert model.training and torch.equal(before, torch.get_rng_state())


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(SpecError, match="only decode"):
        kvant.cache_for(build("t5"), "affine8,smooth,group=16")
