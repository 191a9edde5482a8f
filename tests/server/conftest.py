"""A server with the model inside the package, as it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="pip install 'kvant[server]'")

from kvant import Engine, checkpoints
from kvant.prefixes import Prefixes
from kvant.server import ApiKeys, Service, create_app, make_server


@contextmanager
def served(model: Any, tokenizer: Any, keys: ApiKeys | None = None, **given: Any) -> Iterator[Any]:
    """A service under way, and the root of its URLs."""
    limits = {name: given.pop(name) for name in ("max_waiting", "max_new_tokens") if name in given}
    with Engine(model, tokenizer, "affine8", prefixes=Prefixes(None), **given) as engine:
        service = Service(engine, "inside", keys or ApiKeys(), **limits)
        server, begun = make_server(create_app(service), "127.0.0.1", 0, 5), threading.Event()
        server.on_started = lambda port: begun.set()
        service.app_server = server  # for tests of its connections
        thread = threading.Thread(target=server.run, name="served")
        thread.start()
        assert begun.wait(30)
        try:
            yield service, f"http://127.0.0.1:{server.port}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture(scope="session")
def inside() -> tuple[Any, Any]:
    return checkpoints.load(None)


@pytest.fixture(scope="module")
def running(inside: tuple[Any, Any]) -> Iterator[tuple[Service, str]]:
    with served(*inside, max_sequences=8, max_bytes="64MiB") as found:
        yield found
