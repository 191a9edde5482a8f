"""Two replicas of the bundled model, and one Redis."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvant import checkpoints
from stores.servers import redis_server

NAME = "inside"


@pytest.fixture(scope="package")
def deployment() -> Iterator[str]:
    """Return the base URL."""
    pytest.importorskip("ray", reason="pip install 'kvant[ray]'")
    from kvant.serve.ray import DeploymentSettings, connect, deploy, find_free_port

    port = find_free_port("127.0.0.1", 0)
    with redis_server() as redis, connect():
        settings = DeploymentSettings(
            name=NAME, replicas=2, cpus=1, max_bytes="256MiB", max_sequences=8, store=[redis.url]
        )
        with deploy(settings, port):
            yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def bundled_model() -> tuple[Any, Any]:
    return checkpoints.load(None)


@pytest.fixture
def running(deployment: str, bundled_model: tuple[Any, Any]) -> tuple[Any, str]:
    """Provide the fixture that tests of a single server use."""
    return SimpleNamespace(engine=SimpleNamespace(tokenizer=bundled_model[1])), deployment
