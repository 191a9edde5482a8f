"""Test many clients that disconnect, read slowly or send errors; afterwards nothing is left."""

from __future__ import annotations

import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from server.conftest import serve_model
from server.test_server import wait_until_idle

BODIES = (b"", b"{", b'{"prompt": 1}', b'{"prompt": "a", "n": -1}', b"\x00\x01", b"[" * 2000)


def send_random_request(url: str, seed: int) -> int:
    """Send one random request; return the status, or 0 after a disconnect."""
    chance = random.Random(seed)
    prompt = "import os\n" * chance.randint(1, 30) + f"def f{chance.randrange(9)}("
    body_ = {"prompt": prompt, "max_tokens": chance.randint(1, 60), "seed": seed}
    path, way = f"{url}/v1/completions", chance.choice(("whole", "go", "slow", "wrong", "cut"))
    if way == "wrong":
        headers = {"Content-Type": "application/json"}
        body = chance.choice(BODIES)
        return int(httpx.post(path, content=body, headers=headers, timeout=60).status_code)
    if way == "cut":
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)) as raw:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
            )
        return 0
    if way == "whole":
        return int(httpx.post(path, json=body_, timeout=60).status_code)
    with httpx.stream("POST", path, json=body_ | {"stream": True}, timeout=60) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if way == "go" and number >= chance.randrange(6):
                break
            time.sleep(0.01 if way == "slow" else 0)
        return int(answer.status_code)


@pytest.mark.parametrize(
    ("clients", "after_clients"), [(40, 60), pytest.param(200, 1000, marks=pytest.mark.laws)]
)
def test_disconnected_clients_leave_nothing_allocated(
    bundled_model: tuple[Any, Any], clients: int, after_clients: int
) -> None:
    with serve_model(*bundled_model, max_sequences=8, max_bytes="32MiB", max_new_tokens=20) as (
        service,
        url,
    ):
        send_random_request(url, 0)
        with ThreadPoolExecutor(20) as threads:
            statuses = list(
                threads.map(lambda seed: send_random_request(url, seed), range(clients))
            )
        assert {*statuses} <= {0, 200, 400, 429}
        before = threading.active_count(), wait_until_idle(service)["nbytes_held"]
        body = {"prompt": "class A:\n", "max_tokens": 4, "temperature": 0}

        def ask(_: int) -> str:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            return str(answer.json()["choices"][0]["text"])

        with ThreadPoolExecutor(8) as threads:
            assert len({*threads.map(ask, range(after_clients))}) == 1
        metrics = wait_until_idle(service)
        service.engine._worker.batch.caches.empty_cache.state.pools.check()
        assert metrics["failed"] == 0
        assert metrics["nbytes_held"] + metrics["nbytes_free"] <= metrics["max_bytes"]
        assert threading.active_count() <= before[0] + 8  # asyncio keeps some threads
