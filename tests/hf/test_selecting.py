"""Test models that read selected pages: alone, batched, with drafts, in an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvant
from generation.speakers import Numbers
from hf.reading import decode_logits, make_attached_model, prefill_prompt, text
from hf.zoo import FAMILIES, build
from kvant.generation import generate

SELECTS, ALL = "affine8,select=1:0", "affine8,select=100%:0"
FAMILIES_TRIED = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "falcon_h1", "qwen3_next")


@pytest.mark.parametrize("name", FAMILIES_TRIED)
def test_selecting_all_pages_changes_nothing(name: str) -> None:
    model, prompt = make_attached_model(name), text(450)
    plain, every, selected = (
        decode_logits(model, prefill_prompt(model, spec, prompt), [450], [0])
        for spec in ("affine8", ALL, SELECTS)
    )
    assert torch.equal(plain, every)
    assert selected.isfinite().all() and not torch.equal(plain, selected)


@pytest.mark.parametrize("name", FAMILIES_TRIED)
def test_batched_sequences_select_as_alone(name: str) -> None:
    model, lengths = make_attached_model(name), [90, 450, 400]
    assert FAMILIES[name].cache_argument == "past_key_values"
    caches = [prefill_prompt(model, SELECTS, text(n, seed=n)) for n in lengths]
    merged = kvant.merge(caches)
    single = [decode_logits(model, caches[i], [lengths[i]], [i]) for i in range(3)]
    actual, expected = decode_logits(model, merged, lengths, [0, 1, 2]), torch.cat(single)
    assert float((actual - expected).abs().max() / expected.std()) < 1e-3


@pytest.mark.usefixtures("every_draft_is_verified")
def test_drafts_change_nothing() -> None:
    model, prompt = build("llama"), text(210) * 2
    options: dict[str, Any] = {"kv_cache": SELECTS, "max_new_tokens": 40, "ignore_end": True}
    plain = [step.token for step in generate(model, Numbers(), prompt, **options)]
    drafted = [step.token for step in generate(model, Numbers(), prompt, **options, draft="ngram")]
    assert drafted == plain


def test_engine_tokens_equal_those_of_each_alone() -> None:
    model, prompts = build("llama"), [text(n, seed=n) for n in (80, 450, 400)]
    options: dict[str, Any] = {"max_new_tokens": 20, "ignore_end": True}
    single = [
        [step.token for step in generate(model, Numbers(), prompt, kv_cache=SELECTS, **options)]
        for prompt in prompts
    ]
    with kvant.Engine(model, Numbers(), SELECTS, chunk_seconds=60) as engine:
        streams = [engine.submit(prompt, **options) for prompt in prompts]
        assert [list(stream.result().tokens) for stream in streams] == single


def test_selected_pages_equal_those_of_the_reference() -> None:
    model, prompt = build("llama"), text(450)
    first, second = (
        decode_logits(model, cache, [450], [0])
        for cache in (
            prefill_prompt(model, SELECTS, prompt),
            _use_reference(prefill_prompt(model, SELECTS, prompt)),
        )
    )
    torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-2)


def _use_reference(cache: Any) -> Any:
    cache.backend = "reference"
    return cache
