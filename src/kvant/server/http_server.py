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

from kvant.server.connections import MAX_HEADER_BYTES, Connection, Connections

KEEP_ALIVE_S = 75  # seconds that a connection without a request is kept


class HttpServer(uvicorn.Server):
    """Ends with what was asked for being answered, and returns; uvicorn's own would kill itself."""

    on_started: Callable[[int], None] | None = None
    on_stopping: Callable[[], None] | None = None

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
        before = {
            one: signal.signal(one, self._handle_signal) for one in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """The second time at once."""
        self.force_exit = self.should_exit
        if self.on_stopping is not None:
            self.on_stopping()
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        self._connections.drop_lingering()
        await asyncio.sleep(0)  # transports that were dropped end before their loop

    async def startup(self, sockets: object = None) -> None:
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started and self.on_started is not None:
            self.on_started(self.port)


def make_server(app: FastAPI, host: str, port: int, grace: int) -> HttpServer:
    """Requests that are under way as it ends have `grace` seconds."""
    return HttpServer(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            http=Connection,
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace,
            lifespan="off",
        )
    )


def check_host(host: str, num_keys: int) -> None:
    """Who does not know a key reaches a server from its own machine alone."""
    if not (num_keys or is_local(host)):
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
