"""What every request of the server passes: limits on its size, and counts of the responses."""

from __future__ import annotations

import asyncio

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvant.platform import c_libraries
from kvant.server.errors import make_error
from kvant.server.http_server import MAX_HEADER_BYTES
from kvant.server.service import Service

MAX_BODY_BYTES = 4 << 20
TRIM_BODY_BYTES = 1 << 20  # a larger body is worth a trim of the heap
TRIM_SECONDS = 1.0  # shortest time between trims: the next forward faults its pages in again
MAX_IMAGE_BODY_BYTES = 32 << 20  # of a server whose model reads images


class BodyLimitMiddleware:
    """Reject headers and bodies over their limits, and trim the heap after large bodies."""

    def __init__(self, app: ASGIApp, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._trim: asyncio.TimerHandle | None = None  # the next trim

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            error = make_error(
                f"the headers exceed {MAX_HEADER_BYTES} bytes", "invalid_request_error"
            )
            await JSONResponse(error, 431)(scope, receive, send)
            return
        body_bytes = 0

        async def receive_counted() -> Message:
            nonlocal body_bytes
            message = await receive()
            body_bytes += len(message.get("body", b""))
            if body_bytes > self._max_body_bytes:
                raise HTTPException(413, f"the body exceeds {self._max_body_bytes} bytes")
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            if body_bytes > TRIM_BODY_BYTES and self._trim is None:
                self._trim = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._start_trim)

    def _start_trim(self) -> None:
        """Trim the heap in a thread, once for all large bodies since the last trim."""
        self._trim = None
        asyncio.get_running_loop().run_in_executor(None, c_libraries.trim_heap)


class ResponseCountMiddleware:
    """Count responses by status."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._responses = service.metrics.responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def send_counted(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                self._responses.labels(str(message["status"])).inc()
                has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_counted if scope["type"] == "http" else send)
        except Exception:
            if not has_started:  # an outer middleware responds with 500
                self._responses.labels("500").inc()
            raise
