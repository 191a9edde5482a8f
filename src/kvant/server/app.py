"""The ASGI application of a service: routes, error handlers and middleware."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import anyio
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import Receive, Scope, Send

from kvant.generation import Messages
from kvant.server import ollama_api
from kvant.server.embeddings_api import (
    EmbeddingBody,
    OllamaEmbedRequest,
    OpenAIEmbeddingRequest,
)
from kvant.server.errors import (
    BadRequest,
    ErrorResponse,
    MessagesError,
    OllamaError,
    add_error_handlers,
    make_error_response,
)
from kvant.server.messages_api import MessagesRequest, PromptRequest
from kvant.server.messages_writer import MessagesWriter
from kvant.server.middleware import (
    MAX_BODY_BYTES,
    MAX_IMAGE_BODY_BYTES,
    BodyLimitMiddleware,
    ResponseCountMiddleware,
)
from kvant.server.ollama_api import (
    ChatLineWriter,
    GenerateLineWriter,
    OllamaChatRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from kvant.server.protocol import (
    OLLAMA_TAG,
    ChatRequest,
    CompletionRequest,
    SamplingParams,
    TokenizeRequest,
)
from kvant.server.response_writers import ChatWriter, CompletionWriter, Reply, ResponseWriter
from kvant.server.responses_api import ResponsesRequest, ResponsesWriter
from kvant.server.service import RequestStreams, Service
from kvant.server.settings import (
    ADMIN_ONLY_MESSAGE,
    UNKNOWN_KEY_MESSAGE,
    read_authorization,
)
from kvant.server.tokenizing import Prompt
from kvant.server.tracing import RequestTracer, TracingMiddleware

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]", "::1")
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnects early
CHAT_PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; "
    "img-src data:; "
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
MESSAGES_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": MessagesError},
    "5XX": {"model": MessagesError},
}
OLLAMA_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OllamaError},
    "5XX": {"model": OllamaError},
}
LINES_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "A response, or a line of JSON for each part of it"}
}
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def _get_service(http: Request) -> Service:
    service: Service = http.app.state.service
    return service


ResultT = TypeVar("ResultT")
CurrentService = Annotated[Service, Depends(_get_service)]


async def _authenticate(http: Request, service: CurrentService) -> str:
    """Return the tenant of a request."""
    tenant = service.keys.authenticate(read_authorization(http.headers))
    if tenant is None:
        raise BadRequest(UNKNOWN_KEY_MESSAGE, None, 401, "invalid_api_key")
    return tenant


Tenant = Annotated[str, Depends(_authenticate)]


async def _check_text(http: Request) -> None:
    """Reject JSON with lone surrogates, which are not Unicode text."""
    body = await http.body()
    # Only a \u escape, a 0xED byte or UTF-16 can encode a surrogate.
    if not (b"\\u" in body or b"\xed" in body or b"\0" in body):
        return
    try:
        json.dumps(await http.json(), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        surrogate = ord(error.object[error.start])
        raise HTTPException(
            400, f"the body has U+{surrogate:04X}: half of a surrogate pair is not Unicode text"
        ) from None
    except ValueError:  # the body is not JSON: its validation reports that
        return


router = APIRouter(dependencies=[Depends(_check_text)])


# ---- status of the server


@router.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/ready")
async def ready(service: CurrentService) -> Response:
    status = 200 if service.is_ready else 503
    return JSONResponse({"status": "ready" if service.is_ready else "not ready"}, status)


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
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
    names = service.model_names
    ids = {"first_id": names[0], "last_id": names[-1], "has_more": False}
    return {"object": "list", "data": [_describe_model(service, name) for name in names]} | ids


@router.get("/v1/models/{name:path}")
async def model(name: str, service: CurrentService, tenant: Tenant) -> dict[str, Any]:
    return _describe_model(service, service.find_model(name))


@router.post("/tokenize")
async def tokenize(
    body: TokenizeRequest, service: CurrentService, tenant: Tenant
) -> dict[str, Any]:
    service.find_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("either prompt or messages is needed", "prompt")
    if body.tools and body.messages is None:
        raise BadRequest("tools need messages: a prompt has no tools", "tools")
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
    prompts = [service.make_prompt(body.template_messages)]
    return await _generate(ChatWriter, prompts, body, service, tenant, http)


@router.post("/v1/completions", responses=STREAM_RESPONSES)
async def completions(
    body: CompletionRequest, http: Request, service: CurrentService, tenant: Tenant
) -> Response:
    return await _generate(CompletionWriter, body.prompts, body, service, tenant, http)


@router.post("/v1/embeddings")
async def embeddings(
    body: OpenAIEmbeddingRequest, http: Request, service: CurrentService, tenant: Tenant
) -> Response:
    return await _embed(body, service.find_model(body.model), service, tenant, http)


@router.post("/v1/responses", responses=STREAM_RESPONSES)
async def responses(
    body: ResponsesRequest, http: Request, service: CurrentService, tenant: Tenant
) -> Response:
    service.find_model(body.model)
    params = body.chat_request
    prompts = [service.make_prompt(params.template_messages)]
    make_writer = partial(ResponsesWriter, body)
    return await _generate(make_writer, prompts, params, service, tenant, http)


@router.post("/v1/messages", responses=STREAM_RESPONSES | MESSAGES_ERRORS)
async def messages(
    body: MessagesRequest, http: Request, service: CurrentService, tenant: Tenant
) -> Response:
    service.find_model(body.model)
    params = body.chat_request
    prompts = [_make_messages_prompt(body, params, service)]
    make_writer = partial(MessagesWriter, body)
    return await _generate(make_writer, prompts, params, service, tenant, http)


@router.post("/v1/messages/count_tokens", responses=MESSAGES_ERRORS)
async def count_tokens(
    body: PromptRequest, service: CurrentService, tenant: Tenant
) -> dict[str, Any]:
    service.find_model(body.model)
    prompt = _make_messages_prompt(body, body.chat_request, service)
    return {"input_tokens": len(await service.tokenize(prompt, tenant))}


def _make_messages_prompt(body: PromptRequest, params: ChatRequest, service: Service) -> Prompt:
    return _make_prompt_with_known_options(body.add_marks(params.template_messages), service)


def _make_prompt_with_known_options(conversation: Messages, service: Service) -> Prompt:
    """Make a prompt, without the options that the chat template does not read."""
    options = {
        name: value
        for name, value in conversation.options.items()
        if service.has_template_variable(name)
    }
    return service.make_prompt(replace(conversation, options=options))


# ---- Ollama's API


@router.get("/api/version")
async def ollama_version() -> dict[str, str]:
    return {"version": ollama_api.API_VERSION}


@router.get("/api/tags", responses=OLLAMA_ERRORS)
async def tags(service: CurrentService, tenant: Tenant) -> dict[str, Any]:
    return {"models": await anyio.to_thread.run_sync(ollama_api.describe_models, service)}


@router.get("/api/ps", responses=OLLAMA_ERRORS)
async def running_models(service: CurrentService, tenant: Tenant) -> dict[str, Any]:
    return {"models": await anyio.to_thread.run_sync(ollama_api.describe_running, service)}


@router.post("/api/show", responses=OLLAMA_ERRORS)
async def show(body: ShowRequest, service: CurrentService, tenant: Tenant) -> dict[str, Any]:
    model = _find_ollama_model(service, body.model or body.name or "")
    return await anyio.to_thread.run_sync(ollama_api.describe_capabilities, service, model)


@router.post("/api/chat", responses=LINES_RESPONSES | OLLAMA_ERRORS)
async def ollama_chat(
    body: OllamaChatRequest, http: Request, service: CurrentService, tenant: Tenant
) -> Response:
    model = _find_ollama_model(service, body.model)
    if not body.messages:  # clients ask to load the model so
        return JSONResponse(ChatLineWriter.describe_load(model))
    params = body.chat_request.model_copy(update={"model": model})
    prompts = [_make_prompt_with_known_options(params.template_messages, service)]
    return await _generate(ChatLineWriter, prompts, params, service, tenant, http)


@router.post("/api/generate", responses=LINES_RESPONSES | OLLAMA_ERRORS)
async def ollama_generate(
    body: OllamaGenerateRequest, http: Request, service: CurrentService, tenant: Tenant
) -> Response:
    model = _find_ollama_model(service, body.model)
    if not body.prompt:
        return JSONResponse(GenerateLineWriter.describe_load(model))
    params = body.params.model_copy(update={"model": model})
    prompt: Prompt = body.prompt
    if isinstance(params, ChatRequest):
        prompt = _make_prompt_with_known_options(params.template_messages, service)
    if body.context:
        service.refuse_image_tokens(body.context, "context")
        prompt = [*body.context, *await service.tokenize(prompt, tenant)]
    return await _generate(GenerateLineWriter, [prompt], params, service, tenant, http)


@router.post("/api/embed", responses=OLLAMA_ERRORS)
async def ollama_embed(
    body: OllamaEmbedRequest, http: Request, service: CurrentService, tenant: Tenant
) -> Response:
    model = _find_ollama_model(service, body.model)
    return await _embed(body, model, service, tenant, http)


def _find_ollama_model(service: Service, name: str) -> str:
    """Return the served name that a client gives, with or without Ollama's tag."""
    plain_names = {model.removesuffix(OLLAMA_TAG): model for model in service.model_names}
    return plain_names.get(name.removesuffix(OLLAMA_TAG)) or service.find_model(name)


