"""A running server with the bundled model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi", reason="pip install 'kvant[server]'")

from kvant import Engine, checkpoints, generate
from kvant.prefixes import Prefixes
from kvant.server import ApiKeys, Service, create_app, make_server
from kvant.server.tracing import RequestTracer


@contextmanager
def serve_model(
    model: Any,
    tokenizer: Any,
    keys: ApiKeys | None = None,
    tracer: RequestTracer | None = None,
    **options: Any,
) -> Iterator[Any]:
    """Return a running service and its base URL."""
    names = ("max_waiting", "max_new_tokens", "declared_pooling")
    settings = {name: options.pop(name) for name in names if name in options}
    options = {"prefixes": Prefixes(None)} | options
    with Engine(model, tokenizer, "affine8", **options) as engine:
        service = Service(engine, "inside", keys or ApiKeys(), **settings)
        app = create_app(service, tracer=tracer)
        server, started = make_server(app, "127.0.0.1", 0, 5), threading.Event()
        server.on_started = lambda port: started.set()
        service.app_server = server  # used by tests of its connections
        thread = threading.Thread(target=server.run, name="served")
        thread.start()
        assert started.wait(30)
        try:
            yield service, f"http://127.0.0.1:{server.port}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def post_and_leave(service: Service, url: str, body: dict[str, Any]) -> None:
    """Post a body, and close the connection once the engine has a request of it."""
    address, before = urlsplit(url), service.engine.stats()["requests"]
    connection = HTTPConnection(address.netloc, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", address.path, json.dumps(body), headers)
    until = time.monotonic() + 60
    while service.engine.stats()["requests"] == before:
        assert time.monotonic() < until
        time.sleep(0.01)
    connection.close()


def generate_alone(bundled_model: tuple[Any, Any], prompt: Any, count: int) -> str:
    """Return what the model generates without a server."""
    steps = generate(*bundled_model, prompt, kv_cache="affine8", max_new_tokens=count)
    return "".join(step.text for step in steps)


@pytest.fixture(scope="session")
def bundled_model() -> tuple[Any, Any]:
    return checkpoints.load(None)


@pytest.fixture(scope="module")
def running(bundled_model: tuple[Any, Any]) -> Iterator[tuple[Service, str]]:
    with serve_model(*bundled_model, max_sequences=8, max_bytes="64MiB") as service:
        yield service
