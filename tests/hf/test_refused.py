"""Test models and `generate` calls that would give wrong tokens: they are refused in time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvant
from hf.shrinking import tiny
from hf.zoo import build


def make_prompt(length: int) -> list[int]:
    random = torch.Generator().manual_seed(length)
    return torch.randint(5, 120, (length,), generator=random).tolist()


def generate_stock(model: PreTrainedModel, tokens: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([tokens])
    mask = torch.ones_like(ids)
    out: Tensor = model.generate(
        ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **options
    )
    return out[0, len(tokens) :].tolist()


def test_a_forward_without_a_cache_is_refused() -> None:
    model = tiny("openai-gpt")
    with pytest.raises(kvant.SpecError, match=r"OpenAIGPTLMHeadModel keeps no cache.*leave kvant"):
        kvant.cache_for(model)

    class Forwarding(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    with pytest.raises(kvant.SpecError, match="Forwarding keeps no cache"):
        kvant.cache_for(Forwarding(model.config))


def test_looped_layers_are_refused_with_their_reason() -> None:
    model = tiny("dory")
    with pytest.raises(kvant.CacheError, match=r"layers in loops.*leave kvant out"):
        generate_stock(model, make_prompt(20), past_key_values=kvant.cache_for(model))


def test_bias_of_one_length_is_no_mask_for_ragged_sequences() -> None:
    model = tiny("inkling_text")
    caches = [kvant.cache_for(model), kvant.cache_for(model)]
    with torch.no_grad():
        for cache, length in zip(caches, (5, 9), strict=True):
            model(torch.tensor([make_prompt(length)]), past_key_values=cache)
        merged = kvant.merge(caches)
        with pytest.raises(kvant.UnsupportedView, match=r"made for one length.*extract"):
            model(
                torch.tensor([[7], [7]]),
                position_ids=torch.tensor([[5], [9]]),
                past_key_values=merged,
            )


@pytest.mark.parametrize(
    ("name", "reason"), [("cpmant", "first rows for an"), ("git", "wider than its text")]
)
def test_padding_moved_by_a_model_is_refused(name: str, reason: str) -> None:
    """Extra tokens before the prompt (cpmant), or columns for an image (git)."""
    model = tiny(name)
    ids = torch.tensor([make_prompt(9), make_prompt(9)])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with (
        kvant.attach(model, guard=False),
        pytest.raises(kvant.CacheError, match=rf"{reason}.*kvant.detach"),
    ):
        model.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4)


@pytest.mark.parametrize("options", [{"use_cache": False}, {}])
def test_generate_without_use_cache_fills_no_cache(options: dict[str, bool]) -> None:
    """It passes the whole text to the cache at every step: wrong with any cache."""
    model = tiny("mpt") if not options else build("llama")
    if not options:
        model.generation_config.use_cache = False
    cache = kvant.cache_for(model)
    with pytest.raises(kvant.CacheError, match=r"5 tokens and then 6.*use_cache=True"):
        generate_stock(model, make_prompt(5), past_key_values=cache, **options)
    cache.reset()
    reply = generate_stock(model, make_prompt(5), past_key_values=cache, use_cache=True)
    assert reply == generate_stock(model, make_prompt(5))


def test_forward_after_generate_is_not_mistaken_for_its_step() -> None:
    """11 tokens by hand, after a `generate` that read 10 and made one forward."""
    model, more = build("llama"), torch.tensor([make_prompt(11)])
    cache, plain = kvant.cache_for(model), DynamicCache(config=model.config)
    for cache_ in (cache, plain):
        model.generate(torch.tensor([make_prompt(10)]), past_key_values=cache_, max_new_tokens=1)
    with torch.no_grad():
        actual, expected = (model(more, past_key_values=cache_).logits for cache_ in (cache, plain))
    assert cache.length == 21
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_prompt_beyond_a_window_the_model_ignores_is_refused() -> None:
    """Moshi's cache has a window, but its attention reads a prompt without one."""
    model = tiny("moshi")
    cache = kvant.cache_for(model)
    with pytest.raises(kvant.UnsupportedView, match=r"66 tokens.*window of 40.*prefill_chunk"):
        generate_stock(model, make_prompt(66), past_key_values=cache)
    cache.reset()
    reply = generate_stock(model, make_prompt(66), past_key_values=cache, prefill_chunk_size=33)
    assert reply == generate_stock(model, make_prompt(66), prefill_chunk_size=33)


def test_padding_seen_by_a_decoded_token_is_stored() -> None:
    """ProphetNet masks its prompt only."""
    model = tiny("prophetnet")
    ids = torch.tensor([make_prompt(9), make_prompt(9)])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **options)
    with kvant.attach(model, guard=False):
        assert torch.equal(model.generate(ids, **options), expected)
