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
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from kvant.bench.cache_race import SHAPE_HELP, draw_random_rows, make_contestant, open_model
from kvant.bench.device import CPU
from kvant.bench.engine import SilentTokenizer
from kvant.bench.report import Json, print_report, run, show_progress
from kvant.engine import Engine

Prompts = Sequence[list[int]]
STOCK_GENERATE = "generate of transformers"


class EngineTurns:
    """An engine, and the token counts of its requests."""

    def __init__(self, engine: Engine, num_reply_tokens: int) -> None:
        self.engine, self.num_reply_tokens = engine, num_reply_tokens
        self.num_prompt_tokens = self.num_cached_tokens = self.num_restored_tokens = 0

    def run_turn(self, prompts: Prompts) -> list[list[int]]:
        """Generate the replies to all prompts."""
        submit = partial(self.engine.submit, max_new_tokens=self.num_reply_tokens, ignore_end=True)
        streams = [submit(prompt) for prompt in prompts]
        replies = []
        for stream in streams:
            replies.append(list(stream.result().tokens))
            usage = stream.usage
            self.num_prompt_tokens += usage.prompt_tokens
            self.num_cached_tokens += usage.cached_tokens
            self.num_restored_tokens += usage.restored_tokens
        return replies


def summarize_turns(
    seconds_by_method: Mapping[str, list[float]], num_users: int
) -> list[dict[str, Any]]:
    """Return a row for each method; the seconds of a turn are for all users."""
    totals = {name: sum(seconds) for name, seconds in seconds_by_method.items()}
    return [
        {
            "way": name,
            "seconds": totals[name],
            "a_turn": statistics.median(seconds) / num_users,
            "times": totals[STOCK_GENERATE] / totals[name],
        }
        for name, seconds in seconds_by_method.items()
    ]


def summarize_hits(turns: EngineTurns) -> dict[str, float]:
    """Return the prompt tokens, and the shares of them that were reused."""
    num_prompt, num_cached = turns.num_prompt_tokens, turns.num_cached_tokens
    num_restored = turns.num_restored_tokens
    return {
        "prompt_tokens": num_prompt,
        "hit": num_cached / num_prompt,
        "in_memory": (num_cached - num_restored) / num_prompt,
        "in_store": num_restored / num_prompt,
    }


def main(
    users: Annotated[int, typer.Option(min=1, help="Users at the same time")] = 16,
    memory: Annotated[int, typer.Option(min=1, help="Users whose conversations fit in memory")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each user")] = 20,
    shared: Annotated[int, typer.Option(min=1, help="Tokens at the start of all prompts")] = 256,
    message: Annotated[int, typer.Option(min=1, help="Tokens of each message")] = 32,
    reply: Annotated[int, typer.Option(min=1, help="Tokens of each reply")] = 16,
    kv_cache: Annotated[str, typer.Option(help="Spec of the cache")] = "affine8",
    shape: Annotated[str, typer.Option(help=SHAPE_HELP)] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch")] = None,
    json: Json = False,
) -> None:
    """Measure many users with memory for a few, with prefixes and without."""
    if memory > users:
        raise ValueError(f"--memory {memory}: at most the number of users, {users}")
    model, sizes = open_model(shape, layers, threads)
    rng, vocab_size = random.Random(0), sizes["vocab_size"]

    def draw_tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    def run_generate(prompts: Prompts) -> None:
        for prompt in prompts:
            ids = torch.tensor([prompt])
            model.generate(ids, min_new_tokens=reply, max_new_tokens=reply, pad_token_id=0)

    common = draw_tokens(shared)
    conversations = [common.copy() for _ in range(users)]
    longest = shared + turns * (message + reply)
    limit = (
        memory * make_contestant(model, kv_cache, *draw_random_rows(model, longest)).cache_nbytes
    )
    seconds_by_method: dict[str, list[float]] = {}

    def time_system(
        name: str, num_users: int, serve: Callable[[Prompts], Any], prompts: Prompts
    ) -> Any:
        show_progress(f"{name}: {len(prompts[0])} tokens")
        start = time.perf_counter()
        result = serve(prompts[:num_users])
        seconds_by_method.setdefault(name, []).append(
            (time.perf_counter() - start) * users / num_users
        )
        return result

    options: Any = {"kv_cache": kv_cache, "max_sequences": memory, "pack": False}
    with (
        TemporaryDirectory(prefix="kvant-") as folder,
        Engine(model, SilentTokenizer(), max_bytes=limit, store=folder, **options) as prefix_engine,
        Engine(model, SilentTokenizer(), max_bytes=limit, **options) as plain_engine,
    ):
        with_prefixes, without_prefixes = (
            EngineTurns(prefix_engine, reply),
            EngineTurns(plain_engine, reply),
        )
        for turn in range(turns):
            prompts = [conversation + draw_tokens(message) for conversation in conversations]
            replies = time_system("engine with prefixes", users, with_prefixes.run_turn, prompts)
            rotated = prompts[turn % users :] + prompts
            time_system("engine", memory, without_prefixes.run_turn, rotated)
            time_system(STOCK_GENERATE, 1, run_generate, rotated)
            conversations = [
                prompt + reply_tokens for prompt, reply_tokens in zip(prompts, replies, strict=True)
            ]
    show_progress("")
    facts = {
        "model": f"{shape}, random",
        "layers": sizes["num_hidden_layers"],
        "users": users,
        "turns": turns,
        "tokens": longest,
        "cache": kv_cache,
        "max_mib": limit / 2**20,
        **summarize_hits(with_prefixes),
        "transformers": version("transformers"),
    }
    print_report(
        "conversations", summarize_turns(seconds_by_method, users), facts, quiet=json, device=CPU
    )


if __name__ == "__main__":
    run(main)
