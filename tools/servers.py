"""Compare servers of one model, each started by its own command, in one run.

`python tools/servers.py --model NAME --server "kvant=kvant serve --port {port} ..." --server ...`
measures all servers in turn, for several rounds and numbers of clients. Then it measures three
turns of a conversation, the third one after a restart. `times` columns are
relative to the first server: its tokens per second, or its waiting time; each is the median of the
ratios of one round. All servers know the model by the same NAME. While one is measured, the others
are stopped by SIGSTOP.
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

from kvant.bench.harness import Json, parse_numbers, print_json, print_table, run, show_progress
from kvant.bench.serve import WORDS, stream_completion

START_TIMEOUT_S, STOP_TIMEOUT_S = 300, 120


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class ServerProcess:
    """A server's command, its process and its port."""

    name: str
    command: str
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    speeds: dict[int, list[float]] = field(default_factory=dict)  # clients: tokens per second

    @classmethod
    def parse(cls, option: str) -> ServerProcess:
        """Make a server from the text of `--server`."""
        name, separator, command = option.partition("=")
        if not separator or "{port}" not in command:
            raise ValueError(f"--server {option}: NAME=COMMAND with {{port}} in it is needed")
        return cls(name, command)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, output: int | None = subprocess.DEVNULL) -> None:
        self.port = find_free_port()
        command = shlex.split(self.command.replace("{port}", str(self.port)))
        self.process = subprocess.Popen(
            command, start_new_session=True, stdout=output, stderr=output
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                urlopen(f"{self.url}/health", timeout=5).close()
                return
            except (OSError, HTTPException):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise OSError(f"{self.name} did not start: {shlex.join(command)}") from None
                time.sleep(0.5)

    def stop(self) -> int | None:
        """Stop the server if it runs; return its exit code."""
        if self.process is None:
            return None
        with suppress(OSError):  # it has already exited
            self.send_signal(signal.SIGCONT)
            self.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.send_signal(signal.SIGKILL)
            code = self.process.wait()
        self.process = None
        return code

    def send_signal(self, signal_number: signal.Signals) -> None:
        """Send a signal to the server's process group."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signal_number)
            except ProcessLookupError:
                raise OSError(f"{self.name} exited: {self.command}") from None

    def request_completion(self, model: str, prompt: str, tokens: int) -> tuple[float, str]:
        """Return the seconds to the first chunk and the text; raise if the reply is short."""
        start, first_chunk, text, reason = time.perf_counter(), 0.0, "", None
        for chunk in stream_completion(self.url, prompt, tokens, {"model": model}):
            first_chunk = first_chunk or time.perf_counter() - start
            text += chunk["choices"][0].get("text") or ""
            reason = chunk["choices"][0].get("finish_reason") or reason
        if reason != "length":
            raise OSError(f"{self.name}: a reply ended by {reason!r}, before {tokens} tokens")
        return first_chunk, text


@contextmanager
def pause_others(active: ServerProcess, servers: Sequence[ServerProcess]) -> Iterator[None]:
    """Pause the other servers, as some poll even if they are idle."""
    others = [other for other in servers if other is not active]
    for other in others:
        other.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for other in others:
            other.send_signal(signal.SIGCONT)


def make_text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def measure_speeds(
    servers: Sequence[ServerProcess],
    model: str,
    client_counts: list[int],
    num_words: int,
    tokens: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Measure the tokens per second of all clients together."""
    rng = random.Random(0)
    for server in servers:  # warm-up
        server.request_completion(model, make_text(rng, 16), 2)
    for number in range(rounds):
        for clients in client_counts:
            for server in servers:
                show_progress(f"round {number + 1} of {rounds}: {server.name}, {clients} clients")
                prompts = [make_text(rng, num_words) for _ in range(clients)]
                send_request = partial(server.request_completion, model, tokens=tokens)
                with pause_others(server, servers), ThreadPoolExecutor(clients) as pool:
                    start = time.perf_counter()
                    list(pool.map(send_request, prompts))
                    seconds = time.perf_counter() - start
                server.speeds.setdefault(clients, []).append(clients * tokens / seconds)
    rows = []
    for clients in client_counts:
        for server in servers:
            pairs = zip(server.speeds[clients], servers[0].speeds[clients], strict=True)
            rows.append(
                {
                    "server": server.name,
                    "clients": clients,
                    "tokens_s": statistics.median(server.speeds[clients]),
                    "times": statistics.median(speed / base for speed, base in pairs),
                }
            )
    return rows


def measure_turns(
    servers: Sequence[ServerProcess], model: str, num_words: int, tokens: int
) -> list[dict[str, Any]]:
    """Measure the seconds to the first token of two turns, and of a third after a restart."""
    rng = random.Random(1)
    turns = [make_text(rng, count) for count in (num_words, 16, 16)]
    rows: list[dict[str, Any]] = []
    for server in servers:
        server.stop()
    for server in servers:  # only one server runs at a time
        conversation, waits = "", []
        for number, text in enumerate(turns):
            if number != 1:
                server.stop()
                server.start()
                server.request_completion(model, make_text(rng, 16), 2)
            show_progress(f"{server.name}: turn {number + 1}")
            conversation = f"{conversation} {text}".lstrip()
            wait, reply = server.request_completion(model, conversation, tokens)
            conversation += reply
            waits.append(wait)
        server.stop()
        row = dict(zip(("turn_1_s", "turn_2_s", "restarted_s"), waits, strict=True))
        base = rows[0] if rows else row
        row["turn_2_times"] = row["turn_2_s"] / base["turn_2_s"]
        row["restarted_times"] = row["restarted_s"] / base["restarted_s"]
        rows.append({"server": server.name} | row)
    return rows


def main(
    model: Annotated[str, typer.Option(help="Name of the model, the same for all servers")],
    server: Annotated[list[str], typer.Option(help="NAME=COMMAND with {port}; repeatable")],
    clients: Annotated[str, typer.Option(help="Numbers of concurrent clients")] = "1,4,16",
    context: Annotated[int, typer.Option(min=1, help="Words of a prompt")] = 128,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a reply")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all servers")] = 3,
    turn: Annotated[int, typer.Option(min=0, help="Words of a first turn; 0: no turns")] = 8192,
    json: Json = False,
) -> None:
    """Compare the speed of servers, and the waiting time of a second turn."""
    client_counts = parse_numbers("--clients", clients)
    servers = []
    for option in server:
        servers.append(ServerProcess.parse(option))
    with ExitStack() as ends:
        for process in servers:
            show_progress(f"starting {process.name}")
            ends.callback(process.stop)
            process.start()
        speed_rows = (
            measure_speeds(servers, model, client_counts, context, tokens, rounds) if rounds else []
        )
        turn_rows = measure_turns(servers, model, turn, 8) if turn else []
    show_progress("")
    for title, rows in (("servers", speed_rows), ("turns", turn_rows)):
        if rows and not json:
            print_table(title, rows)
    facts: dict[str, Any] = {"context": context, "tokens": tokens, "turn": turn, "rounds": rounds}
    facts |= {"commands": {process.name: process.command for process in servers}}
    print_json("servers", facts | {"rows": speed_rows, "turns": turn_rows}, quiet=json)


if __name__ == "__main__":
    run(main)
