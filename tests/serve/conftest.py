"""Two replicas of the model inside, and one Redis."""

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
    """The root of its URLs."""
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
def inside() -> tuple[Any, Any]:
    return checkpoints.load(None)


@pytest.fixture
def running(deployment: str, inside: tuple[Any, Any]) -> tuple[Any, str]:
    """What the tests of one server ask of it."""
    return SimpleNamespace(engine=SimpleNamespace(tokenizer=inside[1])), deployment
