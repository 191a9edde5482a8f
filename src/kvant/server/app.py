"""The routes, and what every answer has in common."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import anyio
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvant.errors import CacheError, CapacityError
from kvant.generation import Messages
from kvant.server.protocol import Chat, Completion, Drawing, Tokenize
from kvant.server.replies import Chatted, Completed, Refused, Reply, refused
from kvant.server.responses import Respond, Responded
from kvant.server.service import Busy, Replies, Service, status_of
from kvant.server.speech import Listener

log = logging.getLogger("kvant")

LARGEST = 4 << 20  # bytes of a body
LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")
WENT = 499  # the client, before it was answered
PAGE = Path(__file__).with_name("page.html")
POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PLAIN = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "A reply, or events of it", "content": {"text/event-stream": {}}}
}
KINDS = ("body", "str", "int", "bool", "float", "list")


def create_app(service: Service, host: str = "127.0.0.1") -> FastAPI:
    """What clients of a service see, under the name of the machine itself or of this host."""
    app = FastAPI(
        title="kvant",
        version=version("kvant"),
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": Refused}, "5XX": {"model": Refused}},
    )
    if not len(service.keys):  # a page of somebody else may not ask under a name of its own
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL, host])
    app.add_middleware(Bounded)
    app.add_middleware(Counted, service=service)
    _refuse(app)
    _tell(app, service)
    _answer(app, service)
    return app


def _tell(app: FastAPI, service: Service) -> None:
    """What a server says of itself."""
    tenant = Depends(_tenant_of(service))
    html = PAGE.read_text(encoding="utf-8")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        status = 200 if service.ready else 503
        return JSONResponse({"status": "ready" if service.ready else "not ready"}, status)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        nonce = secrets.token_urlsafe(16)
        headers = {"Content-Security-Policy": POLICY.format(nonce)} | PLAIN
        return HTMLResponse(html.replace("NONCE", nonce), headers=headers)

    @app.get("/v1/stats", dependencies=[tenant])
    async def stats() -> dict[str, Any]:
        return service.stats()

    @app.get("/metrics", dependencies=[tenant], response_class=PlainTextResponse)
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.told(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/v1/models", dependencies=[tenant])
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}", dependencies=[tenant])
    async def model(name: str) -> dict[str, Any]:
        _check_model(service, name)
        return _model(service)

    @app.post("/tokenize", dependencies=[tenant])
    async def tokenize(asked: Tokenize) -> dict[str, Any]:
        _check_model(service, asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise Wrong("prompt or messages: one of them is needed", "prompt")
        messages = [message.shown for message in asked.messages or ()]
        tools = [one.shown for one in asked.tools or ()]
        prompt = (
            asked.prompt if asked.prompt is not None else service.prompt(Messages(messages, tools))
        )
        tokens = await anyio.to_thread.run_sync(service.tokens, prompt)
        most = service.engine.limits.max_context
        return {"tokens": tokens, "count": len(tokens), "max_model_len": most}


def _answer(app: FastAPI, service: Service) -> None:
    """What a server is for."""
    tenant = Depends(_tenant_of(service))
    known = service.engine.tokenizer, service.model

    @app.post("/v1/chat/completions", responses=STREAM)
    async def chat(asked: Chat, http: Request, tenant: str = tenant) -> Response:
        _check_model(service, asked.model)
        replies = await service.ask([service.prompt(asked.shown)], asked, tenant)
        return await _replied(partial(Chatted, *known, asked), replies, asked, http)

    @app.post("/v1/completions", responses=STREAM)
    async def completions(asked: Completion, http: Request, tenant: str = tenant) -> Response:
        _check_model(service, asked.model)
        replies = await service.ask([*asked.prompts], asked, tenant)
        return await _replied(partial(Completed, *known, asked), replies, asked, http)

    @app.post("/v1/responses", responses=STREAM)
    async def responses(told: Respond, http: Request, tenant: str = tenant) -> Response:
        _check_model(service, told.model)
        asked = told.chat
        replies = await service.ask([service.prompt(asked.shown)], asked, tenant)
        return await _replied(partial(Responded, *known, told, asked), replies, asked, http)


async def _replied(
    told_by: Callable[[Sequence[Listener]], Reply], replies: Replies, asked: Drawing, http: Request
) -> Response:
    """Whole, or as it comes."""
    try:
        reply = told_by(replies.listeners)
    except Exception:
        replies.cancel()
        raise
    if asked.stream:
        return Streamed(_events(replies, reply), replies)
    spoken = None
    async with anyio.create_task_group() as group:
        group.start_soon(_until_gone, http, group.cancel_scope)
        try:
            spoken = await replies.spoken()
        except Exception as error:
            return _error(error, began=True)
        finally:
            replies.cancel()
            group.cancel_scope.cancel()
    if spoken is None:
        return Response(status_code=WENT)
    return JSONResponse(await anyio.to_thread.run_sync(reply.all, spoken, replies.usage))


class Streamed(StreamingResponse):
    """A stream of events; however it ends, nothing more is said for it."""

    def __init__(self, events: AsyncIterator[str], replies: Replies) -> None:
        super().__init__(events, media_type="text/event-stream", headers=UNBUFFERED)
        self._replies = replies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._replies.cancel()


UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def _events(replies: Replies, reply: Reply) -> AsyncIterator[str]:
    """A stream to its end, or to an error; who does not listen any more ends it."""
    try:
        async for told in replies.events(reply):
            yield told
    except Exception as error:
        log.warning("a stream ended: %r", error)
        yield reply.failed(_told(error, began=True)[1])
    finally:
        replies.cancel()


async def _until_gone(http: Request, scope: anyio.CancelScope) -> None:
    """End what is done for a client once it is not there any more."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


