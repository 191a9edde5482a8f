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

from kvant.bench.cache_race import SHAPES, filled, opened, random_rows
from kvant.bench.device import CPU
from kvant.bench.engine import Silent
from kvant.bench.report import Json, progress, run, show
from kvant.engine import Engine

Prompts = Sequence[list[int]]
STOCK = "generate of transformers"


class Served:
    """An engine, and what the requests of all turns took."""

    def __init__(self, engine: Engine, reply: int) -> None:
        self.engine, self.reply = engine, reply
        self.asked = self.hit = self.restored = 0

    def turn(self, prompts: Prompts) -> list[list[int]]:
        """The replies to all of them."""
        submit = partial(self.engine.submit, max_new_tokens=self.reply, ignore_end=True)
        streams = [submit(prompt) for prompt in prompts]
        replies = []
        for stream in streams:
            replies.append(list(stream.result().tokens))
            usage = stream.usage
            self.asked += usage.prompt_tokens
            self.hit += usage.cached_tokens
            self.restored += usage.restored_tokens
        return replies


def figures(took: Mapping[str, list[float]], users: int) -> list[dict[str, Any]]:
    """Of each way, whose turns took so many seconds for all users."""
    whole = {name: sum(seconds) for name, seconds in took.items()}
    return [
        {
            "way": name,
            "seconds": whole[name],
            "a_turn": statistics.median(seconds) / users,
            "times": whole[STOCK] / whole[name],
        }
        for name, seconds in took.items()
    ]


def main(
    users: Annotated[int, typer.Option(min=1, help="that talk at the same time")] = 16,
    memory: Annotated[int, typer.Option(min=1, help="users whose conversations fit")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="of each user")] = 20,
    shared: Annotated[int, typer.Option(min=1, help="tokens that all begin with")] = 256,
    message: Annotated[int, typer.Option(min=1, help="tokens of what a user says")] = 32,
    reply: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 16,
    kv_cache: Annotated[str, typer.Option(help="of the spec language")] = "affine8",
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="those of the shape")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="of torch; its own default")] = None,
    json: Json = False,
) -> None:
    """Many users in memory for a few: with prefixes and a store, and from the beginning."""
    if memory > users:
        raise ValueError(f"--memory {memory} of {users} users")
    model, sizes = opened(shape, layers, threads)
    dice, vocabulary = random.Random(0), sizes["vocab_size"]

    def said(count: int) -> list[int]:
        return [dice.randrange(vocabulary) for _ in range(count)]

    def stock(prompts: Prompts) -> None:
        for prompt in prompts:
            ids = torch.tensor([prompt])
            model.generate(ids, min_new_tokens=reply, max_new_tokens=reply, pad_token_id=0)

    begin = said(shared)
    talks = [begin.copy() for _ in range(users)]
    longest = shared + turns * (message + reply)
    limit = memory * filled(model, kv_cache, *random_rows(model, longest)).rest
    took: dict[str, list[float]] = {}

    def timed(name: str, served: int, serve: Callable[[Prompts], Any], prompts: Prompts) -> Any:
        progress(f"{name}: {len(prompts[0])} tokens")
        start = time.perf_counter()
        found = serve(prompts[:served])
        took.setdefault(name, []).append((time.perf_counter() - start) * users / served)
        return found

    options: Any = {"kv_cache": kv_cache, "max_sequences": memory, "pack": False}
    with (
        TemporaryDirectory(prefix="kvant-") as folder,
        Engine(model, Silent(), max_bytes=limit, store=folder, **options) as keeping,
        Engine(model, Silent(), max_bytes=limit, **options) as plain,
    ):
        kept, anew = Served(keeping, reply), Served(plain, reply)
        for turn in range(turns):
            prompts = [talk + said(message) for talk in talks]
            replies = timed("engine with prefixes", users, kept.turn, prompts)
            rotated = prompts[turn % users :] + prompts
            timed("engine", memory, anew.turn, rotated)
            timed(STOCK, 1, stock, rotated)
            talks = [prompt + said for prompt, said in zip(prompts, replies, strict=True)]
    progress("")
    facts = {
        "model": f"{shape}, random",
        "layers": sizes["num_hidden_layers"],
        "users": users,
        "turns": turns,
        "tokens": longest,
        "cache": kv_cache,
        "max_mib": limit / 2**20,
        "prompt_tokens": kept.asked,
        "hit": kept.hit / kept.asked,
        "in_memory": (kept.hit - kept.restored) / kept.asked,
        "in_store": kept.restored / kept.asked,
        "transformers": version("transformers"),
    }
    show("conversations", figures(took, users), facts, quiet=json, device=CPU)


if __name__ == "__main__":
    run(main)
