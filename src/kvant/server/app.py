"""A service as an application: its routes, and what every answer has in common."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvant import malloc
from kvant.server.connections import MAX_HEADER_BYTES
from kvant.server.errors import add_error_handlers
from kvant.server.response_writers import ErrorResponse, make_error
from kvant.server.routes import router
from kvant.server.service import Service

MAX_BODY_BYTES = 4 << 20  # bytes of a body
TRIM_BODY_BYTES = 1 << 20  # bytes of one whose objects take so much that the system gets them back
TRIM_SECONDS = 1.0  # between two trims: the pages that a forward uses have to come back after each
BODY_TOO_LARGE_MESSAGE = f"a body of more than {MAX_BODY_BYTES} bytes"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]", "::1")


def create_app(service: Service, host: str = "127.0.0.1") -> FastAPI:
    """What clients of a service see, under the name of the machine itself or of this host."""
    app = FastAPI(
        title="kvant",
        version=version("kvant"),
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}},
    )
    if not len(service.keys):  # a page of somebody else may not ask under a name of its own
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL_HOSTS, host])
    app.add_middleware(BodyLimitMiddleware)
    app.add_middleware(ResponseCountMiddleware, service=service)
    app.state.service = service  # routes are of all applications, and keep nothing of one
    app.include_router(router)
    add_error_handlers(app)
    return app


class BodyLimitMiddleware:
    """Refuse bodies that are too long as they arrive; free the memory that large ones took."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._trim: asyncio.TimerHandle | None = None  # the next one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            error = make_error(
                f"headers of more than {MAX_HEADER_BYTES} bytes", "invalid_request_error"
            )
            await JSONResponse(error, 431)(scope, receive, send)
            return
        came = 0

        async def receive_counted() -> Message:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > MAX_BODY_BYTES:
                raise HTTPException(413, BODY_TOO_LARGE_MESSAGE)
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            if came > TRIM_BODY_BYTES and self._trim is None:
                self._trim = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._start_trim)

    def _start_trim(self) -> None:
        """Trim for all large bodies since the last time, beside the event loop."""
        self._trim = None
        asyncio.get_running_loop().run_in_executor(None, malloc.trim_heap)


class ResponseCountMiddleware:
    """Answers, by their status."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._responses = service.metrics.responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = False

        async def sending(message: Message) -> None:
            nonlocal told
            if message["type"] == "http.response.start":
                self._responses.labels(str(message["status"])).inc()
                told = True
            await send(message)

        try:
            await self._app(scope, receive, sending if scope["type"] == "http" else send)
        except Exception:
            if not told:  # somebody further out answers
                self._responses.labels("500").inc()
            raise
