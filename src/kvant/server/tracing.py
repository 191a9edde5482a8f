"""Spans for OpenTelemetry: one for each request, with a child for each of its phases.

    POST /v1/chat/completions    |---------------------------------------|
        queue                      |-----------|
        prefix_lookup                 |-|
        store                            |-----|
        prefill                                |--------|
        decode                                          |-----------|

The engine measures the phases (engine/timeline.py). The event loop makes the spans of a request
afterwards, when its response and its streams have ended. Spans have counts, no texts: neither
prompts nor replies, error messages, keys or tenants.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvant.engine import Stream

# OpenTelemetry is optional: without it, this module can be imported, and open_tracer() yields None.
if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer, TracerProvider

log = logging.getLogger("kvant")

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP_PROTOCOL = "http/protobuf"
OPERATIONS = {  # of the requests that are traced, by path; the names are those of OpenTelemetry
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
}


@contextmanager
def open_tracer() -> Iterator[RequestTracer | None]:
    """Yield a tracer if OpenTelemetry is configured, else None; at the end, write its spans out.

    It is configured by a global tracer provider, which opentelemetry-instrument sets, or by the
    address of a collector in one of `ENDPOINT_VARIABLES`.
    """
    with ExitStack() as cleanup:
        provider = _find_global_provider()
        variable = next(filter(os.environ.get, ENDPOINT_VARIABLES), None)
        if provider is None and variable is not None:
            provider = _make_provider(variable, cleanup)
        if provider is None:
            yield None
            return
        tracer = RequestTracer(provider.get_tracer("kvant", version("kvant")))
        cleanup.callback(tracer.close)  # before the provider is shut down
        yield tracer


def _find_global_provider() -> TracerProvider | None:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    # The API has no other sign that none is set.
    return None if isinstance(provider, trace.ProxyTracerProvider) else provider


def _make_provider(variable: str, cleanup: ExitStack) -> TracerProvider | None:
    """Make a provider that exports to the collector that `variable` names.

    If the packages are missing, warn and return None: the variable may be set machine-wide.
    """
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    protocol = next(filter(None, map(os.environ.get, PROTOCOL_VARIABLES)), HTTP_PROTOCOL)
    if protocol != HTTP_PROTOCOL:
        log.warning(
            "%s is set, but requests are not traced: protocol %s, only %s is supported",
            variable,
            protocol,
            HTTP_PROTOCOL,
        )
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning(
            "%s is set, but requests are not traced: %s; pip install 'kvant[otel]'", variable, error
        )
        return None
    # OTEL_SERVICE_NAME overrides the name.
    resource = Resource.create({"service.name": "kvant"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    cleanup.callback(provider.shutdown)
    return provider


@dataclass(eq=False)
class RequestTrace:
    """What is measured of a request until its spans are made; times of time.monotonic_ns()."""

    path: str
    model: str
    parent: Context  # of the client's traceparent, or the current one
    start_ns: int
    end_ns: int = 0
    status: int | None = None  # of the response; None: it did not begin
    exception_type: str | None = None  # of an error that left the application
    streams: Sequence[Stream] = ()  # one for each prompt; none if the request was refused

    @property
    def error_type(self) -> str | None:
        """An exception's class, `cancelled`, or a status from 500 on; else None."""
        errors = [stream.error for stream in self.streams if stream.error is not None]
        if errors:
            return type(errors[0]).__name__
        if self.exception_type is not None:
            return self.exception_type
        if any(stream.outcome != "finished" for stream in self.streams):
            return "cancelled"
        return str(self.status) if self.status is not None and self.status >= 500 else None

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the request's span, by OpenTelemetry's names where it has one."""
        attributes: dict[str, Any] = {
            "http.request.method": "POST",
            "http.route": self.path,
            "gen_ai.operation.name": OPERATIONS[self.path],
            "gen_ai.provider.name": "kvant",
        }
        if self.status is not None:
            attributes["http.response.status_code"] = self.status
        if self.error_type is not None:
            attributes["error.type"] = self.error_type
        if not self.streams:
            return attributes
        usages = [stream.usage for stream in self.streams]
        reasons = [
            reason or stream.outcome for stream in self.streams for reason in stream.finish_reasons
        ]
        return attributes | {
            "gen_ai.request.model": self.model,
            "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in usages),
            "gen_ai.usage.cache_read.input_tokens": sum(usage.cached_tokens for usage in usages),
            "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in usages),
            "gen_ai.response.finish_reasons": reasons,
            "kvant.restored_tokens": sum(usage.restored_tokens for usage in usages),
            "kvant.swaps": sum(stream.timeline.num_swaps for stream in self.streams),
        }


class RequestTracer:
    """Make the spans of requests, once they have ended."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open = set[RequestTrace]()  # responded to; some of their streams have not ended

    def begin(self, scope: Scope, model: str) -> RequestTrace:
        """Begin the trace of a request, below the current span or the one its headers name."""
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = context.get_current()
        if not trace.get_current_span(parent).get_span_context().is_valid:
            headers = {
                name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]
            }
            parent = TraceContextTextMapPropagator().extract(headers, parent)
        return RequestTrace(scope["path"], model, parent, time.monotonic_ns())

    def end(self, trace: RequestTrace) -> None:
        """Make the spans of a request now, or when the engine has ended its cancelled streams."""
        trace.end_ns = time.monotonic_ns()
        self._open.add(trace)
        loop = asyncio.get_running_loop()

        def record_in_loop() -> None:
            with suppress(RuntimeError):  # at shutdown, the loop may close before: see close()
                loop.call_soon_threadsafe(self._record_if_done, trace)

        for stream in trace.streams:
            stream.add_done_callback(record_in_loop)
        self._record_if_done(trace)

    def close(self) -> None:
        """Make the spans of requests whose streams ended after the event loop."""
        for trace in [*self._open]:
            self._record_if_done(trace)

    def _record_if_done(self, trace: RequestTrace) -> None:
        if trace in self._open and all(stream.done for stream in trace.streams):
            self._open.remove(trace)
            self._record(trace)

    def _record(self, trace: RequestTrace) -> None:
        """Make the spans of a request, with the times that were measured."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        epoch_ns = time.time_ns() - time.monotonic_ns()  # when the monotonic clock was 0
        name, start_ns = f"POST {trace.path}", epoch_ns + trace.start_ns
        span = self._tracer.start_span(
            name, trace.parent, SpanKind.SERVER, trace.attributes, start_time=start_ns
        )
        context, end_ns = set_span_in_context(span, trace.parent), trace.end_ns
        for index, stream in enumerate(trace.streams):
            for phase in stream.timeline.phases:
                child = self._tracer.start_span(
                    phase.name,
                    context,
                    attributes={"kvant.prompt": index},
                    start_time=epoch_ns + phase.start_ns,
                )
                child.end(epoch_ns + phase.end_ns)
                end_ns = max(end_ns, phase.end_ns)
        if trace.error_type is not None:
            span.set_status(StatusCode.ERROR)
        span.end(epoch_ns + end_ns)


class TracingMiddleware:
    """Trace the requests that generate."""

    def __init__(self, app: ASGIApp, tracer: RequestTracer, model: str) -> None:
        self._app = app
        self._tracer = tracer
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") != "POST" or scope["path"] not in OPERATIONS:
            await self._app(scope, receive, send)
            return
        trace, state = self._tracer.begin(scope, self._model), scope.setdefault("state", {})

        async def send_observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_observed)
        except Exception as error:
            trace.exception_type = type(error).__name__
            raise
        finally:
            trace.streams = state.get("streams", ())
            trace.model = state.get("model", trace.model)
            self._tracer.end(trace)
