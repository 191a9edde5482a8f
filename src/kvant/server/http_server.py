"""The uvicorn server: runs an application until a signal, then drains its requests.

The server limits the number of connections, their idle time and the size of headers. At the limit,
a new connection replaces the one that has been idle longest: idle clients cannot lock others out.

    state                   idle    deadline
    receiving a request     yes     REQUEST_TIMEOUT_S: status 408, or close if no byte arrived
    answering it            no      none
    client stops reading    yes     REQUEST_TIMEOUT_S: close
    between requests        yes     KEEP_ALIVE_S: close
"""

from __future__ import annotations

import asyncio
import http
import ipaddress
import json
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kvant.server.errors import make_error

MAX_HEADER_BYTES = 64 << 10  # request line and headers together
REQUEST_TIMEOUT_S = 60.0  # from connecting, or the first byte, to the end of the request
KEEP_ALIVE_S = 75  # for a connection without a request
LINGER_TIMEOUT_S = 1.0  # for a client to read an error; a close during its upload would reset TCP
MAX_LINGERING = 64  # connections
SHARE_OF_FILES = 0.75  # of the process's file descriptors, for connections


def compute_max_connections() -> int:
    """Compute a limit on connections that leaves file descriptors for everything else."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if files == resource.RLIM_INFINITY else max(16, int(SHARE_OF_FILES * files))


class Connections(ServerState):
    """All connections of a server; the idle ones ordered, longest idle first."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = compute_max_connections()
        self.idle_connections: dict[Connection, None] = {}
        self.lingering: set[Connection] = set()  # closing, until their client has read an error

    def make_room(self) -> bool:
        """Close idle connections to make room for the newest; return whether there is room.

        The newest is idle, too, and is never closed here.
        """
        while len(self.connections) > self.limit and len(self.idle_connections) > 1:
            next(iter(self.idle_connections)).drop()
        return len(self.connections) <= self.limit


class Connection(H11Protocol):
    """A connection with deadlines, limits, and errors in OpenAI's shape."""

    _deadline: asyncio.TimerHandle | None = None

    @property
    def _connections(self) -> Connections:
        return cast(Connections, self.server_state)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_deadline()
        if not self._connections.make_room():
            self._refuse(503, f"all {self._connections.limit} connections are in use: retry later")

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self._connections.lingering.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self in self._connections.lingering:
            return
        if self._deadline is None and self._is_between_requests:
            self._start_deadline()
        super().data_received(data)
        self._clear_deadline_if_answering()

    def pause_writing(self) -> None:
        """Start the deadline: a client that stops reading counts as idle."""
        super().pause_writing()
        self._start_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._is_between_requests and self._deadline is not None:
            self._start_deadline()  # for the rest of the reply
        else:
            self._clear_deadline_if_answering()

    def on_response_complete(self) -> None:
        """Mark the connection idle, unless a pipelined request is already in progress."""
        if not self.flow.write_paused:  # else the client has yet to read the reply
            self._clear_deadline()
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._is_between_requests:
            self._connections.idle_connections[self] = None
        elif self.cycle.more_body:
            self._start_deadline()

    def send_400_response(self, msg: str) -> None:
        """Reject invalid HTTP and oversized headers; uvicorn calls this in an `except` block."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        if status == http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            msg = f"the request line and headers exceed {MAX_HEADER_BYTES} bytes"
        self._refuse(status, msg)

    def drop(self) -> None:
        """Close the connection at once and discard unsent data."""
        self._clear_deadline()
        self.connections.discard(self)
        self._connections.lingering.discard(self)
        self.transport.abort()

    @property
    def _is_between_requests(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def _start_deadline(self) -> None:
        """Mark the connection idle and close it after REQUEST_TIMEOUT_S."""
        self._clear_deadline()
        self._connections.idle_connections[self] = None
        self._deadline = self.loop.call_later(REQUEST_TIMEOUT_S, self._expire)

    def _clear_deadline_if_answering(self) -> None:
        """Clear the deadline if a complete request is being answered and the client reads."""
        is_answering = not self._is_between_requests and not self.cycle.more_body
        if is_answering and not self.flow.write_paused:
            self._clear_deadline()

    def _clear_deadline(self) -> None:
        self._connections.idle_connections.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        has_partial_request = bool(self.conn.trailing_data[0]) or not self._is_between_requests
        if has_partial_request and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(408, f"no complete request within {REQUEST_TIMEOUT_S:.0f} seconds")
        else:
            self.drop()

    def _refuse(self, status: int, reason: str) -> None:
        """Send an error and close the connection, lingering so that the client can read it."""
        error_type = "server_error" if status >= 500 else "invalid_request_error"
        body = json.dumps(make_error(reason, error_type)).encode()
        phrase = http.HTTPStatus(status).phrase
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if self.cycle is not None:
            self.cycle.disconnected = True  # uvicorn drops what the application still sends
            self.cycle.message_event.set()
        self._clear_deadline()
        self.connections.discard(self)
        self.transport.write(head.encode() + body)
        if self.transport.can_write_eof() and len(self._connections.lingering) < MAX_LINGERING:
            self.transport.write_eof()
            self._connections.lingering.add(self)
            self._deadline = self.loop.call_later(LINGER_TIMEOUT_S, self.drop)
        else:
            self.transport.close()


class HttpServer(uvicorn.Server):
    """A server that drains requests on a signal and returns; uvicorn would re-raise the signal."""

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
        for connection in list(self._connections.lingering):
            connection.drop()
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
    """Raise an error for a server without keys that other machines can reach."""
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
