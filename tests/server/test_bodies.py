"""What large bodies took is given back to the system, and not at the cost of those who decode."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvant.server.app import TRIM_BODY_BYTES, BodyLimitMiddleware


async def read_body(scope: Any, receive: Any, send: Any) -> None:
    await receive()


def test_many_large_bodies_are_one_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trim for each slowed down those who decode: a forward gets its pages anew after it."""
    trims: list[int] = []
    monkeypatch.setattr("kvant.malloc.trim_heap", lambda: trims.append(1))
    monkeypatch.setattr("kvant.server.app.TRIM_SECONDS", 0.01)
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
            await asyncio.sleep(0.05)  # no other one follows
            assert len(trims) == count

    asyncio.run(life())
