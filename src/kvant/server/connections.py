"""Limits on the connections of a server: their number, idle time and header size.

At the limit, a new connection replaces the one that has been idle longest, so idle connections
lock no client out.

    state                   idle    deadline
    receiving a request     yes     REQUEST_TIMEOUT_S: status 408, or close if no byte arrived
    answering it            no      none
    client stops reading    yes     REQUEST_TIMEOUT_S: close
    between requests        yes     uvicorn's keep-alive: close
"""

from __future__ import annotations

import asyncio
import http
import json
import resource
import sys
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kvant.server.response_writers import make_error

MAX_HEADER_BYTES = 64 << 10  # request line and headers together
REQUEST_TIMEOUT_S = 60.0  # for a complete request, from the connection or its first byte
LINGER_TIMEOUT_S = 1.0  # for a client to read an error; closing at once would reset its upload
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
        """Close idle connections to make room for the newest; return whether there is room."""
        while len(self.connections) > self.limit and len(self.idle_connections) > 1:
            next(iter(self.idle_connections)).drop()
        return len(self.connections) <= self.limit

    def drop_lingering(self) -> None:
        for connection in list(self.lingering):
            connection.drop()


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
        self._clear_deadline_if_answering()

    def on_response_complete(self) -> None:
        """Mark the connection idle; a pipelined request may already be in progress."""
        self._clear_deadline()
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._is_between_requests:
            self._connections.idle_connections[self] = None
        elif self.cycle.more_body:
            self._start_deadline()

    def send_400_response(self, msg: str) -> None:
        """Reject invalid HTTP and oversized headers; called inside the exception handler."""
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
            self.cycle.disconnected = True  # the application writes no more
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
