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

from kvant import heap
from kvant.bench.cache_race import SHAPES, opened
from kvant.bench.device import CPU
from kvant.bench.engine import Silent
from kvant.bench.report import Json, numbers, progress, run, show
from kvant.engine import Engine
from kvant.server import Keys, Service, create_app, server_of

WORDS = ("a", "tree", "of", "pages", "that", "many", "requests", "share", "and", "read", "once")
Prompt = list[int] | str


@dataclass
class Waits:
    """What one client saw."""

    tokens: int = 0
    first: float = 0.0
    between: list[float] = field(default_factory=list)


@dataclass
class Way:
    """A way to ask for a continuation of a prompt."""

    name: str
    ask: Callable[[Prompt, int], Iterator[object]]  # something for every token
    text: bool = False
    beside: Callable[[], AbstractContextManager[None]] = nullcontext  # what goes on meanwhile
    rounds: dict[int, list[float]] = field(default_factory=dict)  # tokens a second, by clients
    waits: dict[int, list[Waits]] = field(default_factory=dict)

    def go(self, prompts: Sequence[Prompt], tokens: int) -> None:
        """All of them at once."""
        begin = time.perf_counter()
        with self.beside(), ThreadPoolExecutor(len(prompts)) as clients:
            found = list(clients.map(partial(self._one, tokens), prompts))
        took = time.perf_counter() - begin
        self.rounds.setdefault(len(prompts), []).append(sum(x.tokens for x in found) / took)
        self.waits.setdefault(len(prompts), []).extend(found)

    def _one(self, tokens: int, prompt: Prompt) -> Waits:
        found, last = Waits(), time.perf_counter()
        for _ in self.ask(prompt, tokens):
            now = time.perf_counter()
            if found.tokens:
                found.between.append(now - last)
            else:
                found.first = now - last
            found.tokens, last = found.tokens + 1, now
        return found


def over_http(
    url: str, prompt: Prompt, tokens: int, beside: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The chunks of a stream that have a choice."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=600)
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **beside}
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


def model_at(url: str) -> str:
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
def served(engine: Engine) -> Iterator[str]:
    """A server of ours in a thread; its URL."""
    heap.keep()
    service = Service(engine, "bench", Keys())
    server, begun = server_of(create_app(service), "127.0.0.1", 0, 1), threading.Event()
    server.begun = lambda port: begun.set()
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
            heap.trim()

    thread = threading.Thread(target=trim, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def figures(ways: Sequence[Way], base: Way) -> list[dict[str, Any]]:
    """A row for each way and number of clients."""
    rows: list[dict[str, Any]] = []
    for clients in base.rounds:
        for way in ways:
            times = [
                one / other
                for one, other in zip(way.rounds[clients], base.rounds[clients], strict=True)
            ]
            waits = way.waits[clients]
            rows.append(
                {
                    "way": way.name,
                    "clients": clients,
                    "tokens_s": statistics.median(way.rounds[clients]),
                    "first_ms": 1e3 * statistics.median(one.first for one in waits),
                    "between_ms": 1e3 * statistics.median(x for one in waits for x in one.between),
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
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="those of the shape")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="of torch; its own default")] = None,
    json: Json = False,
) -> None:
    """Tokens a second and waits of clients of a server, beside the engine itself."""
    many = numbers("--clients", clients)
    others = [(one, model_at(one)) for one in url or ()]
    model, sizes = opened(shape, layers, threads)
    dice = random.Random(0)

    def prompt(way: Way) -> Prompt:
        if way.text:
            return " ".join(dice.choice(WORDS) for _ in range(context))
        return [dice.randrange(sizes["vocab_size"]) for _ in range(context)]

    def directly(ids: Prompt, count: int) -> Iterator[object]:
        return engine.submit(ids, max_new_tokens=count, ignore_end=True)

    with (
        Engine(model, Silent(), kv_cache, max_sequences=max(many)) as engine,
        served(engine) as ours,
    ):
        to_the_end = {"ignore_eos": True}
        own = partial(over_http, ours, beside=to_the_end)
        ways = [Way("engine", directly), Way("server", own)]
        if trim_every is not None:
            ways.append(Way("server, trims", own, beside=partial(trimming, trim_every)))
        ways += [Way(one, partial(over_http, one, beside={"model": x}), True) for one, x in others]
        for way in ways:  # what is done once
            way.go([prompt(way)], 2)
            way.rounds.clear()
            way.waits.clear()
        for number in range(rounds):
            for count in many:
                for way in ways:
                    progress(f"round {number + 1} of {rounds}: {way.name}, {count} clients")
                    way.go([prompt(way) for _ in range(count)], tokens)
    progress("")
    facts = {
        "model": f"{shape}, random",
        "layers": sizes["num_hidden_layers"],
        "cache": kv_cache,
        "context": context,
        "tokens": tokens,
    }
    show("serve", figures(ways, ways[0]), facts, quiet=json, device=CPU)


if __name__ == "__main__":
    run(main)
