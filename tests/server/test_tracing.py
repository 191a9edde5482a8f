"""Test the spans of requests: their times, attributes, parents and status."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="pip install 'kvant[otel]'")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvant.prefixes import Prefixes
from kvant.prefixes.memory import PrefixPools
from kvant.server import ApiKeys, open_tracer
from kvant.server.tracing import ENDPOINT_VARIABLES, RequestTracer
from server.conftest import post_and_leave, serve_model

PATH = "/v1/completions"
SECRET = "xylophone"  # in the prompt, and in the key
BODY = {"prompt": f"import {SECRET}\n" * 40, "max_tokens": 4, "ignore_eos": True}
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WITHOUT_STORE = ["queue", "prefix_lookup", "prefill", "decode"]


class Spans:
    """The spans that a tracer made."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = RequestTracer(self._provider.get_tracer("kvant"))

    def take(self) -> tuple[ReadableSpan, list[ReadableSpan]]:
        """Wait for the spans of one request, check them, and return its span and its phases."""
        until = time.monotonic() + 30
        while not (roots := [s for s in self.finished if s.kind is SpanKind.SERVER]):
            assert time.monotonic() < until
            time.sleep(0.01)
        [root], phases = roots, [s for s in self.finished if s.kind is not SpanKind.SERVER]
        self._exporter.clear()
        check_times(root, phases)
        texts = [span.to_json() for span in (root, *phases)]
        assert not any(SECRET in text for text in texts)
        return root, phases

    @property
    def finished(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()


def check_times(root: ReadableSpan, phases: list[ReadableSpan]) -> None:
    """Check that the phases are children of a request, lie within it, and are in order."""
    for phase in phases:
        assert phase.parent is not None and phase.parent == root.context
        assert read_times(root)[0] <= read_times(phase)[0]
        assert read_times(phase)[1] <= read_times(root)[1]
    times = {phase.name: read_times(phase) for phase in phases}
    for earlier, later in (("queue", "prefill"), ("prefill", "decode")):
        if later in times:
            assert times[earlier][1] <= times[later][0]
    for name in {"prefix_lookup", "store"} & set(times):
        assert times["queue"][0] <= times[name][0] <= times[name][1] <= times["queue"][1]
    assert abs(read_times(root)[1] - time.time_ns()) < 60e9


def read_times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time, span.end_time


def read_attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def read_names(phases: list[ReadableSpan]) -> list[str]:
    return [phase.name for phase in phases]


@pytest.fixture(scope="module")
def traced(bundled_model: tuple[Any, Any]) -> Iterator[tuple[Any, str, Spans]]:
    spans = Spans()
    with serve_model(*bundled_model, tracer=spans.tracer) as (service, url):
        yield service, url, spans


def test_request_has_a_span_with_its_phases(traced: tuple[Any, str, Spans]) -> None:
    _, url, spans = traced
    usages = [httpx.post(url + PATH, json=BODY, timeout=60).json()["usage"]]
    root, phases = spans.take()
    assert (root.name, root.parent, root.status.status_code) == (
        f"POST {PATH}",
        None,
        StatusCode.UNSET,
    )
    assert read_names(phases) == WITHOUT_STORE
    assert read_attributes(root) == {
        "http.request.method": "POST",
        "http.route": PATH,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvant",
        "gen_ai.request.model": "inside",
        "gen_ai.usage.input_tokens": usages[0]["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
        "kvant.restored_tokens": 0,
        "kvant.swaps": 0,
    }
    usages.append(httpx.post(url + PATH, json=BODY, timeout=60).json()["usage"])
    cached = read_attributes(spans.take()[0])["gen_ai.usage.cache_read.input_tokens"]
    assert cached == usages[1]["prompt_tokens_details"]["cached_tokens"] >= 64


def test_stream_below_the_traceparent_of_its_client(traced: tuple[Any, str, Spans]) -> None:
    _, url, spans = traced
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "stream": True}
    headers = {"traceparent": TRACEPARENT}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert "[DONE]" in reply.text
    root, phases = spans.take()
    assert root.parent is not None and root.parent.is_remote
    assert f"{root.parent.trace_id:032x}-{root.parent.span_id:016x}" == TRACEPARENT[3:-3]
    assert {span.context.trace_id for span in (root, *phases)} == {root.parent.trace_id}
    assert read_attributes(root)["gen_ai.operation.name"] == "chat"
    assert read_names(phases)[:3] == WITHOUT_STORE[:3]


def test_each_prompt_has_its_phases(traced: tuple[Any, str, Spans]) -> None:
    _, url, spans = traced
    body = BODY | {"prompt": ["a", "import "], "n": 2, "max_tokens": 1, "temperature": 1}
    httpx.post(url + PATH, json=body, timeout=60)
    root, phases = spans.take()
    prompts = [(span.attributes or {})["kvant.prompt"] for span in phases]
    assert set(prompts) == {0, 1}
    assert "decode" not in read_names(phases)  # the last prefill gives the only token
    attributes = read_attributes(root)
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.response.finish_reasons"] == ("length",) * 4


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_request_is_an_error(
    traced: tuple[Any, str, Spans], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, url, spans = traced
    batch, body = service.engine._worker.batch, BODY | {"max_tokens": 400, "stream": stream}
    decode = batch.decode

    def decode_slowly(sequences: Any, drafts: Any) -> Any:
        time.sleep(0.01)
        return decode(sequences, drafts)

    monkeypatch.setattr(batch, "decode", decode_slowly)
    if stream:
        with httpx.stream("POST", url + PATH, json=body) as response:
            next(response.iter_text())
    else:
        post_and_leave(service, url + PATH, body)
    root, phases = spans.take()
    assert root.status.status_code is StatusCode.ERROR and phases
    attributes = read_attributes(root)
    assert attributes["error.type"] == "cancelled"
    assert attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert attributes["gen_ai.usage.output_tokens"] < 400


def test_failed_request_names_the_type_of_its_error(
    traced: tuple[Any, str, Spans], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, url, spans = traced

    def fail(*args: Any) -> None:
        raise ArithmeticError(f"in {SECRET}")

    monkeypatch.setattr(service.engine._worker.batch, "prefill", fail)
    assert httpx.post(url + PATH, json=BODY, timeout=60).status_code == 500
    root, phases = spans.take()
    assert root.status.status_code is StatusCode.ERROR and root.status.description is None
    assert read_attributes(root)["error.type"] == "ArithmeticError"
    assert read_attributes(root)["http.response.status_code"] == 500
    assert read_names(phases) == WITHOUT_STORE[:3]


def test_refused_request_has_no_phases(bundled_model: tuple[Any, Any]) -> None:
    spans = Spans()
    with serve_model(*bundled_model, ApiKeys([SECRET]), spans.tracer) as (_, url):
        httpx.get(f"{url}/v1/models")
        for key, model, status in (("other", "inside", 401), (SECRET, SECRET, 404)):
            headers = {"Authorization": f"Bearer {key}"}
            reply = httpx.post(url + PATH, json=BODY | {"model": model}, headers=headers)
            assert reply.status_code == status
            root, phases = spans.take()
            assert not phases and root.status.status_code is StatusCode.UNSET
            assert read_attributes(root)["http.response.status_code"] == status


def test_wait_for_a_store_is_a_phase(
    bundled_model: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # prefilling is never faster
    monkeypatch.setattr(PrefixPools, "record_prefill_time", lambda *args: None)
    spans, restored = Spans(), []
    for _ in range(2):
        with (
            Prefixes(None, store=str(tmp_path)) as prefixes,
            serve_model(*bundled_model, tracer=spans.tracer, prefixes=prefixes) as (_, url),
        ):
            httpx.post(url + PATH, json=BODY, timeout=60)
            root, phases = spans.take()
            restored.append(read_attributes(root)["kvant.restored_tokens"])
        names = read_names(phases)
        assert names[:3] == ["queue", "prefix_lookup", "store"] and names[-2:] == WITHOUT_STORE[2:]
    assert restored[0] == 0 and restored[1] >= 64


def test_requests_that_end_with_the_engine_are_traced_at_the_end(
    bundled_model: tuple[Any, Any],
) -> None:
    spans = Spans()
    with serve_model(*bundled_model, tracer=spans.tracer) as (service, url):
        engine, closing, decoding = service.engine, threading.Event(), threading.Event()
        decode, close = engine._worker.batch.decode, engine.close

        def decode_later(sequences: Any, drafts: Any) -> Any:
            decoding.set()
            closing.wait(30)
            return decode(sequences, drafts)

        def close_after_the_server() -> None:
            closing.set()
            close()

        engine._worker.batch.decode, engine.close = decode_later, close_after_the_server
        with httpx.stream("POST", url + PATH, json=BODY | {"stream": True}):
            assert decoding.wait(30)
    assert not spans.finished
    spans.tracer.close()
    root, phases = spans.take()
    assert read_attributes(root)["error.type"] == "cancelled"
    assert read_names(phases) == WITHOUT_STORE


# ---- when requests are traced


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_variables")
def test_off_by_default() -> None:
    with open_tracer() as tracer:
        assert tracer is None


@pytest.mark.usefixtures("no_variables")
def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENDPOINT_VARIABLES[0], "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with caplog.at_level(logging.WARNING, "kvant"), open_tracer() as tracer:
        assert tracer is None
    assert f"{ENDPOINT_VARIABLES[0]} is set, but requests are not traced" in caplog.text
    assert "pip install 'kvant[otel]'" in caplog.text


@pytest.mark.usefixtures("no_variables")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "protocol grpc, only http/protobuf is supported"),
        ("OTEL_TRACES_EXPORTER", "none", ""),
    ],
)
def test_other_exporters_are_not_replaced(
    name: str,
    value: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(ENDPOINT_VARIABLES[0], "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING, "kvant"), open_tracer() as tracer:
        assert tracer is None
    assert message in caplog.text and bool(message) == bool(caplog.text)


@pytest.mark.usefixtures("no_variables")
def test_global_provider_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    with open_tracer() as tracer:
        assert tracer is not None


@contextmanager
def collect_spans() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Run a collector; yield its address, and the path and body of each request to it."""
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.usefixtures("no_variables")
def test_spans_reach_a_collector_at_the_end(
    bundled_model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    pytest.importorskip(module, reason="pip install 'kvant[otel]'")
    with collect_spans() as (address, received):
        monkeypatch.setenv(ENDPOINT_VARIABLES[0], address)
        with (
            open_tracer() as tracer,
            serve_model(*bundled_model, tracer=tracer) as (_, url),
        ):
            httpx.post(url + PATH, json=BODY, timeout=60)
    [(path, spans)] = received
    assert path == "/v1/traces"
    assert all(name.encode() in spans for name in ("kvant", f"POST {PATH}", *WITHOUT_STORE))
