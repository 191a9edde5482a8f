"""Test cache strategies, which must not change the output."""

from __future__ import annotations

from typing import Any

import pytest

import kvant
from generation.speakers import (
    DEMO,
    FAMILIES,
    NEW,
    expected_tokens,
    generate_tokens,
    model_of,
    prompt_of,
    start_generation,
)


@pytest.mark.parametrize("strategy", ["always", "disabled", "long", "adaptive"])
@pytest.mark.parametrize("name", [DEMO, *FAMILIES])
def test_all_strategies_give_the_same_tokens(name: str, strategy: str) -> None:
    """The adaptive strategy too, as long as its budget requires no downgrade, which would
    change rows.
    """
    between = len(prompt_of(name)) + NEW // 2  # `long` starts within the reply
    budget = 1 << 30 if strategy == "adaptive" else None
    tokens = generate_tokens(name, strategy=strategy, threshold=between, budget=budget)
    assert tokens == expected_tokens(name)


@pytest.mark.parametrize("name", [DEMO, "falcon_h1"])
def test_disabled_cache_stores_nothing(name: str) -> None:
    cache = kvant.cache_for(model_of(name), "raw")
    list(start_generation(name, kv_cache=cache, strategy="disabled"))
    assert (cache.length, cache.nbytes) == (0, 0)


@pytest.mark.parametrize("name", [DEMO, "falcon_h1"])
def test_long_strategy_starts_at_its_threshold(name: str) -> None:
    cache, first = kvant.cache_for(model_of(name), "raw"), len(prompt_of(name))
    cached_tokens = []
    for _ in start_generation(name, kv_cache=cache, strategy="long", threshold=first + 5):
        cached_tokens.append(cache.length)
    # Step n + 1 is computed from the prompt and n tokens.
    assert cached_tokens == [0] * 6 + [first + n for n in range(6, NEW)]


@pytest.mark.parametrize("strategy", ["disabled", "long"])
def test_drafts_work_with_every_strategy(strategy: str) -> None:
    tokens = generate_tokens("llama", strategy=strategy, threshold=25, draft=model_of("llama"))
    assert tokens == expected_tokens("llama")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "sometimes"}, "allowed are always, disabled, long, adaptive"),
        ({"strategy": "adaptive"}, "needs budget="),
        ({"strategy": "long", "threshold": -1}, "threshold=-1"),
        ({"budget": 100}, "only 'adaptive' has a budget"),
    ],
    ids=str,
)
def test_invalid_strategies_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start_generation("llama", **options)
