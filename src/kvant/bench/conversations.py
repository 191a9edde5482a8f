"""Conversations of more users than there is memory for: who reads what again.

A model of a known shape with random weights. All users begin with the same tokens; in each turn
everybody says something new and is answered, behind all that was said before. An engine with
prefixes serves all of them in memory for a few, with a store beside it. In the same turn an engine
without prefixes serves those few, and stock `generate` of transformers one, from their beginnings,
and what they take is scaled to all users. `hit` is the share of prompt tokens that were not read
again; `in_memory` and `in_store` say where those were.
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

from kvant.bench.cache_race import MODEL_SHAPES, make_contestant, open_model, random_rows
from kvant.bench.device import CPU
from kvant.bench.engine import SilentTokenizer
from kvant.bench.report import Json, print_report, run, show_progress
from kvant.engine import Engine

Prompts = Sequence[list[int]]
STOCK_GENERATE = "generate of transformers"


class EngineTurns:
    """An engine, and what the requests of all turns took."""

    def __init__(self, engine: Engine, num_reply_tokens: int) -> None:
        self.engine, self.num_reply_tokens = engine, num_reply_tokens
        self.num_prompt_tokens = self.num_cached_tokens = self.num_restored_tokens = 0

    def run_turn(self, prompts: Prompts) -> list[list[int]]:
        """The replies to all of them."""
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
    """Of each way, whose turns took so many seconds for all users."""
    whole = {name: sum(seconds) for name, seconds in seconds_by_method.items()}
    return [
        {
            "way": name,
            "seconds": whole[name],
            "a_turn": statistics.median(seconds) / num_users,
            "times": whole[STOCK_GENERATE] / whole[name],
        }
        for name, seconds in seconds_by_method.items()
    ]


def main(
    users: Annotated[int, typer.Option(min=1, help="that talk at the same time")] = 16,
    memory: Annotated[int, typer.Option(min=1, help="users whose conversations fit")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="of each user")] = 20,
    shared: Annotated[int, typer.Option(min=1, help="tokens that all begin with")] = 256,
    message: Annotated[int, typer.Option(min=1, help="tokens of what a user says")] = 32,
    reply: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 16,
    kv_cache: Annotated[str, typer.Option(help="of the spec language")] = "affine8",
    shape: Annotated[str, typer.Option(help=", ".join(MODEL_SHAPES))] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="those of the shape")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="of torch; its own default")] = None,
    json: Json = False,
) -> None:
    """Many users in memory for a few: with prefixes and a store, and from the beginning."""
    if memory > users:
        raise ValueError(f"--memory {memory} of {users} users")
    model, sizes = open_model(shape, layers, threads)
    dice, vocabulary = random.Random(0), sizes["vocab_size"]

    def draw_tokens(count: int) -> list[int]:
        return [dice.randrange(vocabulary) for _ in range(count)]

    def stock(prompts: Prompts) -> None:
        for prompt in prompts:
            ids = torch.tensor([prompt])
            model.generate(ids, min_new_tokens=reply, max_new_tokens=reply, pad_token_id=0)

    begin = draw_tokens(shared)
    talks = [begin.copy() for _ in range(users)]
    longest = shared + turns * (message + reply)
    limit = memory * make_contestant(model, kv_cache, *random_rows(model, longest)).cache_nbytes
    took: dict[str, list[float]] = {}

    def time_system(
        name: str, served: int, serve: Callable[[Prompts], Any], prompts: Prompts
    ) -> Any:
        show_progress(f"{name}: {len(prompts[0])} tokens")
        start = time.perf_counter()
        found = serve(prompts[:served])
        took.setdefault(name, []).append((time.perf_counter() - start) * users / served)
        return found

    options: Any = {"kv_cache": kv_cache, "max_sequences": memory, "pack": False}
    with (
        TemporaryDirectory(prefix="kvant-") as folder,
        Engine(model, SilentTokenizer(), max_bytes=limit, store=folder, **options) as keeping,
        Engine(model, SilentTokenizer(), max_bytes=limit, **options) as plain,
    ):
        kept, anew = EngineTurns(keeping, reply), EngineTurns(plain, reply)
        for turn in range(turns):
            prompts = [talk + draw_tokens(message) for talk in talks]
            replies = time_system("engine with prefixes", users, kept.run_turn, prompts)
            rotated = prompts[turn % users :] + prompts
            time_system("engine", memory, anew.run_turn, rotated)
            time_system(STOCK_GENERATE, 1, stock, rotated)
            talks = [prompt + said for prompt, said in zip(prompts, replies, strict=True)]
    show_progress("")
    facts = {
        "model": f"{shape}, random",
        "layers": sizes["num_hidden_layers"],
        "users": users,
        "turns": turns,
        "tokens": longest,
        "cache": kv_cache,
        "max_mib": limit / 2**20,
        "prompt_tokens": kept.num_prompt_tokens,
        "hit": kept.num_cached_tokens / kept.num_prompt_tokens,
        "in_memory": (kept.num_cached_tokens - kept.num_restored_tokens) / kept.num_prompt_tokens,
        "in_store": kept.num_restored_tokens / kept.num_prompt_tokens,
        "transformers": version("transformers"),
    }
    print_report("conversations", summarize_turns(took, users), facts, quiet=json, device=CPU)


if __name__ == "__main__":
    run(main)
