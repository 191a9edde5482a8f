"""Measure a server from its clients' side: tokens per second and waiting times.

Clients concurrently request continuations of prompts of their own, and read streams. A kvant server
with a model of a known shape and random weights answers over HTTP. In turn the same engine is
called directly. `times` is the speed of a method relative to the engine's, the median over the
rounds. With `--url`, servers that already run take turns too, with words instead of token ids. With
`--trim-every` the server is also measured while freed memory is returned to the system at that
interval, as a server does after large bodies.
"""

from __future__ import annotations

import http.client
import json as json_text
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from kvant.bench import harness
from kvant.bench.cache_race import Shape, open_model
from kvant.bench.engine import SilentTokenizer
from kvant.engine import Engine
from kvant.platform import c_libraries
from kvant.server import ApiKeys, Service, create_app, make_server

WORDS = ("a", "tree", "of", "pages", "that", "many", "requests", "share", "and", "read", "once")
Prompt = list[int] | str


@dataclass
class ClientMethod:
    """A method to request the continuation of a prompt."""

    name: str
    stream: Callable[[Prompt, int], Iterator[object]]  # one item per token
    uses_text: bool = False
    background: Callable[[], AbstractContextManager[None]] = nullcontext  # runs meanwhile
    speeds: dict[int, list[float]] = field(default_factory=dict)  # clients: tokens per second
    waits: dict[int, list[list[float]]] = field(default_factory=dict)  # seconds for each token

    def run_clients(self, prompts: Sequence[Prompt], tokens: int) -> None:
        """Run all clients at once, and record their times."""
        start = time.perf_counter()
        with self.background(), ThreadPoolExecutor(len(prompts)) as clients:
            waits = list(clients.map(partial(self._run_client, tokens), prompts))
        seconds = time.perf_counter() - start
        self.speeds.setdefault(len(prompts), []).append(sum(map(len, waits)) / seconds)
        self.waits.setdefault(len(prompts), []).extend(waits)

    def _run_client(self, tokens: int, prompt: Prompt) -> list[float]:
        times = [time.perf_counter()]
        times += (time.perf_counter() for _ in self.stream(prompt, tokens))
        return [after - before for before, after in pairwise(times)]


@contextmanager
def open_response(
    url: str, path: str, body: Mapping[str, Any] | None = None
) -> Iterator[http.client.HTTPResponse]:
    """Send a request, by POST if it has a body; yield the response."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=600)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json_text.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"{url}: {response.status} {response.read(500).decode(errors='replace')}")
        yield response
    finally:
        connection.close()


def stream_chunks(url: str, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Stream the chunks of a response."""
    with open_response(url, path, body) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield json_text.loads(line[6:])


def stream_completion(
    url: str, prompt: Prompt, tokens: int, options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Stream the chunks of a completion that have a choice."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **options}
    chunks = stream_chunks(url, "/v1/completions", body)
    return (chunk for chunk in chunks if chunk.get("choices"))


def find_model(url: str) -> str:
    """Return the name of a server's first model."""
    try:
        with open_response(url, "/v1/models") as response:
            return str(json_text.load(response)["data"][0]["id"])
    except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
        raise OSError(f"--url {url}: the server lists no model: {error}") from None


@contextmanager
def run_server(engine: Engine) -> Iterator[str]:
    """Run a kvant server in a thread; yield its URL."""
    c_libraries.keep_freed_memory()
    service = Service(engine, "bench", ApiKeys())
    server, started = make_server(create_app(service), "127.0.0.1", 0, 1), threading.Event()
    server.on_started = lambda port: started.set()
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def trim_periodically(seconds: float) -> Iterator[None]:
    """Return freed memory to the system at an interval of `seconds`."""
    stopped = threading.Event()

    def trim() -> None:
        while not stopped.wait(seconds):
            c_libraries.trim_heap()

    thread = threading.Thread(target=trim, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def summarize_methods(methods: Sequence[ClientMethod]) -> list[dict[str, Any]]:
    """Return a row for each number of clients and method; `times` is relative to the first."""
    rows: list[dict[str, Any]] = []
    for clients, base_speeds in methods[0].speeds.items():
        for method in methods:
            speeds, waits = method.speeds[clients], method.waits[clients]
            ratios = [speed / base for speed, base in zip(speeds, base_speeds, strict=True)]
            first = [seconds[0] for seconds in waits if seconds]
            between = [wait for seconds in waits for wait in seconds[1:]]
            rows.append(
                {
                    "way": method.name,
                    "clients": clients,
                    "tokens_s": statistics.median(speeds),
                    "first_ms": 1e3 * statistics.median(first),
                    "between_ms": 1e3 * statistics.median(between),
                    "times": statistics.median(ratios),
                }
            )
    return rows


def main(
    clients: Annotated[str, typer.Option(help="Numbers of concurrent clients")] = "1,4,16",
    context: Annotated[int, typer.Option(min=1, help="Tokens or words of a prompt")] = 128,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a reply")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all methods in turn")] = 3,
    url: Annotated[list[str] | None, typer.Option(help="Further servers to measure")] = None,
    trim_every: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds between trims, to measure their cost")
    ] = None,
    kv_cache: harness.KVCache = "affine8",
    shape: Shape = "0.6b",
    layers: harness.Layers = None,
    threads: harness.Threads = None,
    json: harness.Json = False,
) -> None:
    """Measure the speed and the waiting times of a server's clients, against the engine."""
    client_counts = harness.parse_numbers("--clients", clients)
    servers = [(server_url, find_model(server_url)) for server_url in url or ()]
    model, facts = open_model(shape, layers, threads)
    rng = random.Random(0)

    def prompt(method: ClientMethod) -> Prompt:
        if method.uses_text:
            return " ".join(rng.choice(WORDS) for _ in range(context))
        return [rng.randrange(model.config.vocab_size) for _ in range(context)]

    def stream_engine(ids: Prompt, count: int) -> Iterator[object]:
        return engine.submit(ids, max_new_tokens=count, ignore_end=True)

    with (
        Engine(model, SilentTokenizer(), kv_cache, max_sequences=max(client_counts)) as engine,
        run_server(engine) as our_url,
    ):
        options = {"ignore_eos": True}
        stream_ours = partial(stream_completion, our_url, options=options)
        methods = [ClientMethod("engine", stream_engine), ClientMethod("server", stream_ours)]
        if trim_every is not None:
            trims = partial(trim_periodically, trim_every)
            methods.append(ClientMethod("server, trims", stream_ours, background=trims))
        methods += [
            ClientMethod(
                server_url,
                partial(stream_completion, server_url, options={"model": model_name}),
                True,
            )
            for server_url, model_name in servers
        ]
        for method in methods:  # warm-up
            method.run_clients([prompt(method)], 2)
            method.speeds.clear()
            method.waits.clear()
        for number in range(rounds):
            for count in client_counts:
                for method in methods:
                    harness.show_progress(
                        f"round {number + 1} of {rounds}: {method.name}, {count} clients"
                    )
                    method.run_clients([prompt(method) for _ in range(count)], tokens)
    facts |= {"cache": kv_cache, "context": context, "tokens": tokens}
    harness.print_report("serve", summarize_methods(methods), facts, quiet=json)


if __name__ == "__main__":
    harness.run(main)