# ---- who asks, and for which model


class Wrong(ValueError):
    """Something a client said, and the field in which it did."""

    def __init__(self, told: str, param: str | None, status: int = 400, code: str | None = None):
        super().__init__(told)
        self.param, self.status, self.code = param, status, code


def _tenant_of(service: Service) -> Callable[[Request], Awaitable[str]]:
    async def tenant(http: Request) -> str:
        kind, _, key = http.headers.get("authorization", "").partition(" ")
        found = service.keys.tenant(key.strip() if kind.lower() == "bearer" else "")
        if found is None:
            raise Wrong(
                "no key, or one that is not known: Authorization: Bearer KEY",
                None,
                401,
                "invalid_api_key",
            )
        return found

    return tenant


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "kvant",
        "max_model_len": service.engine.limits.max_context,
    }


def _check_model(service: Service, name: str | None) -> None:
    if name not in (None, "", service.model):
        known = f"this server has {service.model!r}"
        raise Wrong(f"model {name!r}: {known}", "model", 404, "model_not_found")


# ---- what is refused, and how


def _refuse(app: FastAPI) -> None:
    @app.exception_handler(ValidationError)  # of a request that becomes another one
    @app.exception_handler(RequestValidationError)
    async def invalid(http: Request, error: RequestValidationError | ValidationError) -> Response:
        first = max(error.errors(), key=lambda one: len(one["loc"]))  # of a choice, the nearest
        place = [str(part) for part in first["loc"] if not _is_kind(part)]
        param = ".".join(part for part, _ in groupby(place)) or None  # once, what names a kind too
        if first["type"] == "extra_forbidden":
            told, code = f"{param}: not supported", "unsupported_parameter"
        elif first["type"] == "json_invalid":
            told, param, code = f"the body is no JSON: {first['ctx']['error']}", None, None
        elif first["type"] == "value_error":
            told, code = str(first["ctx"]["error"]), None
            field = told.partition(":")[0]
            param = param or (field if field.isidentifier() else None)
        elif param is None:
            told = "a body of a JSON object is needed, with Content-Type: application/json"
            code = None
        else:
            told, code = f"{param}: {first['msg']}", None
        return JSONResponse(refused(told, "invalid_request_error", param, code), 400)

    @app.exception_handler(HTTPException)
    async def http_error(http: Request, error: HTTPException) -> Response:
        return JSONResponse(
            refused(str(error.detail), "invalid_request_error"), error.status_code, error.headers
        )

    @app.exception_handler(Exception)
    async def failed(http: Request, error: Exception) -> Response:
        return _error(error)

    for kind in (ValueError, TypeError, Wrong):
        app.add_exception_handler(kind, failed)
    app.add_exception_handler(CacheError, failed)


def _is_kind(part: str | int) -> bool:
    """Is this part of a place the name of a type, which was tried there?"""
    return isinstance(part, str) and (part in KINDS or "[" in part or part[:1].isupper())


def _told(error: BaseException, *, began: bool = False) -> tuple[int, dict[str, Any]]:
    status, kind = status_of(error, began=began)
    param = code = None
    if isinstance(error, Wrong):
        status, param, code = error.status, error.param, error.code
    elif isinstance(error, CapacityError):  # as clients know it who cut a conversation then
        code = "context_length_exceeded"
    told = str(error) if status < 500 or status == 503 else "the request failed"
    return status, refused(told, kind, param, code)


def _error(error: BaseException, *, began: bool = False) -> Response:
    status, told = _told(error, began=began)
    if status >= 500:
        log.error("a request failed: %r", error)
    headers = {"Retry-After": str(error.seconds)} if isinstance(error, Busy) else None
    return JSONResponse(told, status, headers)


class Bounded:
    """Bodies that are too long are refused as they come."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        came = 0

        async def counted() -> Message:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > LARGEST:
                raise HTTPException(413, f"a body of more than {LARGEST} bytes")
            return message

        await self._app(scope, counted, send)


class Counted:
    """Answers, by their status."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._answers = service.metrics.answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = False

        async def sending(message: Message) -> None:
            nonlocal told
            if message["type"] == "http.response.start":
                self._answers.labels(str(message["status"])).inc()
                told = True
            await send(message)

        try:
            await self._app(scope, receive, sending if scope["type"] == "http" else send)
        except Exception:
            if not told:  # somebody further out answers
                self._answers.labels("500").inc()
            raise
