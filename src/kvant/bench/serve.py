"""What a server gives its clients: tokens a second, and what they wait for.

Clients ask at the same time for continuations of prompts that nobody else has, and read streams. A
server of ours is begun with a model of a known shape and random weights, and asked over HTTP; in
turn the same engine is asked itself. `times` is the tokens a second of a way over those of the
engine, the median over the rounds. With `--url` servers that are there already are asked as well,
each in turn, by words in place of token ids. With `--trim-every` the server is also asked while
freed memory is given back to the system as often, as a server does after large bodies.
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
from kvant.bench.cache_race import MODEL_SHAPES, open_model
from kvant.bench.device import CPU
from kvant.bench.engine import SilentTokenizer
from kvant.bench.report import Json, parse_numbers, print_report, run, show_progress
from kvant.engine import Engine
from kvant.server import ApiKeys, Service, create_app, make_server

WORDS = ("a", "tree", "of", "pages", "that", "many", "requests", "share", "and", "read", "once")
Prompt = list[int] | str


@dataclass
class ClientTimes:
    """What one client saw."""

    num_tokens: int = 0
    first_token: float = 0.0
    between_tokens: list[float] = field(default_factory=list)


@dataclass
class ClientMethod:
    """A way to ask for a continuation of a prompt."""

    name: str
    stream: Callable[[Prompt, int], Iterator[object]]  # something for every token
    uses_text: bool = False
    beside: Callable[[], AbstractContextManager[None]] = nullcontext  # what goes on meanwhile
    speeds: dict[int, list[float]] = field(default_factory=dict)  # tokens a second, by clients
    client_times: dict[int, list[ClientTimes]] = field(default_factory=dict)

    def run_clients(self, prompts: Sequence[Prompt], tokens: int) -> None:
        """All of them at once."""
        begin = time.perf_counter()
        with self.beside(), ThreadPoolExecutor(len(prompts)) as clients:
            found = list(clients.map(partial(self._run_client, tokens), prompts))
        took = time.perf_counter() - begin
        self.speeds.setdefault(len(prompts), []).append(sum(x.num_tokens for x in found) / took)
        self.client_times.setdefault(len(prompts), []).extend(found)

    def _run_client(self, tokens: int, prompt: Prompt) -> ClientTimes:
        found, last = ClientTimes(), time.perf_counter()
        for _ in self.stream(prompt, tokens):
            now = time.perf_counter()
            if found.num_tokens:
                found.between_tokens.append(now - last)
            else:
                found.first_token = now - last
            found.num_tokens, last = found.num_tokens + 1, now
        return found


def stream_completion(
    url: str, prompt: Prompt, tokens: int, options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The chunks of a stream that have a choice."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=600)
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **options}
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json_text.dumps(asked), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise OSError(f"{url}: {answer.status} {answer.read(500).decode(errors='replace')}")
        for line in answer:
            told = json_text.loads(line[6:]) if line.startswith(b"data: {") else {}
            if told.get("choices"):
                yield told
    finally:
        connection.close()


def find_model(url: str) -> str:
    """The first model of a server."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=60)
    try:
        connection.request("GET", "/v1/models")
        told = json_text.loads(connection.getresponse().read())
        return str(told["data"][0]["id"])
    except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
        raise OSError(f"--url {url}: no model is told there: {error}") from None
    finally:
        connection.close()


@contextmanager
def run_server(engine: Engine) -> Iterator[str]:
    """A server of ours in a thread; its URL."""
    malloc.keep_freed_memory()
    service = Service(engine, "bench", ApiKeys())
    server, begun = make_server(create_app(service), "127.0.0.1", 0, 1), threading.Event()
    server.on_started = lambda port: begun.set()
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    begun.wait()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def trimming(seconds: float) -> Iterator[None]:
    """Give freed memory back to the system again and again, with a pause of `seconds`."""
    end = threading.Event()

    def trim() -> None:
        while not end.wait(seconds):
            malloc.trim_heap()

    thread = threading.Thread(target=trim, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def summarize_methods(methods: Sequence[ClientMethod], base: ClientMethod) -> list[dict[str, Any]]:
    """A row for each way and number of clients."""
    rows: list[dict[str, Any]] = []
    for clients in base.speeds:
        for way in methods:
            times = [
                one / other
                for one, other in zip(way.speeds[clients], base.speeds[clients], strict=True)
            ]
            waits = way.client_times[clients]
            rows.append(
                {
                    "way": way.name,
                    "clients": clients,
                    "tokens_s": statistics.median(way.speeds[clients]),
                    "first_ms": 1e3 * statistics.median(one.first_token for one in waits),
                    "between_ms": 1e3
                    * statistics.median(x for one in waits for x in one.between_tokens),
                    "times": statistics.median(times),
                }
            )
    return rows


def main(
    clients: Annotated[str, typer.Option(help="that ask at the same time")] = "1,4,16",
    context: Annotated[int, typer.Option(min=1, help="tokens, or words, of a prompt")] = 128,
    tokens: Annotated[int, typer.Option(min=2, help="of a reply")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="of all ways in turn")] = 3,
    url: Annotated[list[str] | None, typer.Option(help="of another server; several")] = None,
    trim_every: Annotated[
        float | None, typer.Option(min=0.001, help="seconds, to measure what trims cost")
    ] = None,
    kv_cache: Annotated[str, typer.Option(help="of the spec language")] = "affine8",
    shape: Annotated[str, typer.Option(help=", ".join(MODEL_SHAPES))] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="those of the shape")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="of torch; its own default")] = None,
    json: Json = False,
) -> None:
    """Tokens a second and waits of clients of a server, beside the engine itself."""
    many = parse_numbers("--clients", clients)
    others = [(one, find_model(one)) for one in url or ()]
    model, sizes = open_model(shape, layers, threads)
    dice = random.Random(0)

    def prompt(way: ClientMethod) -> Prompt:
        if way.uses_text:
            return " ".join(dice.choice(WORDS) for _ in range(context))
        return [dice.randrange(sizes["vocab_size"]) for _ in range(context)]

    def directly(ids: Prompt, count: int) -> Iterator[object]:
        return engine.submit(ids, max_new_tokens=count, ignore_end=True)

    with (
        Engine(model, SilentTokenizer(), kv_cache, max_sequences=max(many)) as engine,
        run_server(engine) as ours,
    ):
        to_the_end = {"ignore_eos": True}
        own = partial(stream_completion, ours, options=to_the_end)
        ways = [ClientMethod("engine", directly), ClientMethod("server", own)]
        if trim_every is not None:
            ways.append(ClientMethod("server, trims", own, beside=partial(trimming, trim_every)))
        ways += [
            ClientMethod(one, partial(stream_completion, one, options={"model": x}), True)
            for one, x in others
        ]
        for way in ways:  # what is done once
            way.run_clients([prompt(way)], 2)
            way.speeds.clear()
            way.client_times.clear()
        for number in range(rounds):
            for count in many:
                for way in ways:
                    show_progress(f"round {number + 1} of {rounds}: {way.name}, {count} clients")
                    way.run_clients([prompt(way) for _ in range(count)], tokens)
    show_progress("")
    facts = {
        "model": f"{shape}, random",
        "layers": sizes["num_hidden_layers"],
        "cache": kv_cache,
        "context": context,
        "tokens": tokens,
    }
    print_report("serve", summarize_methods(ways, ways[0]), facts, quiet=json, device=CPU)


if __name__ == "__main__":
    run(main)
