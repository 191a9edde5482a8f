"""Measure how writes to a store of prefixes slow down decoding, and how fast prefixes are restored.

A model of a known shape decodes after a cache of random rows. Meanwhile some of its pages are
written to the store; then as many steps are decoded without a write. `beside` is the mean of the
first steps relative to the others, the median over the rounds. Then all pages are written without
decoding, and read into an empty cache, as after a restart.
"""

from __future__ import annotations

import secrets
import statistics
import time
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from kvant.bench.cache_race import SHAPE_HELP, draw_random_rows, make_contestant, open_model
from kvant.bench.device import CPU
from kvant.bench.report import Json, print_report, run, show_progress
from kvant.hf import TransformersCache
from kvant.prefixes import LookupDeadline
from kvant.prefixes.keys import PAGE_TOKENS
from kvant.prefixes.prefix_store import PrefixStore
from kvant.stores import open_tiers

CONCURRENT_WRITE_TOKENS = 512  # tokens whose pages are written during decode steps


class StoreRounds:
    """A cache that is written and restored in rounds, and their times."""

    def __init__(self, model: Any, spec: str, context: int, store: str) -> None:
        self.contestant = make_contestant(model, spec, *draw_random_rows(model, context))
        self.model, self.tokens = model, list(range(context))
        self.cache: TransformersCache = self.contestant.cache.fork()
        self.prefix_store = PrefixStore(open_tiers(store))
        self.step_seconds: list[float] = []
        self.slowdowns: list[float] = []  # of a step during writes, by round
        self.write_seconds: list[float] = []
        self.read_seconds: list[float] = []

    def run_round(self) -> None:
        writer, slow_steps = self.prefix_store.tiers.writer, []
        self.queue_write(max_length=CONCURRENT_WRITE_TOKENS)
        while writer.nbytes:
            slow_steps.append(self.decode_step())
        writer.flush()
        plain_steps = [self.decode_step() for _ in slow_steps]
        self.step_seconds += plain_steps
        self.slowdowns.append(statistics.mean(slow_steps) / statistics.mean(plain_steps))
        start = time.perf_counter()
        root = self.queue_write()
        writer.flush()
        self.write_seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        prompt = [*self.tokens, 0]  # a lookup never returns the whole prompt
        hit = next(
            self.prefix_store.find_hits(root, prompt, self.cache.states, 0, pages_suffice=True)
        )
        empty = self.cache.fork()
        empty.reset()
        restored = self.prefix_store.restore(
            hit, prompt, empty, self.model.device, LookupDeadline()
        )
        if restored is None or len(restored.tokens) < len(self.tokens) // PAGE_TOKENS * PAGE_TOKENS:
            raise RuntimeError(f"{self.prefix_store.stats()}: the prefix was not restored")
        self.read_seconds.append(time.perf_counter() - start)

    def queue_write(self, max_length: int | None = None) -> bytes:
        """Queue writes of the first `max_length` tokens under a new key; return the key."""
        root = secrets.token_bytes(32)
        self.prefix_store.write(
            root, self.tokens, self.cache.states, 0, {}, pages_suffice=True, max_length=max_length
        )
        return root

    def decode_step(self) -> float:
        self.contestant.decode()
        return self.contestant.seconds[-1]

    def clear_times(self) -> None:
        for seconds in (self.step_seconds, self.slowdowns, self.write_seconds, self.read_seconds):
            seconds.clear()

    def summarize(self, store: str | None) -> dict[str, Any]:
        median = statistics.median
        return {
            "store": "folder" if store is None else store.partition(":")[0],
            "step_ms": 1e3 * median(self.step_seconds),
            "beside": median(self.slowdowns),
            "steps_beside": len(self.step_seconds),
            "write_ms": 1e3 * median(self.write_seconds),
            "read_ms": 1e3 * median(self.read_seconds),
        }


@torch.no_grad()
def main(
    context: Annotated[int, typer.Option(min=64, help="Tokens of the prefix")] = 8192,
    kv_cache: Annotated[str, typer.Option(help="Spec of the cache")] = "affine8",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of writes and restores")] = 5,
    shape: Annotated[str, typer.Option(help=SHAPE_HELP)] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model")] = None,
    store: Annotated[
        str | None, typer.Option(help="Store URL; default: a temporary folder")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch")] = None,
    json: Json = False,
) -> None:
    """Measure decoding during writes to a store, and the time to restore a prefix."""
    model, sizes = open_model(shape, layers, threads)
    with TemporaryDirectory(prefix="kvant-") as folder:
        rounds = StoreRounds(model, kv_cache, context, store or folder)
        for number in range(repeats + 1):
            show_progress(f"round {number} of {repeats}")
            rounds.run_round()
            if not number:  # warm-up
                rounds.clear_times()
        rounds.prefix_store.close()
    show_progress("")
    facts = {
        "model": f"{shape}, random",
        "layers": sizes["num_hidden_layers"],
        "context": context,
        "cache": kv_cache,
        "mib": rounds.cache.states.nbytes_used / 2**20,
    }
    print_report("stores", [rounds.summarize(store)], facts, quiet=json, device=CPU)


if __name__ == "__main__":
    run(main)
