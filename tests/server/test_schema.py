"""Test that requests inside and outside the OpenAPI schema are answered as it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from kvant.checkpoints.pooling import DeclaredPooling, Pooling
from server.conftest import serve_model

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
    "POST /v1/embeddings",
    "GET /api/version",
    "GET /api/tags",
    "GET /api/ps",
    "POST /api/show",
    "POST /api/chat",
    "POST /api/generate",
    "POST /api/embed",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses",
]


@pytest.fixture(scope="module")
def operations(bundled_model: tuple[Any, Any]) -> Iterator[dict[str, Any]]:
    options: dict[str, Any] = {"max_sequences": 2, "max_new_tokens": 3, "max_context": 64}
    options["declared_pooling"] = DeclaredPooling(Pooling("mean"))
    with serve_model(*bundled_model, **options) as (_, url):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        all_operations = (operation.ok() for operation in schema.get_all_operations())
        yield {operation.label: operation for operation in all_operations}


def test_all_operations_are_tested(operations: dict[str, Any]) -> None:
    assert sorted(operations) == sorted(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_responses_match_the_schema(operations: dict[str, Any], name: str) -> None:
    # a prompt the model refuses for reasons that no schema states
    fits = schemathesis.checks.positive_data_acceptance
    settings_: Any = {
        "max_examples": 10,
        "deadline": None,
        "phases": [Phase.explicit, Phase.generate],
    }

    @given(case=operations[name].as_strategy())
    @settings(suppress_health_check=list(HealthCheck), **settings_)
    def check_case(case: Any) -> None:
        case.call_and_validate(excluded_checks=[fits])

    check_case()
