"""HTTP routes; each takes its service from the state of the application that serves it."""

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
from kvant.server.access import ADMIN_ONLY_MESSAGE, UNKNOWN_KEY_MESSAGE
from kvant.server.errors import BadRequest, describe_error, make_error_response
from kvant.server.output_parsing import OutputParser
from kvant.server.protocol import ChatRequest, CompletionRequest, SamplingParams, TokenizeRequest
from kvant.server.response_writers import ChatWriter, CompletionWriter, ResponseWriter
from kvant.server.responses_api import ResponsesRequest, ResponsesWriter
from kvant.server.service import RequestStreams, Service

log = logging.getLogger("kvant")

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnects early
CHAT_PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
STREAM_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "A response, or a stream of events", "content": {"text/event-stream": {}}}
}
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def _get_service(http: Request) -> Service:
    service: Service = http.app.state.service
    return service


CurrentService = Annotated[Service, Depends(_get_service)]


async def _authenticate(http: Request, service: CurrentService) -> str:
    """Return the tenant of a request."""
    tenant = service.keys.authenticate(http.headers.get("authorization", ""))
    if tenant is None:
        raise BadRequest(UNKNOWN_KEY_MESSAGE, None, 401, "invalid_api_key")
    return tenant


Tenant = Annotated[str, Depends(_authenticate)]


class TextRequest(Request):
    """A request that rejects JSON with lone surrogates, which are not Unicode text."""

    async def json(self) -> Any:
        value, body = await super().json(), await self.body()
        # Only a \u escape, a 0xED byte or UTF-16 can encode a surrogate.
        if b"\\u" in body or b"\xed" in body or b"\0" in body:
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                surrogate = ord(error.object[error.start])
                raise HTTPException(
                    400,
                    f"the body has U+{surrogate:04X}: half of a surrogate pair is not Unicode text",
                ) from None
        return value


class TextRoute(APIRoute):
    """A route whose handlers get a `TextRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(http: Request) -> Response:
            return await handler(TextRequest(http.scope, http.receive))

        return handle


router = APIRouter(route_class=TextRoute)


# ---- status of the server


@router.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/ready")
async def ready(service: CurrentService) -> Response:
    status = 200 if service.is_ready else 503
    return JSONResponse({"status": "ready" if service.is_ready else "not ready"}, status)


@router.get("/", include_in_schema=False)
async def page() -> Response:
    nonce = secrets.token_urlsafe(16)
    headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY.format(nonce)} | PAGE_HEADERS
    return HTMLResponse(CHAT_PAGE.replace("NONCE", nonce), headers=headers)


@router.get("/v1/stats")
async def stats(service: CurrentService, tenant: Tenant) -> dict[str, Any]:
    """Return the totals of all tenants to an admin, and its own counts to any other tenant."""
    return service.stats() if service.keys.is_admin(tenant) else service.tenant_stats(tenant)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: CurrentService, tenant: Tenant) -> Response:
    if not service.keys.is_admin(tenant):
        raise BadRequest(ADMIN_ONLY_MESSAGE, None, 403, "insufficient_permissions")
    return PlainTextResponse(service.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/v1/models")
async def models(service: CurrentService, tenant: Tenant) -> dict[str, Any]:
    return {"object": "list", "data": [_describe_model(service)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, service: CurrentService, tenant: Tenant) -> dict[str, Any]:
    _check_model(service, name)
    return _describe_model(service)


@router.post("/tokenize")
async def tokenize(
    body: TokenizeRequest, service: CurrentService, tenant: Tenant
) -> dict[str, Any]:
    _check_model(service, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("either prompt or messages is needed", "prompt")
    messages = [message.template_dict for message in body.messages or ()]
    tools = [tool.template_dict for tool in body.tools or ()]
    chat_prompt = service.make_prompt(Messages(messages, tools))
    prompt = chat_prompt if body.prompt is None else body.prompt
    tokens = await service.tokenize(prompt, tenant)
    max_context = service.engine.stop_conditions.max_context
    return {"tokens": tokens, "count": len(tokens), "max_model_len": max_context}


# ---- generation


@router.post("/v1/chat/completions", responses=STREAM_RESPONSES)
async def chat(
    body: ChatRequest, http: Request, service: CurrentService, tenant: Tenant
) -> Response:
    _check_model(service, body.model)
    streams = await service.submit([service.make_prompt(body.template_messages)], body, tenant)
    make_writer = partial(ChatWriter, service.engine.tokenizer, service.model, body)
    return await _make_response(make_writer, streams, body, http)


@router.post("/v1/completions", responses=STREAM_RESPONSES)
async def completions(
    body: CompletionRequest, http: Request, service: CurrentService, tenant: Tenant
) -> Response:
    _check_model(service, body.model)
    streams = await service.submit([*body.prompts], body, tenant)
    make_writer = partial(CompletionWriter, service.engine.tokenizer, service.model, body)
    return await _make_response(make_writer, streams, body, http)


@router.post("/v1/responses", responses=STREAM_RESPONSES)
async def responses(
    body: ResponsesRequest, http: Request, service: CurrentService, tenant: Tenant
) -> Response:
    _check_model(service, body.model)
    chat_request = body.chat_request
    streams = await service.submit(
        [service.make_prompt(chat_request.template_messages)], chat_request, tenant
    )
    make_writer = partial(
        ResponsesWriter, service.engine.tokenizer, service.model, body, chat_request
    )
    return await _make_response(make_writer, streams, chat_request, http)


def _describe_model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "kvant",
        "max_model_len": service.engine.stop_conditions.max_context,
    }


def _check_model(service: Service, name: str | None) -> None:
    if name not in (None, "", service.model):
        message = f"model {name!r}: this server has {service.model!r}"
        raise BadRequest(message, "model", 404, "model_not_found")


async def _make_response(
    make_writer: Callable[[Sequence[OutputParser]], ResponseWriter],
    streams: RequestStreams,
    params: SamplingParams,
    http: Request,
) -> Response:
    """Respond with a stream of events, or with one JSON object once all steps are generated."""
    try:
        writer = make_writer(streams.parsers)
    except Exception:
        streams.cancel()
        raise
    if params.stream:
        return EventStreamResponse(_iterate_events(streams, writer), streams)
    steps = None
    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_on_disconnect, http, group.cancel_scope)
        try:
            steps = await streams.collect_steps()
        except Exception as error:
            return make_error_response(error, started=True)
        finally:
            streams.cancel()
            group.cancel_scope.cancel()
    if steps is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(await anyio.to_thread.run_sync(writer.write_all, steps, streams.usages))


class EventStreamResponse(StreamingResponse):
    """A stream of events that cancels its generation when it ends, also by a disconnect."""

    def __init__(self, events: AsyncIterator[str], streams: RequestStreams) -> None:
        super().__init__(events, media_type="text/event-stream", headers=STREAM_HEADERS)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.cancel()


async def _iterate_events(streams: RequestStreams, writer: ResponseWriter) -> AsyncIterator[str]:
    """Yield the events of a response; an error becomes the last event."""
    try:
        async for event in streams.iterate_events(writer):
            yield event
    except Exception as error:
        log.warning("a response stream failed: %r", error)
        yield writer.write_error(describe_error(error, started=True)[1])
    finally:
        streams.cancel()


async def _cancel_on_disconnect(http: Request, scope: anyio.CancelScope) -> None:
    """Cancel `scope` when the client disconnects."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
