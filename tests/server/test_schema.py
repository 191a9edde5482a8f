"""What the OpenAPI page lets one ask, and what it does not, is answered as it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from server.conftest import served

schemathesis = pytest.importorskip("schemathesis")
OPERATIONS = [
    "GET /health",
    "GET /ready",
    "GET /v1/stats",
    "GET /metrics",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /tokenize",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
]


@pytest.fixture(scope="module")
def operations(inside: tuple[Any, Any]) -> Iterator[dict[str, Any]]:
    with served(*inside, max_sequences=2, max_new_tokens=3, max_context=64) as (_, url):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        found = (one.ok() for one in schema.get_all_operations())
        yield {one.label: one for one in found}


def test_all_are_asked(operations: dict[str, Any]) -> None:
    assert sorted(operations) == sorted(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_answers_are_as_the_page_says(operations: dict[str, Any], name: str) -> None:
    fits = schemathesis.checks.positive_data_acceptance  # a prompt the model: no schema tells
    how: Any = {"max_examples": 10, "deadline": None, "phases": [Phase.explicit, Phase.generate]}

    @given(case=operations[name].as_strategy())
    @settings(suppress_health_check=list(HealthCheck), **how)
    def asked(case: Any) -> None:
        case.call_and_validate(excluded_checks=[fits])

    asked()
