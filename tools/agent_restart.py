"""Time the turns of an agent on several servers, one of them restarted and one turn cancelled.

`python tools/agent_restart.py --model NAME --server "kvant=kvant serve --port {port} ..."` and more
`--server` options run the same session on each server: a long first prompt, then turns that append
a text and get a reply. After a third of the turns the agent stops waiting for a long text, and
sends it again. In the middle the server is restarted. `ratio` columns are seconds relative to the
first server. All servers know the model by the same NAME; only one runs at a time.
"""

from __future__ import annotations

import json as json_text
import random
import socket
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Annotated, Any

import typer

from kvant.bench.harness import Json, print_report, run, show_progress
from kvant.bench.serve import stream_chunks
from servers import ServerProcess, make_text

CHAT_PATH = "/v1/chat/completions"
Message = dict[str, str]


@dataclass(frozen=True)
class SessionPlan:
    """Words of the texts of a session, by turn, and its two events."""

    words: tuple[int, ...]
    cancelled_turn: int  # is sent a second time
    restarted_turn: int  # is the first one after the restart

    @classmethod
    def make(cls, turns: int, first: int, added: int, long: int) -> SessionPlan:
        """Plan a session whose cancelled turn has `long` words, and others `added`."""
        words = [first, *[added] * (turns - 1)]
        words[turns // 3] = long
        return cls(tuple(words), turns // 3, turns // 2)


@dataclass(frozen=True)
class Turn:
    """What a client saw of one turn."""

    first_token_s: float
    prompt_tokens: int
    cached_tokens: int
    reply: str


def send_turn(server: ServerProcess, model: str, messages: Sequence[Message], tokens: int) -> Turn:
    """Send a conversation, and read its reply as a stream."""
    body = {"model": model, "messages": [*messages], "max_tokens": tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    start, first_token_s, reply, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
    for chunk in stream_chunks(server.url, CHAT_PATH, body):
        usage = chunk.get("usage") or usage
        choice = next(iter(chunk.get("choices") or ()), {"delta": {}})
        if text := choice["delta"].get("content"):
            first_token_s = first_token_s or time.perf_counter() - start
            reply += text
    if not reply or "prompt_tokens" not in usage:
        raise OSError(f"{server.name}: a reply without text or usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Turn(first_token_s, usage["prompt_tokens"], cached, reply)


def send_and_disconnect(
    server: ServerProcess, model: str, messages: Sequence[Message], seconds: float
) -> None:
    """Send a conversation, and disconnect after some seconds."""
    body = {"model": model, "messages": [*messages], "max_tokens": 1024}
    connection = HTTPConnection("127.0.0.1", server.port, timeout=seconds)
    headers = {"Content-Type": "application/json"}
    try:
        connection.request("POST", CHAT_PATH, json_text.dumps(body), headers)
        with suppress(socket.timeout):
            connection.getresponse()
            raise OSError(f"{server.name} replied within {seconds} s: use a shorter --cancel-after")
    finally:
        connection.close()


def run_session(
    server: ServerProcess, model: str, plan: SessionPlan, tokens: int, cancel_after_s: float
) -> list[Turn]:
    """Run a session on one server."""
    rng, messages, turns = random.Random(1), list[Message](), list[Turn]()
    server.start()
    try:
        send_turn(server, model, [{"role": "user", "content": make_text(random.Random(0), 16)}], 2)
        for number, num_words in enumerate(plan.words):
            show_progress(f"{server.name}: turn {number + 1} of {len(plan.words)}")
            if number == plan.restarted_turn:
                server.stop()
                server.start()
                send_turn(server, model, [{"role": "user", "content": make_text(rng, 16)}], 2)
            messages.append({"role": "user", "content": make_text(rng, num_words)})
            if number == plan.cancelled_turn:
                send_and_disconnect(server, model, messages, cancel_after_s)
            turns.append(send_turn(server, model, messages, tokens))
            messages.append({"role": "assistant", "content": turns[-1].reply})
    finally:
        server.stop()
    return turns


def summarize_session(plan: SessionPlan, turns: Sequence[Turn]) -> dict[str, float]:
    """Return the seconds to the first token by kind of turn, and the share that was cached."""
    special = (0, plan.cancelled_turn, plan.restarted_turn)
    usual = [turn.first_token_s for index, turn in enumerate(turns) if index not in special]
    after, restarted = turns[1:], turns[plan.restarted_turn]
    return {
        "first_s": turns[0].first_token_s,
        "turn_s": statistics.median(usual),
        "cancelled_s": turns[plan.cancelled_turn].first_token_s,
        "restarted_s": restarted.first_token_s,
        "cached": sum(t.cached_tokens for t in after) / sum(t.prompt_tokens for t in after),
        "restarted_cached": restarted.cached_tokens / restarted.prompt_tokens,
    }


def main(
    model: Annotated[str, typer.Option(help="Name of the model, the same for all servers")],
    server: Annotated[list[str], typer.Option(help="NAME=COMMAND with {port}; repeatable")],
    turns: Annotated[int, typer.Option(min=6, help="Turns of the session")] = 40,
    first: Annotated[int, typer.Option(min=1, help="Words of the first prompt")] = 12000,
    added: Annotated[int, typer.Option(min=1, help="Words that a turn adds")] = 64,
    long: Annotated[int, typer.Option(min=1, help="Words of the cancelled turn")] = 1500,
    cancel_after: Annotated[
        float, typer.Option(min=0.01, help="Seconds until the client disconnects")
    ] = 5.0,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a reply")] = 16,
    json: Json = False,
) -> None:
    """Time the turns of an agent on several servers, before and after a restart."""
    plan, rows, sessions = SessionPlan.make(turns, first, added, long), [], {}
    for option in server:
        process = ServerProcess.parse(option)
        name = process.name
        sessions[name] = run_session(process, model, plan, tokens, cancel_after)
        row: dict[str, Any] = summarize_session(plan, sessions[name])
        base = rows[0] if rows else row
        for column in ("turn_s", "cancelled_s", "restarted_s"):
            row[column.removesuffix("_s") + "_ratio"] = row[column] / base[column]
        rows.append({"server": name} | row)
    facts = {
        "turns": turns,
        "tokens": sessions[rows[0]["server"]][-1].prompt_tokens,
        "seconds": {
            name: [round(turn.first_token_s, 3) for turn in session]
            for name, session in sessions.items()
        },
    }
    print_report("agent restart", rows, facts, quiet=json)


if __name__ == "__main__":
    run(main)
