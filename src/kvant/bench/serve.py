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
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from kvant import malloc
from kvant.bench.cache_race import SHAPE_HELP, open_model
from kvant.bench.device import CPU
from kvant.bench.engine import SilentTokenizer
from kvant.bench.report import Json, parse_numbers, print_report, run, show_progress
from kvant.engine import Engine
from kvant.server import ApiKeys, Service, create_app, make_server

WORDS = ("a", "tree", "of", "pages", "that", "many", "requests", "share", "and", "read", "once")
Prompt = list[int] | str


@dataclass
class ClientTimes:
    """The times of one client's request."""

    num_tokens: int = 0
    first_token: float = 0.0
    between_tokens: list[float] = field(default_factory=list)


@dataclass
class ClientMethod:
    """A method to request the continuation of a prompt."""

    name: str
    stream: Callable[[Prompt, int], Iterator[object]]  # one item per token
    uses_text: bool = False
    background: Callable[[], AbstractContextManager[None]] = nullcontext  # runs meanwhile
    speeds: dict[int, list[float]] = field(default_factory=dict)  # clients: tokens per second
    client_times: dict[int, list[ClientTimes]] = field(default_factory=dict)

    def run_clients(self, prompts: Sequence[Prompt], tokens: int) -> None:
        """Run all clients at once, and record their times."""
        start = time.perf_counter()
        with self.background(), ThreadPoolExecutor(len(prompts)) as clients:
            times = list(clients.map(partial(self._run_client, tokens), prompts))
        seconds = time.perf_counter() - start
        self.speeds.setdefault(len(prompts), []).append(sum(t.num_tokens for t in times) / seconds)
        self.client_times.setdefault(len(prompts), []).extend(times)

    def _run_client(self, tokens: int, prompt: Prompt) -> ClientTimes:
        times, last = ClientTimes(), time.perf_counter()
        for _ in self.stream(prompt, tokens):
            now = time.perf_counter()
            if times.num_tokens:
                times.between_tokens.append(now - last)
            else:
                times.first_token = now - last
            times.num_tokens, last = times.num_tokens + 1, now
        return times


def stream_completion(
    url: str, prompt: Prompt, tokens: int, options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Stream the chunks of a completion that have a choice."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=600)
    request_body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        **options,
    }
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json_text.dumps(request_body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"{url}: {response.status} {response.read(500).decode(errors='replace')}")
        for line in response:
            chunk = json_text.loads(line[6:]) if line.startswith(b"data: {") else {}
            if chunk.get("choices"):
                yield chunk
    finally:
        connection.close()


def find_model(url: str) -> str:
    """Return the name of a server's first model."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=60)
    try:
        connection.request("GET", "/v1/models")
        models = json_text.loads(connection.getresponse().read())
        return str(models["data"][0]["id"])
    except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
        raise OSError(f"--url {url}: the server lists no model: {error}") from None
    finally:
        connection.close()


@contextmanager
def run_server(engine: Engine) -> Iterator[str]:
    """Run a kvant server in a thread; yield its URL."""
    malloc.keep_freed_memory()
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
            malloc.trim_heap()

    thread = threading.Thread(target=trim, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def summarize_methods(methods: Sequence[ClientMethod], base: ClientMethod) -> list[dict[str, Any]]:
    """Return a row for each method and number of clients."""
    rows: list[dict[str, Any]] = []
    for clients in base.speeds:
        for method in methods:
            ratios = [
                speed / base_speed
                for speed, base_speed in zip(
                    method.speeds[clients], base.speeds[clients], strict=True
                )
            ]
            client_times = method.client_times[clients]
            rows.append(
                {
                    "way": method.name,
                    "clients": clients,
                    "tokens_s": statistics.median(method.speeds[clients]),
                    "first_ms": 1e3 * statistics.median(t.first_token for t in client_times),
                    "between_ms": 1e3
                    * statistics.median(x for t in client_times for x in t.between_tokens),
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
    kv_cache: Annotated[str, typer.Option(help="Spec of the cache")] = "affine8",
    shape: Annotated[str, typer.Option(help=SHAPE_HELP)] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch")] = None,
    json: Json = False,
) -> None:
    """Measure the speed and the waiting times of a server's clients, against the engine."""
    client_counts = parse_numbers("--clients", clients)
    servers = [(server_url, find_model(server_url)) for server_url in url or ()]
    model, sizes = open_model(shape, layers, threads)
    rng = random.Random(0)

    def prompt(method: ClientMethod) -> Prompt:
        if method.uses_text:
            return " ".join(rng.choice(WORDS) for _ in range(context))
        return [rng.randrange(sizes["vocab_size"]) for _ in range(context)]

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
            method.client_times.clear()
        for number in range(rounds):
            for count in client_counts:
                for method in methods:
                    show_progress(f"round {number + 1} of {rounds}: {method.name}, {count} clients")
                    method.run_clients([prompt(method) for _ in range(count)], tokens)
    show_progress("")
    facts = {
        "model": f"{shape}, random",
        "layers": sizes["num_hidden_layers"],
        "cache": kv_cache,
        "context": context,
        "tokens": tokens,
    }
    print_report("serve", summarize_methods(methods, methods[0]), facts, quiet=json, device=CPU)


if __name__ == "__main__":
    run(main)
