"""Strategies: when a memory is used is nobody's business but the memory's."""

from __future__ import annotations

from typing import Any

import pytest

import kvant
from generation.speakers import DEMO, FAMILIES, NEW, begin, expected_of, model_of, prompt_of, said


@pytest.mark.parametrize("strategy", ["always", "disabled", "long", "adaptive"])
@pytest.mark.parametrize("name", [DEMO, *FAMILIES])
def test_all_say_the_same(name: str, strategy: str) -> None:
    """The adaptive one as long as its budget asks for no step down, which changes what is read."""
    between = len(prompt_of(name)) + NEW // 2  # `long` begins within the reply
    budget = 1 << 30 if strategy == "adaptive" else None
    tokens = said(name, strategy=strategy, threshold=between, budget=budget)
    assert tokens == expected_of(name)


@pytest.mark.parametrize("name", [DEMO, "falcon_h1"])
def test_disabled_holds_nothing(name: str) -> None:
    memory = kvant.cache_for(model_of(name), "raw")
    list(begin(name, kv_cache=memory, strategy="disabled"))
    assert (memory.length, memory.nbytes) == (0, 0)


@pytest.mark.parametrize("name", [DEMO, "falcon_h1"])
def test_long_begins_where_it_is_told(name: str) -> None:
    memory, first = kvant.cache_for(model_of(name), "raw"), len(prompt_of(name))
    held = []
    for _ in begin(name, kv_cache=memory, strategy="long", threshold=first + 5):
        held.append(memory.length)
    # Step n + 1 is computed from the prompt and n tokens.
    assert held == [0] * 6 + [first + n for n in range(6, NEW)]


@pytest.mark.parametrize("strategy", ["disabled", "long"])
def test_drafts_go_with_every_strategy(strategy: str) -> None:
    tokens = said("llama", strategy=strategy, threshold=25, draft=model_of("llama"))
    assert tokens == expected_of("llama")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"strategy": "sometimes"}, "allowed are always, disabled, long, adaptive"),
        ({"strategy": "adaptive"}, "needs budget="),
        ({"strategy": "long", "threshold": -1}, "threshold=-1"),
        ({"budget": 100}, "only 'adaptive' has one"),
    ],
    ids=str,
)
def test_wrong_strategies_are_refused_at_once(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        begin("llama", **options)
