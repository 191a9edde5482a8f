"""Many clients who go, read slowly or say what is wrong; after them all is as before."""

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

from server.conftest import served
from server.test_server import settled

BODIES = (b"", b"{", b'{"prompt": 1}', b'{"prompt": "a", "n": -1}', b"\x00\x01", b"[" * 2000)


def client(url: str, seed: int) -> int:
    """Ask in some way; the status, or 0 where it went before there was one."""
    chance = random.Random(seed)
    prompt = "import os\n" * chance.randint(1, 30) + f"def f{chance.randrange(9)}("
    asked = {"prompt": prompt, "max_tokens": chance.randint(1, 60), "seed": seed}
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
        return int(httpx.post(path, json=asked, timeout=60).status_code)
    with httpx.stream("POST", path, json=asked | {"stream": True}, timeout=60) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if way == "go" and number >= chance.randrange(6):
                break
            time.sleep(0.01 if way == "slow" else 0)
        return int(answer.status_code)


@pytest.mark.parametrize(
    ("clients", "then"), [(40, 60), pytest.param(200, 1000, marks=pytest.mark.laws)]
)
def test_nothing_is_left_of_clients_who_go(
    inside: tuple[Any, Any], clients: int, then: int
) -> None:
    with served(*inside, max_sequences=8, max_bytes="32MiB", max_new_tokens=20) as (service, url):
        client(url, 0)
        with ThreadPoolExecutor(20) as threads:
            found = list(threads.map(lambda seed: client(url, seed), range(clients)))
        assert {*found} <= {0, 200, 400, 429}
        before = threading.active_count(), settled(service)["nbytes_held"]
        asked = {"prompt": "class A:\n", "max_tokens": 4, "temperature": 0}

        def ask(_: int) -> str:
            answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
            return str(answer.json()["choices"][0]["text"])

        with ThreadPoolExecutor(8) as threads:
            assert len({*threads.map(ask, range(then))}) == 1
        told = settled(service)
        service.engine._batch.check()
        assert told["failed"] == 0
        assert told["nbytes_held"] + told["nbytes_free"] <= told["max_bytes"]
        assert threading.active_count() <= before[0] + 8  # asyncio keeps some of its own
