"""Connections that ask nothing, too slowly, or with headers without end."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx2 as httpx
import pytest

from kvant.server import connections
from kvant.server.connections import MAX_HEADER_BYTES, compute_max_connections
from server.conftest import served

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def connect(url: str, begin: bytes = b"") -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)), timeout=60)
    made.sendall(begin)
    return made


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    found = b""
    with connection:
        while part := connection.recv(1 << 16):
            found += part
    return found


@pytest.mark.parametrize("begin", [b"", HALF], ids=["silent", "half"])
def test_idle_connections_make_room_for_new_ones(inside: tuple[Any, Any], begin: bytes) -> None:
    with served(*inside) as (service, url):
        state = service.app_server.server_state
        state.limit = 5
        idle = [connect(url, begin) for _ in range(3 * state.limit)]
        assert httpx.get(f"{url}/health").status_code == 200
        assert len(state.connections) <= state.limit
        assert read_all(idle[0]) == b""
        for one in idle[1:]:
            one.close()


def test_where_all_connections_are_being_answered_a_new_one_is_refused(
    inside: tuple[Any, Any],
) -> None:
    with served(*inside, max_sequences=2) as (service, url):
        service.app_server.server_state.limit = 2
        asked = {"prompt": "import os", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.Client() as one, httpx.Client() as other:
            streams = []
            for client in (one, other):
                request = client.build_request("POST", f"{url}/v1/completions", json=asked)
                stream = client.send(request, stream=True)
                streams.append((stream, events := stream.iter_text()))  # which closes it as it ends
                next(events)
            answer = read_all(connect(url, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
            for stream, _ in streams:
                stream.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable")
    assert json.loads(body)["error"]["message"].startswith("2 connections are being answered")


@pytest.mark.parametrize(("begin", "status"), [(b"", b""), (HALF, b"HTTP/1.1 408 Request Timeout")])
def test_a_request_has_a_deadline(
    inside: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, begin: bytes, status: bytes
) -> None:
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT_S", 0.2)
    with served(*inside) as (service, url):
        assert read_all(connect(url, begin)).startswith(status)
        body = b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        answer = read_all(connect(url, HALF + body))  # a body that never ends
        assert answer.startswith(b"HTTP/1.1 408 ")
        whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        answers = read_all(connect(url, whole + HALF + body))  # also behind another request
        assert answers.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 408 " in answers
        assert not service.engine.stats()["running"]
        with httpx.Client() as client:  # a reply may take longer than that
            asked = {"prompt": "import os", "max_tokens": 100, "ignore_eos": True}
            for _ in range(2):
                found = client.post(f"{url}/v1/completions", json=asked, timeout=60)
                assert found.status_code == 200


def test_a_request_behind_another_is_not_idle_while_it_is_answered(
    inside: tuple[Any, Any],
) -> None:
    """A client may send a second request before it has the reply to the first."""
    body = json.dumps({"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True})
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    one = HALF + head.encode() + body.encode()
    with served(*inside) as (service, url):
        state = service.app_server.server_state
        state.limit = 1
        connection = connect(url, one + one)
        found = b""
        while found.count(b"HTTP/1.1 200 ") < 2:
            found += connection.recv(1 << 16)
        refused = read_all(connect(url, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        assert refused.startswith(b"HTTP/1.1 503 ") or found.count(b"[DONE]") == 2
        while found.count(b"[DONE]") < 2:
            part = connection.recv(1 << 16)
            assert part, "the second reply broke off"
            found += part
        connection.close()


def test_clients_that_do_not_read_hold_no_files(inside: tuple[Any, Any]) -> None:
    with served(*inside) as (service, url):
        state = service.app_server.server_state
        state.limit = 3
        lazy = []
        for _ in range(12):
            made = connect(url)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            made.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 40)
            lazy.append(made)
        until = time.monotonic() + 30  # they are being answered until their buffers are full
        while httpx.get(f"{url}/health").status_code != 200:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert len(state.connections) <= 3
        for one in lazy:
            one.close()


def test_headers_end_somewhere(running: tuple[Any, str]) -> None:
    line = b"X: " + b"a" * 10_000 + b"\r\n"
    answer = read_all(connect(running[1], HALF + line * (MAX_HEADER_BYTES // len(line) + 2)))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large")
    error = json.loads(body)["error"]
    assert error["message"] == f"a request line and headers of more than {MAX_HEADER_BYTES} bytes"
    for size, status in ((50_000, 200), (70_000, 431)):  # in one piece
        found = httpx.get(f"{running[1]}/health", headers={"X": "a" * size})
        assert found.status_code == status


def test_what_is_no_http_is_refused(running: tuple[Any, str]) -> None:
    assert read_all(connect(running[1], b"\x16\x03\x01\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


def test_files_are_left_for_everything_else() -> None:
    assert 16 <= compute_max_connections() <= 1 << 20