def _describe_model(service: Service, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(service.created, UTC)
    description = {
        "id": name,
        "object": "model",
        "created": service.created,
        "type": "model",  # this and the next two: for Anthropic's clients
        "display_name": name,
        "created_at": created.isoformat(),
        "owned_by": "kvant",
        "max_model_len": service.engine.stop_conditions.max_context,
    }
    return description if name == service.model else description | {"parent": service.model}


async def _generate(
    make_writer: Callable[[Any, str, SamplingParams, Reply], ResponseWriter],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    service: Service,
    tenant: str,
    http: Request,
) -> Response:
    """Respond with a stream of events, or with one JSON object once all steps are generated."""
    model = service.find_model(params.model)
    streams = await service.submit(prompts, params, tenant)
    http.state.model, http.state.streams = model, streams.streams  # for the tracing middleware
    try:
        writer = make_writer(service.engine.tokenizer, model, params, streams)
    except Exception:
        streams.cancel()
        raise
    if params.stream:
        return EventStreamResponse(streams.iterate_events(writer), streams, writer.media_type)
    try:
        steps = await _run_while_connected(http, streams.collect_steps)
    except Exception as error:
        return make_error_response(http, error, started=True)
    finally:
        streams.cancel()
    if steps is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(await anyio.to_thread.run_sync(writer.write_all, steps))


class EventStreamResponse(StreamingResponse):
    """A stream of events that cancels its generation when it ends, also by a disconnect."""

    def __init__(
        self, events: AsyncIterator[str], streams: RequestStreams, media_type: str
    ) -> None:
        super().__init__(events, media_type=media_type, headers=STREAM_HEADERS)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.cancel()


async def _embed(
    body: EmbeddingBody, model: str, service: Service, tenant: str, http: Request
) -> Response:
    """Respond with the embeddings of all inputs."""
    body.check_width(service.engine.embedding_width)
    embed = partial(service.embed, body.inputs, tenant, model=model, truncates=body.truncates)
    embeddings = await _run_while_connected(http, embed)
    if embeddings is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    content = await anyio.to_thread.run_sync(body.make_response, model, embeddings)
    return await anyio.to_thread.run_sync(JSONResponse, content)


async def _run_while_connected(
    http: Request, run: Callable[[], Awaitable[ResultT]]
) -> ResultT | None:
    """Return the result of `run`; if the client disconnects, cancel it and return None."""
    result, failure = None, None
    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_on_disconnect, http, group.cancel_scope)
        try:
            result = await run()
        except Exception as error:  # raised below: a task group would wrap it
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


async def _cancel_on_disconnect(http: Request, scope: anyio.CancelScope) -> None:
    """Cancel `scope` when the client disconnects."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def create_app(
    service: Service, host: str = "127.0.0.1", tracer: RequestTracer | None = None
) -> FastAPI:
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
    reads_images = service.engine.vision_model is not None
    max_body_bytes = MAX_IMAGE_BODY_BYTES if reads_images else MAX_BODY_BYTES
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=max_body_bytes)
    app.add_middleware(ResponseCountMiddleware, service=service)
    if tracer is not None:
        app.add_middleware(TracingMiddleware, tracer=tracer, model=service.model)
    app.state.service = service  # the router is a module global, shared by all applications
    app.include_router(router)
    add_error_handlers(app)
    return app
