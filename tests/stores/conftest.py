"""Servers shared by the tests of a file, and every type of store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvant.stores import Store, open_store
from stores.servers import QUOTED, Server, redis_server, s3_server

KINDS = ("folder", "memory", "redis", "unix", "s3")


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a store of each type."""
    store_type = request.param
    if store_type == "folder":
        return str(tmp_path / "store")
    if store_type == "memory":
        pytest.importorskip("obstore", reason="obstore is not installed: the extra `object`")
        return "memory://"
    server: Server = request.getfixturevalue("redis" if store_type == "unix" else store_type)
    return f"unix://:{QUOTED}@{server.socket}" if store_type == "unix" else server.url


@pytest.fixture
def store(url: str) -> Store:
    return open_store(url)
