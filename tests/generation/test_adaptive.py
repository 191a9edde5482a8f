"""Adaptive: a memory under a budget goes down its steps, says so, and goes on."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import kvant
from generation.speakers import DEMO, begin, model_of, prompt_of, said
from kvant.generation.adaptive import steps_down
from kvant.spec import parse

BUDGET = 1_200_000


@pytest.fixture
def attached() -> Any:
    model = model_of(DEMO)
    kvant.attach(model, "raw")
    yield model
    kvant.detach(model)


def test_it_goes_down_and_stays_under_its_budget(
    attached: Any, caplog: pytest.LogCaptureFixture
) -> None:
    memory = kvant.cache_for(attached, "raw")
    given = {"strategy": "adaptive", "budget": BUDGET, "max_new_tokens": 400}
    with caplog.at_level(logging.WARNING, "kvant"):
        steps = [(step, memory.nbytes) for step in begin(DEMO, kv_cache=memory, **given)]
    assert len(steps) == 400
    assert all(nbytes <= BUDGET for _, nbytes in steps)
    told = [record.getMessage() for record in caplog.records]
    assert memory.stats()["recodes"] == len(told) >= 3
    assert "stored as affine8 from now on" in told[0]
    assert "window=" in told[-1] and "1.14 MiB" in told[-1]


def test_with_room_it_changes_nothing() -> None:
    assert said(DEMO, strategy="adaptive", budget=1 << 30) == said(DEMO)


def test_drafts_and_steps_down_go_together(attached: Any) -> None:
    memory = kvant.cache_for(attached, "affine8")
    given = {"strategy": "adaptive", "budget": 700_000, "max_new_tokens": 300, "draft": "ngram"}
    assert len(list(begin(DEMO, kv_cache=memory, **given))) == 300
    assert memory.stats()["recodes"] >= 1
    assert memory.length == len(prompt_of(DEMO)) + 299


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("raw", ["affine8", "affine4", "affine4,window=150,sinks=4", "affine4,window=75,sinks=4"]),
        ("affine4", ["affine4/affine4,window=150,sinks=4", "affine4/affine4,window=75,sinks=4"]),
        ("turbo4v2", ["turbo4/turbo2,window=150,sinks=4", "turbo4/turbo2,window=75,sinks=4"]),
        ("affine8,window=200", ["affine8/affine8,window=100,sinks=4"]),
        ("affine8,window=100", []),
    ],
)
def test_the_steps_down(spec: str, expected: list[str]) -> None:
    assert list(steps_down(parse(spec, 2), held=300)) == expected


@pytest.mark.parametrize("budget", [0, -5])
def test_a_budget_of_nothing_is_refused_at_once(budget: int) -> None:
    with pytest.raises(ValueError, match=f"budget={budget}"):
        begin(DEMO, strategy="adaptive", budget=budget)
