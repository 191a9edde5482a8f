"""Test that memory of large bodies is returned to the system without slowing decode."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvant.server.middleware import TRIM_BODY_BYTES, BodyLimitMiddleware


async def read_body(scope: Any, receive: Any, send: Any) -> None:
    await receive()


def test_many_large_bodies_trim_the_heap_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trim per body slowed decode: the next forward must fault its pages in again."""
    trims: list[int] = []
    monkeypatch.setattr("kvant.platform.c_libraries.trim_heap", lambda: trims.append(1))
    monkeypatch.setattr("kvant.server.middleware.TRIM_SECONDS", 0.01)
    app, scope = BodyLimitMiddleware(read_body), {"type": "http", "headers": []}

    async def ask(size: int) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": bytes(size)}

        await app(scope, receive, None)  # type: ignore[arg-type]

    async def trimmed(count: int) -> None:
        while len(trims) < count:
            await asyncio.sleep(0.001)

    async def life() -> None:
        await ask(TRIM_BODY_BYTES)
        await asyncio.sleep(0.05)
        assert not trims
        for count in (1, 2):
            for _ in range(20):
                await ask(TRIM_BODY_BYTES + 1)
            await asyncio.wait_for(trimmed(count), 30)
            await asyncio.sleep(0.05)  # no further body
            assert len(trims) == count

    asyncio.run(life())
