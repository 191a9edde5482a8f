"""Test idle connections, slow connections, and endless headers."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import httpx2 as httpx
import pytest
from fastapi import BackgroundTasks, FastAPI, Response

from kvant.server import http_server
from kvant.server.http_server import MAX_HEADER_BYTES, compute_max_connections, make_server
from server.conftest import serve_model

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def connect(url: str, begin: bytes = b"") -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(begin)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    data = b""
    with connection:
        while part := connection.recv(1 << 16):
            data += part
    return data


@pytest.mark.parametrize("begin", [b"", HALF], ids=["silent", "half"])
def test_idle_connections_are_closed_for_new_ones(
    bundled_model: tuple[Any, Any], begin: bytes
) -> None:
    with serve_model(*bundled_model) as (service, url):
        state = service.app_server.server_state
        state.limit = 5
        idle = [connect(url, begin) for _ in range(3 * state.limit)]
        assert httpx.get(f"{url}/health").status_code == 200
        assert len(state.connections) <= state.limit
        assert read_all(idle[0]) == b""
        for connection in idle[1:]:
            connection.close()


def test_new_connection_is_refused_if_all_are_busy(
    bundled_model: tuple[Any, Any],
) -> None:
    with serve_model(*bundled_model, max_sequences=2) as (service, url):
        service.app_server.server_state.limit = 2
        payload = {"prompt": "import os", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.Client() as first, httpx.Client() as second:
            streams = []
            for client in (first, second):
                request = client.build_request("POST", f"{url}/v1/completions", json=payload)
                stream = client.send(request, stream=True)
                streams.append((stream, events := stream.iter_text()))  # its context closes it
                next(events)
            answer = read_all(connect(url, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
            for stream, _ in streams:
                stream.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable")
    assert json.loads(body)["error"]["message"].startswith("all 2 connections are in use")


@pytest.mark.parametrize(("begin", "status"), [(b"", b""), (HALF, b"HTTP/1.1 408 Request Timeout")])
def test_request_has_a_deadline(
    bundled_model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, begin: bytes, status: bytes
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.2)
    with serve_model(*bundled_model) as (service, url):
        assert read_all(connect(url, begin)).startswith(status)
        body = b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        answer = read_all(connect(url, HALF + body))  # an endless body
        assert answer.startswith(b"HTTP/1.1 408 ")
        whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        # also pipelined after another request
        responses = read_all(connect(url, whole + HALF + body))
        assert responses.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 408 " in responses
        assert not service.engine.stats()["running"]
        with httpx.Client() as client:  # a reply may take longer than the deadline
            payload = {"prompt": "import os", "max_tokens": 100, "ignore_eos": True}
            for _ in range(2):
                response = client.post(f"{url}/v1/completions", json=payload, timeout=60)
                assert response.status_code == 200


def test_pipelined_request_is_not_idle_while_it_is_answered(
    bundled_model: tuple[Any, Any],
) -> None:
    """A client may send a second request before it has the reply to the first."""
    body = json.dumps({"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True})
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    request = HALF + head.encode() + body.encode()
    with serve_model(*bundled_model) as (service, url):
        state = service.app_server.server_state
        state.limit = 1
        connection = connect(url, request + request)
        data = b""
        while data.count(b"HTTP/1.1 200 ") < 2:
            data += connection.recv(1 << 16)
        refused = read_all(connect(url, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        assert refused.startswith(b"HTTP/1.1 503 ") or data.count(b"[DONE]") == 2
        while data.count(b"[DONE]") < 2:
            part = connection.recv(1 << 16)
            assert part, "the second reply broke off"
            data += part
        connection.close()


def test_clients_that_do_not_read_hold_no_file_descriptors(bundled_model: tuple[Any, Any]) -> None:
    with serve_model(*bundled_model) as (service, url):
        state = service.app_server.server_state
        state.limit = 3
        lazy = []
        for _ in range(12):
            connection = connect(url)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 40)
            lazy.append(connection)
        until = time.monotonic() + 30  # they are answered until their buffers are full
        while httpx.get(f"{url}/health").status_code != 200:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert len(state.connections) <= 3
        for connection_ in lazy:
            connection_.close()


@pytest.mark.parametrize("header", [b"close", b"keep-alive"])
def test_client_that_never_reads_its_reply_is_dropped(
    monkeypatch: pytest.MonkeyPatch, header: bytes
) -> None:
    """Regression: the deadline ended when the reply was complete, though still unread."""
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.2)
    app, is_sent, started = FastAPI(), threading.Event(), threading.Event()

    @app.get("/")
    def reply(tasks: BackgroundTasks) -> Response:
        tasks.add_task(is_sent.set)  # runs after the reply is complete
        return Response(bytes(32 << 20))

    server = make_server(app, "127.0.0.1", 0, 1)
    server.on_started = lambda port: started.set()
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(60)
        with connect(
            f"http://127.0.0.1:{server.port}",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: " + header + b"\r\n\r\n",
        ):
            assert is_sent.wait(60)
            until = time.monotonic() + 30
            while server.server_state.connections:
                assert time.monotonic() < until, "the connection stays open"
                time.sleep(0.01)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def test_header_size_is_limited(running: tuple[Any, str]) -> None:
    line = b"X: " + b"a" * 10_000 + b"\r\n"
    answer = read_all(connect(running[1], HALF + line * (MAX_HEADER_BYTES // len(line) + 2)))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large")
    error = json.loads(body)["error"]
    assert error["message"] == f"the request line and headers exceed {MAX_HEADER_BYTES} bytes"
    for size, status in ((50_000, 200), (70_000, 431)):  # in one piece
        response = httpx.get(f"{running[1]}/health", headers={"X": "a" * size})
        assert response.status_code == status


def test_malformed_http_is_refused(running: tuple[Any, str]) -> None:
    assert read_all(connect(running[1], b"\x16\x03\x01\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


def test_file_descriptors_are_reserved_for_everything_else() -> None:
    assert 16 <= compute_max_connections() <= 1 << 20
