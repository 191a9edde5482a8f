"""Measure conversations of more users than the cache has memory for.

A model of a known shape with random weights answers all users. Their conversations begin with the
same tokens; each turn appends a message and its reply. An engine with prefixes and a store serves
all users with memory for a few. In the same turn an engine without prefixes serves those few users,
and stock `generate` one, both from the beginning of the conversations; their times are scaled to
all users. `hit` is the share of prompt tokens that were not prefilled again; `in_memory` and
`in_store` tell where those came from.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from kvant.bench import harness
from kvant.bench.cache_race import Shape, draw_random_rows, make_contestant, open_model
from kvant.bench.engine import Prompts, SilentTokenizer, continue_prompts
from kvant.bench.harness import Laps, TimedCall, time_in_turn
from kvant.engine import Engine

WITH_PREFIXES, WITHOUT_PREFIXES = "engine with prefixes", "engine"
STOCK_GENERATE = "generate of transformers"


def summarize_turns(
    laps: Mapping[str, Laps], served_users: Mapping[str, int], num_users: int
) -> list[dict[str, Any]]:
    """Return a row for each method; the seconds are for all users."""
    totals = {
        name: sum(method_laps.seconds) * num_users / served_users[name]
        for name, method_laps in laps.items()
    }
    return [
        {
            "way": name,
            "seconds": total,
            "a_turn": laps[name].median / served_users[name],
            "times": totals[STOCK_GENERATE] / total,
        }
        for name, total in totals.items()
    ]


def summarize_hits(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the prompt tokens of an engine, and the shares of them that were reused."""
    num_prompt, num_cached = stats["prompt_tokens"], stats["cached_tokens"]
    return {
        "prompt_tokens": num_prompt,
        "hit": num_cached / num_prompt,
        "in_memory": (num_cached - stats["restored_tokens"]) / num_prompt,
        "in_store": stats["restored_tokens"] / num_prompt,
    }


def main(
    users: Annotated[int, typer.Option(min=1, help="Users at the same time")] = 16,
    memory: Annotated[int, typer.Option(min=1, help="Users whose conversations fit in memory")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each user")] = 20,
    shared: Annotated[int, typer.Option(min=1, help="Tokens at the start of all prompts")] = 256,
    message: Annotated[int, typer.Option(min=1, help="Tokens of each message")] = 32,
    reply: Annotated[int, typer.Option(min=1, help="Tokens of each reply")] = 16,
    kv_cache: harness.KVCache = "affine8",
    shape: Shape = "0.6b",
    layers: harness.Layers = None,
    threads: harness.Threads = None,
    json: harness.Json = False,
) -> None:
    """Measure many users with memory for a few, with prefixes and without."""
    if memory > users:
        raise ValueError(f"--memory {memory}: at most the number of users, {users}")
    model, facts = open_model(shape, layers, threads)
    rng, vocab_size = random.Random(0), model.config.vocab_size

    def draw_tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    def run_generate(prompts: Prompts) -> None:
        for prompt in prompts:
            ids = torch.tensor([prompt])
            model.generate(ids, min_new_tokens=reply, max_new_tokens=reply, pad_token_id=0)

    conversations = [draw_tokens(shared)] * users
    longest = shared + turns * (message + reply)
    full_cache = make_contestant(model, kv_cache, *draw_random_rows(model, longest))
    limit = memory * full_cache.cache_nbytes
    del full_cache
    served_users = {WITH_PREFIXES: users, WITHOUT_PREFIXES: memory, STOCK_GENERATE: 1}
    laps = {name: Laps() for name in served_users}
    options: Any = {"kv_cache": kv_cache, "max_sequences": memory, "pack": False}
    with (
        TemporaryDirectory(prefix="kvant-") as folder,
        Engine(model, SilentTokenizer(), max_bytes=limit, store=folder, **options) as prefix_engine,
        Engine(model, SilentTokenizer(), max_bytes=limit, **options) as plain_engine,
    ):
        replies: list[list[int]] = []

        def run_with_prefixes(prompts: Prompts) -> None:
            replies[:] = continue_prompts(prefix_engine, prompts, reply)

        for turn in range(turns):
            prompts = [conversation + draw_tokens(message) for conversation in conversations]
            rotated = prompts[turn % users :] + prompts
            calls: dict[str, TimedCall] = {
                WITH_PREFIXES: partial(run_with_prefixes, prompts),
                WITHOUT_PREFIXES: partial(continue_prompts, plain_engine, rotated[:memory], reply),
                STOCK_GENERATE: partial(run_generate, rotated[:1]),
            }
            label = f"{len(prompts[0])} tokens"
            for name, lap in time_in_turn(calls, 1, label, warmup=0).items():
                laps[name] += lap
            conversations = [prompt + new for prompt, new in zip(prompts, replies, strict=True)]
        stats = prefix_engine.stats()
    facts |= {
        "users": users,
        "turns": turns,
        "tokens": longest,
        "cache": kv_cache,
        "max_mib": limit / 2**20,
        **summarize_hits(stats),
    }
    rows = summarize_turns(laps, served_users, users)
    harness.print_report("conversations", rows, facts, quiet=json)


if __name__ == "__main__":
    harness.run(main)
