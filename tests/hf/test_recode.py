"""Test a new format during generation: windows follow the model, storage follows the spec."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvant
from hf.zoo import build
from kvant import CacheError, CacheSpec, GroupSpec, LayerSpec, SpecError
from kvant.hf import TransformersCache

NAMES = ("llama", "mistral", "gemma3", "llama4", "deepseek_v3", "qwen3_next", "falcon_h1", "lfm2")


def make_tokens(count: int, sequences: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (sequences, count), generator=generator)


def forward_logits(
    model: PreTrainedModel, cache: TransformersCache, ids: Tensor, **more: Tensor
) -> Tensor:
    """Return the logits of the last token."""
    first = cache.get_seq_length()
    place = torch.arange(first, first + ids.shape[1])[None]
    with torch.no_grad():
        options = {"position_ids": place} | more
        logits: Tensor = model(
            input_ids=ids, past_key_values=cache, use_cache=True, **options
        ).logits
    return logits[:, -1]


def decode_tokens(model: PreTrainedModel, cache: TransformersCache, count: int) -> Tensor:
    return torch.stack(
        [forward_logits(model, cache, make_tokens(1, seed=9 + i)) for i in range(count)]
    )


def make_cache(name: str, spec: str, count: int = 150) -> tuple[PreTrainedModel, TransformersCache]:
    model = build(name)
    cache = kvant.cache_for(model, spec)
    forward_logits(model, cache, make_tokens(count))
    return model, cache


def list_attention_specs(cache: TransformersCache) -> list[LayerSpec]:
    parts = [
        dict(recipe.parts)["attention"] if isinstance(recipe, GroupSpec) else recipe
        for recipe in cache.spec.layers
    ]
    return [part for part in parts if isinstance(part, LayerSpec)]


@pytest.mark.parametrize("name", NAMES)
def test_recoded_model_continues_as_if_always_in_that_format(name: str) -> None:
    """Raw rows of the prompt are the input that a new cache would get."""
    spec = "affine8,prefill=stored"
    model, cache = make_cache(name, "raw")
    cache.recode(spec)
    assert cache.spec == kvant.cache_for(model, spec).spec
    actual = decode_tokens(model, cache, 70)
    model, exact = make_cache(name, "raw")
    expected = decode_tokens(model, exact, 70)
    error = (actual - expected).abs().max() / expected.abs().max()
    assert 0 < error < 0.2 if any(cache.stats()["sealed"].values()) else error == 0
    assert cache.get_seq_length() == 220


@pytest.mark.parametrize("name", NAMES)
def test_recode_to_raw_keeps_the_decoded_rows(name: str) -> None:
    model, cache = make_cache(name, "affine8,tail=0,slack=0")
    fork = cache.fork()
    cache.recode("raw")
    for first, second in zip(cache.states, fork.states, strict=True):
        pairs = [first.read(), second.read()]
        pairs = [p["attention"] if isinstance(p, dict) and "attention" in p else p for p in pairs]
        if isinstance(pairs[0], tuple):
            assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
    a, b = (forward_logits(model, first, make_tokens(1, seed=3)) for first in (cache, fork))
    assert torch.allclose(a, b, atol=6e-3)  # kernels of 8-bit codes round queries to 15 bits


def test_policy_window_narrows_what_the_model_sees() -> None:
    model, cache = make_cache("llama", "raw")
    same = kvant.cache_for(model, "raw,window=40,sinks=2")
    forward_logits(
        model, same, make_tokens(150)
    )  # later layers used their own window in the prompt
    cache.recode("raw,window=40,sinks=2")
    assert all(layer.is_window_narrowed for layer in cache.layers)
    first = [cache_.states[0].read()[0] for cache_ in (cache, same)]
    assert torch.equal(*first)
    assert cache.states.num_rows == 42
    decode_tokens(model, cache, 5)
    assert torch.isfinite(forward_logits(model, cache, make_tokens(1))).all()
    with pytest.raises(SpecError, match=r"layer 0: window=90 .* last 40 are held"):
        cache.recode("affine8,window=90,sinks=0")
    cache.recode("affine8")
    assert {cache_.retention.window for cache_ in list_attention_specs(cache)} == {40}


def test_model_windows_coexist_with_a_policy_window() -> None:
    model, cache = make_cache("gemma3", "raw")
    cache.recode("affine4,window=100,sinks=3")
    assert cache.spec == kvant.cache_for(model, "affine4,window=100,sinks=3").spec
    assert [spec_.retention.window for spec_ in list_attention_specs(cache)] == [8, 8, 100, 8]
    assert [layer.is_window_narrowed for layer in cache.layers] == [False, False, True, False]
    cache.recode("affine4,window=20,sinks=0")
    assert [spec_.retention.window for spec_ in list_attention_specs(cache)] == [8, 8, 20, 8]
    decode_tokens(model, cache, 5)


def test_pending_reads_end_with_a_recode() -> None:
    _, cache = make_cache("llama", "affine8", 100)
    keys = cache.layers[0].keys
    cache.recode("affine4")
    with pytest.raises(CacheError, match="earlier forward"):
        keys + 0
    assert cache.layers[0].keys.shape[2] == 100


def test_speculation_stays_exact() -> None:
    _, cache = make_cache("llama", "raw", 100)
    cache.activate_past_recording()
    slack = cache.context.slack
    cache.recode("affine8")
    assert slack > 16
    assert {spec_.slack for spec_ in list_attention_specs(cache)} == {slack}


def test_padded_sequences_stay_padded() -> None:
    model = build("llama")
    ids, mask = make_tokens(80, 2), torch.ones(2, 80, dtype=torch.long)
    mask[0, :30] = 0
    place = (mask.cumsum(1) - 1).clamp(0)
    cache = kvant.cache_for(model, "raw", attention_mask=mask)
    forward_logits(model, cache, ids, attention_mask=mask, position_ids=place)
    cache.recode("affine8,window=30,sinks=2")
    longer = torch.cat([mask, mask.new_ones(2, 1)], 1)
    options = {"attention_mask": longer, "position_ids": longer.sum(1, keepdim=True) - 1}
    actual = forward_logits(model, cache, make_tokens(1, 2), **options)
    assert torch.isfinite(actual).all()
    assert cache.states[0].positions()[0, :2].tolist() == [0, 1]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_a_recoded_cache_generates(name: str) -> None:
    model = build(name)
    cache = kvant.cache_for(model, "raw")
    ids = make_tokens(70)
    generated = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    cache.recode("affine8")
    more = model.generate(generated, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(more[:, : generated.shape[1]], generated)
    assert more.shape[1] == generated.shape[1] + 5


def test_layers_with_transformers_state_are_refused() -> None:
    _, cache = make_cache("deepseek_v32", "raw", 20)
    with pytest.raises(CacheError, match=r"recode: layers \["):
        cache.recode("affine8")


def test_unsupported_spec_changes_nothing() -> None:
    _, cache = make_cache("qwen3_next", "raw", 100)
    before = cache.spec
    with pytest.raises(SpecError):
        cache.recode(CacheSpec((list_attention_specs(cache)[0],) * 7))
    assert cache.spec == before
    assert cache.stats()["recodes"] == 0
