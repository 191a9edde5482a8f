"""A server until somebody ends it."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from kvant.server.connections import MAX_HEADERS, Connection, Connections

IDLE = 75  # seconds that a connection without a request is kept


class Server(uvicorn.Server):
    """Ends with what was asked for being answered, and returns; uvicorn's own would kill itself."""

    begun: Callable[[int], None] | None = None
    ending: Callable[[], None] | None = None

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state = self._connections = Connections()

    @property
    def port(self) -> int:
        """Where it listens, once it has begun."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self._end) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def _end(self, number: int, frame: FrameType | None) -> None:
        """The second time at once."""
        self.force_exit = self.should_exit
        if self.ending is not None:
            self.ending()
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        self._connections.drop_refused()
        await asyncio.sleep(0)  # transports that were dropped end before their loop

    async def startup(self, sockets: object = None) -> None:
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started and self.begun is not None:
            self.begun(self.port)


def server_of(app: FastAPI, host: str, port: int, grace: int) -> Server:
    """Requests that are under way as it ends have `grace` seconds."""
    return Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            http=Connection,
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADERS,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=grace,
            lifespan="off",
        )
    )


def check_host(host: str, keys: int) -> None:
    """Who does not know a key reaches a server from its own machine alone."""
    if not (keys or is_local(host)):
        raise ValueError(
            f"--host {host} without keys: anybody could ask; give --api-keys FILE or set "
            "KVANT_API_KEYS, or take 127.0.0.1"
        )


def is_local(host: str) -> bool:
    """Is it a name of this machine for itself?"""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
