"""Compares servers of one model, each begun by a command of its own, in one run.

`python tools/servers.py --model NAME --server "kvant=kvant serve --port {port} ..." --server ...`
asks all of them in turn, several rounds, at several numbers of clients, then for the second turn
of a conversation: right behind the first, and after a restart. `times` is the tokens a second of a
server over those of the first one, and its wait over that of the first one; each the median of the
ratios of one round. Every server knows the model under the same NAME. While one is asked, the
others stand still.
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from typing import Annotated, Any
from urllib.request import urlopen

import typer

from kvant.bench.report import Json, parse_numbers, print_json, print_table, run, show_progress
from kvant.bench.serve import WORDS, stream_completion

START_TIMEOUT_S = 300  # seconds in which a server must be there


@dataclass
class ServerProcess:
    """A command, and where what it began listens."""

    name: str
    command: str
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    speeds: dict[int, list[float]] = field(default_factory=dict)  # by clients

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        words = shlex.split(self.command.replace("{port}", str(self.port)))
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(words, start_new_session=True, **quiet)
        until = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                urlopen(f"{self.url}/health", timeout=5).close()
                return
            except (OSError, HTTPException):
                if self.process.poll() is not None or time.monotonic() > until:
                    raise OSError(f"{self.name} did not begin: {shlex.join(words)}") from None
                time.sleep(0.5)

    def stop(self) -> None:
        if self.process is not None:
            with suppress(OSError):  # it ended by itself
                self.send_signal(signal.SIGCONT)
                self.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.send_signal(signal.SIGKILL)
                self.process.wait()
            self.process = None

    def send_signal(self, signal_number: signal.Signals) -> None:
        """Its process, and those that it began."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signal_number)
            except ProcessLookupError:
                raise OSError(f"{self.name} ended: {self.command}") from None

    def request_completion(self, model: str, prompt: str, tokens: int) -> tuple[float, str]:
        """Seconds until something came, and the text; a reply that ends early is an error."""
        begin, first, text, reason = time.perf_counter(), 0.0, "", None
        for told in stream_completion(self.url, prompt, tokens, {"model": model}):
            first = first or time.perf_counter() - begin
            text += told["choices"][0].get("text") or ""
            reason = told["choices"][0].get("finish_reason") or reason
        if reason != "length":
            raise OSError(
                f"{self.name}: a reply ended by {reason!r}, {tokens} tokens were asked for"
            )
        return first, text


@contextmanager
def pause_others(active: ServerProcess, servers: Sequence[ServerProcess]) -> Iterator[None]:
    """The others stand still meanwhile: some poll, with nothing to do."""
    others = [one for one in servers if one is not active]
    for one in others:
        one.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for one in others:
            one.send_signal(signal.SIGCONT)


@contextmanager
def run_servers(servers: Sequence[ServerProcess]) -> Iterator[None]:
    with ExitStack() as ends:
        for server in servers:
            show_progress(f"beginning {server.name}")
            ends.callback(server.stop)
            server.start()
        yield


def make_text(dice: random.Random, num_words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(num_words))


def measure_speeds(
    servers: Sequence[ServerProcess],
    model: str,
    client_counts: list[int],
    num_words: int,
    tokens: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Tokens a second, all clients together."""
    dice = random.Random(0)
    for server in servers:  # what is done once
        server.request_completion(model, make_text(dice, 16), 2)
    for number in range(rounds):
        for clients in client_counts:
            for server in servers:
                show_progress(f"round {number + 1} of {rounds}: {server.name}, {clients} clients")
                prompts = [make_text(dice, num_words) for _ in range(clients)]
                ask = partial(server.request_completion, model, tokens=tokens)
                with pause_others(server, servers), ThreadPoolExecutor(clients) as pool:
                    begin = time.perf_counter()
                    list(pool.map(ask, prompts))
                    took = time.perf_counter() - begin
                server.speeds.setdefault(clients, []).append(clients * tokens / took)
    base = servers[0]
    return [
        {
            "server": server.name,
            "clients": clients,
            "tokens_s": statistics.median(server.speeds[clients]),
            "times": statistics.median(
                one / other
                for one, other in zip(server.speeds[clients], base.speeds[clients], strict=True)
            ),
        }
        for clients in client_counts
        for server in servers
    ]


def measure_turns(
    servers: Sequence[ServerProcess], model: str, num_words: int, tokens: int
) -> list[dict[str, Any]]:
    """Seconds to the first token of the second turn, with the first one and after a restart."""
    dice = random.Random(1)
    first, second, third = (make_text(dice, count) for count in (num_words, 16, 16))
    waits: dict[str, list[float]] = {}
    for server in servers:
        server.stop()
    for server in servers:  # each has the machine to itself
        server.start()
        server.request_completion(model, make_text(dice, 16), 2)
        show_progress(f"{server.name}: the first turn")
        wait, reply = server.request_completion(model, first, tokens)
        said = f"{first}{reply} {second}"
        show_progress(f"{server.name}: the second turn")
        again, more = server.request_completion(model, said, tokens)
        server.stop()
        show_progress(f"{server.name}: beginning again")
        server.start()
        server.request_completion(model, make_text(dice, 16), 2)
        show_progress(f"{server.name}: the third turn")
        after, _ = server.request_completion(model, f"{said}{more} {third}", tokens)
        waits[server.name] = [wait, again, after]
        server.stop()
    base = waits[servers[0].name]
    return [
        {
            "server": name,
            "turn_1_s": own[0],
            "turn_2_s": own[1],
            "restarted_s": own[2],
            "turn_2_times": own[1] / base[1],
            "restarted_times": own[2] / base[2],
        }
        for name, own in waits.items()
    ]


def main(
    model: Annotated[str, typer.Option(help="as all of them know it")],
    server: Annotated[list[str], typer.Option(help="NAME=COMMAND with {port} in it; several")],
    clients: Annotated[str, typer.Option(help="that ask at the same time")] = "1,4,16",
    context: Annotated[int, typer.Option(min=1, help="words of a prompt")] = 128,
    tokens: Annotated[int, typer.Option(min=2, help="of a reply")] = 32,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    turn: Annotated[int, typer.Option(min=0, help="words of a first turn; 0: no turns")] = 8192,
    json: Json = False,
) -> None:
    """Tokens a second, and what the second turn waits for."""
    many = parse_numbers("--clients", clients)
    servers = []
    for one in server:
        name, found, command = one.partition("=")
        if not found or "{port}" not in command:
            raise ValueError(f"--server {one}: NAME=COMMAND with {{port}} in it is needed")
        servers.append(ServerProcess(name, command))
    with run_servers(servers):
        raced = measure_speeds(servers, model, many, context, tokens, rounds) if rounds else []
        turned = measure_turns(servers, model, turn, 8) if turn else []
    show_progress("")
    if not json:
        print_table("servers", raced)
        if turned:
            print_table("turns", turned)
    facts = {"context": context, "tokens": tokens, "turn": turn, "rounds": rounds}
    commands = {one.name: one.command for one in servers}
    print_json(
        "servers", facts | {"commands": commands, "rows": raced, "turns": turned}, quiet=json
    )


if __name__ == "__main__":
    run(main)
