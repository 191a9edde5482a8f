"""Models whose tokens read the pages that matter: alone, side by side, drafted, in an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvant
from generation.speakers import Numbers
from hf.reading import attached, decoded, read, text
from hf.zoo import FAMILIES, build
from kvant.generation import generate

SELECTS, ALL = "affine8,select=1:0", "affine8,select=100%:0"
FAMILIES_TRIED = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "falcon_h1", "qwen3_next")


@pytest.mark.parametrize("name", FAMILIES_TRIED)
def test_to_select_all_changes_nothing(name: str) -> None:
    model, prompt = attached(name), text(450)
    plain, every, some = (
        decoded(model, read(model, spec, prompt), [450], [0]) for spec in ("affine8", ALL, SELECTS)
    )
    assert torch.equal(plain, every)
    assert some.isfinite().all() and not torch.equal(plain, some)


@pytest.mark.parametrize("name", FAMILIES_TRIED)
def test_sequences_side_by_side_select_as_alone(name: str) -> None:
    model, lengths = attached(name), [90, 450, 400]
    assert FAMILIES[name].cache_argument == "past_key_values"
    caches = [read(model, SELECTS, text(n, seed=n)) for n in lengths]
    merged = kvant.merge(caches)
    alone = [decoded(model, caches[i], [lengths[i]], [i]) for i in range(3)]
    found, expected = decoded(model, merged, lengths, [0, 1, 2]), torch.cat(alone)
    assert float((found - expected).abs().max() / expected.std()) < 1e-3


def test_drafts_change_nothing() -> None:
    model, prompt = build("llama"), text(210) * 2
    given: dict[str, Any] = {"kv_cache": SELECTS, "max_new_tokens": 40, "ignore_end": True}
    plain = [step.token for step in generate(model, Numbers(), prompt, **given)]
    drafted = [step.token for step in generate(model, Numbers(), prompt, **given, draft="ngram")]
    assert drafted == plain


def test_an_engine_gives_the_tokens_of_each_alone() -> None:
    model, prompts = build("llama"), [text(n, seed=n) for n in (80, 450, 400)]
    given: dict[str, Any] = {"max_new_tokens": 20, "ignore_end": True}
    alone = [
        [step.token for step in generate(model, Numbers(), prompt, kv_cache=SELECTS, **given)]
        for prompt in prompts
    ]
    with kvant.Engine(model, Numbers(), SELECTS) as engine:
        streams = [engine.submit(prompt, **given) for prompt in prompts]
        assert [list(stream.result().tokens) for stream in streams] == alone


def test_what_is_chosen_is_what_the_reference_chooses() -> None:
    model, prompt = build("llama"), text(450)
    one, other = (
        decoded(model, cache, [450], [0])
        for cache in (
            read(model, SELECTS, prompt),
            _by_reference(read(model, SELECTS, prompt)),
        )
    )
    torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def _by_reference(cache: Any) -> Any:
    cache.backend = "reference"
    return cache
