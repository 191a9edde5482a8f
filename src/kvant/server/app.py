"""The ASGI application of a service: routes, error handlers and middleware."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvant.platform import malloc
from kvant.server.connections import MAX_HEADER_BYTES
from kvant.server.errors import add_error_handlers
from kvant.server.response_writers import ErrorResponse, make_error
from kvant.server.routes import router
from kvant.server.service import Service

MAX_BODY_BYTES = 4 << 20
TRIM_BODY_BYTES = 1 << 20  # a larger body is worth a trim of the heap
TRIM_SECONDS = 1.0  # shortest time between trims: the next forward faults its pages in again
BODY_TOO_LARGE_MESSAGE = f"the body exceeds {MAX_BODY_BYTES} bytes"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]", "::1")


def create_app(service: Service, host: str = "127.0.0.1") -> FastAPI:
    """Make the application of a service; without keys, it accepts only local names and `host`."""
    app = FastAPI(
        title="kvant",
        version=version("kvant"),
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}},
    )
    if not len(service.keys):  # against DNS rebinding by web pages
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL_HOSTS, host])
    app.add_middleware(BodyLimitMiddleware)
    app.add_middleware(ResponseCountMiddleware, service=service)
    app.state.service = service  # the router is a module global, shared by all applications
    app.include_router(router)
    add_error_handlers(app)
    return app


class BodyLimitMiddleware:
    """Reject headers and bodies over their limits, and trim the heap after large bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
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
            if body_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, BODY_TOO_LARGE_MESSAGE)
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            if body_bytes > TRIM_BODY_BYTES and self._trim is None:
                self._trim = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._start_trim)

    def _start_trim(self) -> None:
        """Trim the heap in a thread, once for all large bodies since the last trim."""
        self._trim = None
        asyncio.get_running_loop().run_in_executor(None, malloc.trim_heap)


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
