"""Another format while a model goes on: what layers see is the model's, what is kept the spec's."""

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


def tokens(count: int, sequences: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (sequences, count), generator=generator)


def step(model: PreTrainedModel, cache: TransformersCache, ids: Tensor, **more: Tensor) -> Tensor:
    """Logits of the last token."""
    first = cache.get_seq_length()
    place = torch.arange(first, first + ids.shape[1])[None]
    with torch.no_grad():
        told = {"position_ids": place} | more
        logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True, **told).logits
    return logits[:, -1]


def decoded(model: PreTrainedModel, cache: TransformersCache, count: int) -> Tensor:
    return torch.stack([step(model, cache, tokens(1, seed=9 + i)) for i in range(count)])


def grown(name: str, spec: str, count: int = 150) -> tuple[PreTrainedModel, TransformersCache]:
    model = build(name)
    cache = kvant.cache_for(model, spec)
    step(model, cache, tokens(count))
    return model, cache


def attention(cache: TransformersCache) -> list[LayerSpec]:
    parts = [
        dict(recipe.parts)["attention"] if isinstance(recipe, GroupSpec) else recipe
        for recipe in cache.spec.layers
    ]
    return [part for part in parts if isinstance(part, LayerSpec)]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_goes_on_as_if_the_format_had_been_there(name: str) -> None:
    """Raw rows of the prompt are what a new cache would have been given."""
    spec = "affine8,prefill=stored"
    model, cache = grown(name, "raw")
    cache.recode(spec)
    assert cache.spec == kvant.cache_for(model, spec).spec
    near = decoded(model, cache, 70)
    model, exact = grown(name, "raw")
    expected = decoded(model, exact, 70)
    error = (near - expected).abs().max() / expected.abs().max()
    assert 0 < error < 0.2 if any(cache.stats()["sealed"].values()) else error == 0
    assert cache.get_seq_length() == 220


@pytest.mark.parametrize("name", NAMES)
def test_back_to_raw_is_what_was_read(name: str) -> None:
    model, cache = grown(name, "affine8,tail=0,slack=0")
    twin = cache.fork()
    cache.recode("raw")
    for one, other in zip(cache.states, twin.states, strict=True):
        pairs = [one.read(), other.read()]
        pairs = [p["attention"] if isinstance(p, dict) and "attention" in p else p for p in pairs]
        if isinstance(pairs[0], tuple):
            assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
    a, b = (step(model, one, tokens(1, seed=3)) for one in (cache, twin))
    assert torch.allclose(a, b, atol=6e-3)  # kernels of 8-bit codes round queries to 15 bits


def test_a_window_of_the_policy_narrows_what_a_model_sees() -> None:
    model, cache = grown("llama", "raw")
    same = kvant.cache_for(model, "raw,window=40,sinks=2")
    step(model, same, tokens(150))  # later layers have seen their own window in the prompt
    cache.recode("raw,window=40,sinks=2")
    assert all(layer.narrows_window for layer in cache.layers)
    first = [one.states[0].read()[0] for one in (cache, same)]
    assert torch.equal(*first)
    assert cache.states.num_rows == 42
    decoded(model, cache, 5)
    assert torch.isfinite(step(model, cache, tokens(1))).all()
    with pytest.raises(SpecError, match=r"layer 0: window=90 .* last 40 are held"):
        cache.recode("affine8,window=90,sinks=0")
    cache.recode("affine8")
    assert {one.retention.window for one in attention(cache)} == {40}


def test_windows_of_the_model_stay_beside_one_of_the_policy() -> None:
    model, cache = grown("gemma3", "raw")
    cache.recode("affine4,window=100,sinks=3")
    assert cache.spec == kvant.cache_for(model, "affine4,window=100,sinks=3").spec
    assert [one.retention.window for one in attention(cache)] == [8, 8, 100, 8]
    assert [layer.narrows_window for layer in cache.layers] == [False, False, True, False]
    cache.recode("affine4,window=20,sinks=0")
    assert [one.retention.window for one in attention(cache)] == [8, 8, 20, 8]
    decoded(model, cache, 5)


def test_readings_end_with_a_recode() -> None:
    _, cache = grown("llama", "affine8", 100)
    keys = cache.layers[0].keys
    cache.recode("affine4")
    with pytest.raises(CacheError, match="earlier forward"):
        keys + 0
    assert cache.layers[0].keys.shape[2] == 100


def test_speculation_stays_exact() -> None:
    _, cache = grown("llama", "raw", 100)
    cache.activate_past_recording()
    slack = cache.context.slack
    cache.recode("affine8")
    assert slack > 16
    assert {one.slack for one in attention(cache)} == {slack}


def test_padded_sequences_stay_padded() -> None:
    model = build("llama")
    ids, mask = tokens(80, 2), torch.ones(2, 80, dtype=torch.long)
    mask[0, :30] = 0
    place = (mask.cumsum(1) - 1).clamp(0)
    cache = kvant.cache_for(model, "raw", attention_mask=mask)
    step(model, cache, ids, attention_mask=mask, position_ids=place)
    cache.recode("affine8,window=30,sinks=2")
    longer = torch.cat([mask, mask.new_ones(2, 1)], 1)
    told = {"attention_mask": longer, "position_ids": longer.sum(1, keepdim=True) - 1}
    near = step(model, cache, tokens(1, 2), **told)
    assert torch.isfinite(near).all()
    assert cache.states[0].positions()[0, :2].tolist() == [0, 1]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_a_recoded_cache_generates(name: str) -> None:
    model = build(name)
    cache = kvant.cache_for(model, "raw")
    ids = tokens(70)
    done = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    cache.recode("affine8")
    more = model.generate(done, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(more[:, : done.shape[1]], done)
    assert more.shape[1] == done.shape[1] + 5


def test_layers_that_live_in_the_host_are_refused() -> None:
    _, cache = grown("deepseek_v32", "raw", 20)
    with pytest.raises(CacheError, match=r"recode: layers \["):
        cache.recode("affine8")


def test_a_spec_that_does_not_fit_changes_nothing() -> None:
    _, cache = grown("qwen3_next", "raw", 100)
    before = cache.spec
    with pytest.raises(SpecError):
        cache.recode(CacheSpec((attention(cache)[0],) * 7))
    assert cache.spec == before
    assert cache.stats()["recodes"] == 0
