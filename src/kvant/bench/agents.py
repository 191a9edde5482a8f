"""Measure what share of agents' prompts is reused, and what share could be.

A model serves sessions of several kinds, each in an engine of its own. In the middle of a session
the engine may be restarted, so that only a store has the prefixes. `shared` is the share of prompt
tokens that an earlier prompt of the session, with its reply, has as a prefix. `reused` is the share
taken from the cache. Cancelled prompts do not count as earlier ones, but may be reused.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from kvant.bench import harness
from kvant.bench.agent_sessions import SESSIONS, AgentRequest, Body, SessionSize, make_session
from kvant.checkpoints import load
from kvant.engine import Engine, Result
from kvant.generation import Messages
from kvant.prefixes import Prefixes
from kvant.prefixes.tree import count_shared_prefix
from kvant.server.messages_api import MessagesRequest

CANCEL_AFTER_S = 0.05  # shorter than the prefill of most prompts


def make_prompt(body: Body) -> Messages:
    """Return the prompt of a body of POST /v1/messages, as the server makes it."""
    request = MessagesRequest.model_validate(body | {"model": "bench", "max_tokens": 1})
    return request.add_marks(request.chat_request.template_messages)


@dataclass
class ReuseCounts:
    """Prompt tokens of a session, and how many of them were shared and reused."""

    prompt_tokens: int = 0
    shared_tokens: int = 0
    reused_tokens: int = 0
    first_token_waits: list[float] = field(default_factory=list)  # seconds
    served_tokens: list[list[int]] = field(default_factory=list)  # prompts with their replies

    def add(self, prompt: Sequence[int], result: Result, first_token_wait: float) -> None:
        """Count a request that was served."""
        shares = (count_shared_prefix(tokens, prompt[:-1]) for tokens in self.served_tokens)
        self.prompt_tokens += len(prompt)
        self.shared_tokens += max(shares, default=0)
        self.reused_tokens += result.usage.cached_tokens
        self.first_token_waits.append(first_token_wait)
        self.served_tokens.append([*prompt, *result.tokens])


def send_requests(
    engine: Engine, requests: Sequence[AgentRequest], counts: ReuseCounts, num_new_tokens: int
) -> None:
    """Send requests one after the other, and count those that are not cancelled."""
    for request in requests:
        begin = time.perf_counter()
        stream = engine.submit(
            make_prompt(request.body), max_new_tokens=num_new_tokens, ignore_end=True
        )
        if request.is_cancelled:
            time.sleep(CANCEL_AFTER_S)
            stream.cancel()
            stream.results()
            continue
        next(stream)
        wait = time.perf_counter() - begin
        counts.add(stream.prompt, stream.result(), wait)


def measure_session(
    model: Any,
    tokenizer: Any,
    spec: str,
    requests: Sequence[AgentRequest],
    *,
    restarts: bool,
    num_new_tokens: int = 8,
) -> ReuseCounts:
    """Serve a session; with `restarts`, a second engine serves its second half."""
    counts = ReuseCounts()
    half = len(requests) // 2 if restarts else len(requests)
    with TemporaryDirectory(prefix="kvant-") as folder:
        for part in filter(None, (requests[:half], requests[half:])):
            with (
                Prefixes(None, store=folder if restarts else None) as prefixes,
                Engine(model, tokenizer, spec, prefixes=prefixes) as engine,
            ):
                send_requests(engine, part, counts, num_new_tokens)
    return counts


def main(
    turns: Annotated[int, typer.Option(min=4, help="Turns of each session")] = 12,
    system: Annotated[int, typer.Option(min=1, help="Words of the system text")] = 600,
    sessions: Annotated[
        str, typer.Option(help="Kinds of sessions, separated by commas")
    ] = ",".join(SESSIONS),
    restart: Annotated[bool, typer.Option(help="Restart the engine in the middle")] = False,
    kv_cache: harness.KVCache = "affine8",
    model: harness.Model = "smollm2",
    threads: harness.Threads = None,
    json: harness.Json = False,
) -> None:
    """Measure what share of agents' prompts is reused, and what share could be."""
    kinds = sessions.split(",")
    if unknown := [kind for kind in kinds if kind not in SESSIONS]:
        raise ValueError(f"--sessions {unknown[0]}: known are {', '.join(SESSIONS)}")
    harness.set_threads(threads)
    harness.show_progress("loading the model")
    loaded, tokenizer = load(model)
    size, rows = SessionSize(turns, system_words=system), list[dict[str, Any]]()
    for kind in kinds:
        harness.show_progress(kind)
        requests = make_session(kind, size)
        counts = measure_session(loaded, tokenizer, kv_cache, requests, restarts=restart)
        rows.append(
            {
                "session": kind,
                "requests": len(requests),
                "prompt_tokens": counts.prompt_tokens,
                "shared": counts.shared_tokens / counts.prompt_tokens,
                "reused": counts.reused_tokens / counts.prompt_tokens,
                "first_token_s": statistics.median(counts.first_token_waits),
            }
        )
    facts = {
        "model": model or "the model inside",
        "cache": kv_cache,
        "restart": restart,
        "turns": turns,
        "system": system,
    }
    harness.print_report("agents", rows, facts, quiet=json)


if __name__ == "__main__":
    harness.run(main)
