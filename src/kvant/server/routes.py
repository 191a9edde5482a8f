"""The routes. The service is that of the application they are asked in."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from kvant.generation import Messages
from kvant.server.access import FOR_ADMINS, UNKNOWN
from kvant.server.protocol import Chat, Completion, Drawing, Tokenize
from kvant.server.refusals import Wrong, answer_to, told_of
from kvant.server.replies import Chatted, Completed, Reply
from kvant.server.responses import Respond, Responded
from kvant.server.service import Replies, Service
from kvant.server.speech import Listener

log = logging.getLogger("kvant")

WENT = 499  # the client, before it was answered
PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
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
UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def _service(http: Request) -> Service:
    found: Service = http.app.state.service
    return found


Serving = Annotated[Service, Depends(_service)]


async def _tenant(http: Request, service: Serving) -> str:
    """Whose key it is."""
    found = service.keys.asking(http.headers.get("authorization", ""))
    if found is None:
        raise Wrong(UNKNOWN, None, 401, "invalid_api_key")
    return found


Tenant = Annotated[str, Depends(_tenant)]


class TextRequest(Request):
    """A request whose JSON is Unicode text: half of a surrogate pair is refused."""

    async def json(self) -> Any:
        found, body = await super().json(), await self.body()
        if b"\\u" in body or b"\xed" in body or b"\0" in body:  # else it cannot have one
            try:
                json.dumps(found, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                wrong = ord(error.object[error.start])
                raise HTTPException(
                    400, f"the body has U+{wrong:04X}: half of a surrogate pair is no Unicode text"
                ) from None
        return found


class TextRoute(APIRoute):
    """A route that reads bodies as `TextRequest` does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(http: Request) -> Response:
            return await handler(TextRequest(http.scope, http.receive))

        return handle


router = APIRouter(route_class=TextRoute)


# ---- what a server says of itself


@router.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/ready")
async def ready(service: Serving) -> Response:
    status = 200 if service.ready else 503
    return JSONResponse({"status": "ready" if service.ready else "not ready"}, status)


@router.get("/", include_in_schema=False)
async def page() -> Response:
    nonce = secrets.token_urlsafe(16)
    headers = {"Content-Security-Policy": POLICY.format(nonce)} | PLAIN
    return HTMLResponse(PAGE.replace("NONCE", nonce), headers=headers)


@router.get("/v1/stats")
async def stats(service: Serving, tenant: Tenant) -> dict[str, Any]:
    """The totals for an admin; of any other tenant its own figures."""
    return service.stats() if service.keys.is_admin(tenant) else service.stats_of(tenant)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: Serving, tenant: Tenant) -> Response:
    if not service.keys.is_admin(tenant):
        raise Wrong(FOR_ADMINS, None, 403, "insufficient_permissions")
    return PlainTextResponse(service.metrics.told(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/v1/models")
async def models(service: Serving, tenant: Tenant) -> dict[str, Any]:
    return {"object": "list", "data": [_model(service)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Serving, tenant: Tenant) -> dict[str, Any]:
    _check_model(service, name)
    return _model(service)


@router.post("/tokenize")
async def tokenize(asked: Tokenize, service: Serving, tenant: Tenant) -> dict[str, Any]:
    _check_model(service, asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise Wrong("prompt or messages: one of them is needed", "prompt")
    messages = [message.shown for message in asked.messages or ()]
    told = service.prompt(Messages(messages, [one.shown for one in asked.tools or ()]))
    prompt = told if asked.prompt is None else asked.prompt
    tokens = await service.tokens(prompt, tenant)
    most = service.engine.limits.max_context
    return {"tokens": tokens, "count": len(tokens), "max_model_len": most}


# ---- what a server is for


@router.post("/v1/chat/completions", responses=STREAM)
async def chat(asked: Chat, http: Request, service: Serving, tenant: Tenant) -> Response:
    _check_model(service, asked.model)
    replies = await service.ask([service.prompt(asked.shown)], asked, tenant)
    told_by = partial(Chatted, service.engine.tokenizer, service.model, asked)
    return await _replied(told_by, replies, asked, http)


@router.post("/v1/completions", responses=STREAM)
async def completions(
    asked: Completion, http: Request, service: Serving, tenant: Tenant
) -> Response:
    _check_model(service, asked.model)
    replies = await service.ask([*asked.prompts], asked, tenant)
    told_by = partial(Completed, service.engine.tokenizer, service.model, asked)
    return await _replied(told_by, replies, asked, http)


@router.post("/v1/responses", responses=STREAM)
async def responses(told: Respond, http: Request, service: Serving, tenant: Tenant) -> Response:
    _check_model(service, told.model)
    asked = told.chat
    replies = await service.ask([service.prompt(asked.shown)], asked, tenant)
    told_by = partial(Responded, service.engine.tokenizer, service.model, told, asked)
    return await _replied(told_by, replies, asked, http)


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
            return answer_to(error, began=True)
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


async def _events(replies: Replies, reply: Reply) -> AsyncIterator[str]:
    """A stream to its end, or to an error; who does not listen any more ends it."""
    try:
        async for told in replies.events(reply):
            yield told
    except Exception as error:
        log.warning("a stream ended: %r", error)
        yield reply.failed(told_of(error, began=True)[1])
    finally:
        replies.cancel()


async def _until_gone(http: Request, scope: anyio.CancelScope) -> None:
    """End what is done for a client once it is not there any more."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
