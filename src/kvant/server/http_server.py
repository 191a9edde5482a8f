"""The uvicorn server: runs an application until a signal, then drains its requests."""

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

KEEP_ALIVE_S = 75  # for a connection without a request


class HttpServer(uvicorn.Server):
    """Drain requests on the first signal, then return instead of re-raising it as uvicorn does."""

    on_started: Callable[[int], None] | None = None
    on_stopping: Callable[[], None] | None = None

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state = self._connections = Connections()

    @property
    def port(self) -> int:
        """The port it listens on, once started."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous_handlers = {
            number: signal.signal(number, self._handle_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Shut down gracefully; at once on the second signal."""
        self.force_exit = self.should_exit
        if self.on_stopping is not None:
            self.on_stopping()
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        self._connections.drop_lingering()
        await asyncio.sleep(0)  # lets the dropped transports close before the loop ends

    async def startup(self, sockets: object = None) -> None:
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started and self.on_started is not None:
            self.on_started(self.port)


def make_server(app: FastAPI, host: str, port: int, grace: int) -> HttpServer:
    """Make a server of an application; at shutdown, running requests have `grace` seconds."""
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
    """Require keys of a server that other machines can reach."""
    if not (num_keys or is_local(host)):
        raise ValueError(
            f"--host {host} without keys: anyone on the network could use the server; give "
            "--api-keys FILE, set KVANT_API_KEYS, or use --host 127.0.0.1"
        )


def is_local(host: str) -> bool:
    """Whether a host name or address is a loopback one, which only this machine reaches."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
