"""Measure how writes to a store of prefixes slow down decoding, and how fast prefixes are restored.

A model of a known shape decodes after a cache of random rows. Meanwhile some of its pages are
written to the store; then as many steps are decoded without a write. `beside` is the mean of the
first steps relative to the others, the median over the rounds. Then all pages are written without
decoding, and read into an empty cache, as after a restart.
"""

from __future__ import annotations

import secrets
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from kvant.bench import harness
from kvant.bench.cache_race import Shape, draw_random_rows, make_contestant, open_model
from kvant.bench.harness import CPU, Laps, time_in_turn
from kvant.hf import TransformersCache
from kvant.prefixes import LookupDeadline
from kvant.prefixes.keys import PAGE_TOKENS
from kvant.prefixes.prefix_store import CachedPrefix, PrefixStore
from kvant.stores import open_tiers

CONCURRENT_WRITE_TOKENS = 512  # tokens whose pages are written during decode steps


def measure_rounds(
    model: Any, spec: str, context: int, prefix_store: PrefixStore, repeats: int
) -> tuple[dict[str, Any], int]:
    """Write and restore a cache in rounds; return the figures, and the bytes of the cache."""
    contestant = make_contestant(model, spec, *draw_random_rows(model, context))
    cache: TransformersCache = contestant.cache.fork()
    tokens, writer, root = list(range(context)), prefix_store.tiers.writer, b""

    def queue_write(max_length: int | None = None) -> None:
        """Queue writes of the first `max_length` tokens under a new key."""
        nonlocal root
        root = secrets.token_bytes(32)
        prefix_store.write(root, CachedPrefix(tuple(tokens), cache, 0), {}, max_length)

    def write_all() -> None:
        queue_write()
        writer.flush()

    def restore_all() -> None:
        """Read what was last written into an empty cache; raise unless it comes back whole."""
        prompt = [*tokens, 0]  # a lookup never returns the whole prompt
        hit = next(prefix_store.find_hits(root, prompt, cache, 0))
        empty = cache.fork()
        empty.reset()
        restored = prefix_store.restore(hit, empty, model.device, LookupDeadline())
        if restored is None or len(restored.tokens) < context // PAGE_TOKENS * PAGE_TOKENS:
            raise RuntimeError(f"{prefix_store.stats()}: the prefix was not restored")

    steps, slowdowns = Laps(), list[float]()
    calls = {"write_ms": write_all, "read_ms": restore_all}
    laps = {name: Laps() for name in calls}
    for turn in range(repeats + 1):
        queue_write(CONCURRENT_WRITE_TOKENS)
        slow_steps = Laps()
        while writer.nbytes:
            slow_steps.append(CPU.time_call(contestant.decode))
        writer.flush()
        plain_steps = Laps(CPU.time_call(contestant.decode) for _ in slow_steps)
        label = f"round {turn} of {repeats}"
        for name, lap in time_in_turn(calls, 1, label, warmup=0).items():
            laps[name] += lap if turn else []
        if turn:  # the first round is a warm-up
            steps += plain_steps
            slowdowns.append(mean(slow_steps.seconds) / mean(plain_steps.seconds))
    return {
        "step_ms": 1e3 * steps.median,
        "beside": median(slowdowns),
        "steps_beside": len(steps),
        **{name: 1e3 * call_laps.median for name, call_laps in laps.items()},
    }, cache.states.nbytes_used


@torch.no_grad()
def main(
    context: Annotated[int, typer.Option(min=64, help="Tokens of the prefix")] = 8192,
    kv_cache: harness.KVCache = "affine8",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of writes and restores")] = 5,
    shape: Shape = "0.6b",
    layers: harness.Layers = None,
    store: harness.Store = None,
    threads: harness.Threads = None,
    json: harness.Json = False,
) -> None:
    """Measure decoding during writes to a store, and the time to restore a prefix."""
    model, facts = open_model(shape, layers, threads)
    with TemporaryDirectory(prefix="kvant-") as folder:
        prefix_store = PrefixStore(open_tiers(store or folder))
        figures, nbytes = measure_rounds(model, kv_cache, context, prefix_store, repeats)
        prefix_store.close()
    facts |= {"context": context, "cache": kv_cache, "mib": nbytes / 2**20}
    kind = "folder" if store is None else store.partition(":")[0]
    harness.print_report("stores", [{"store": kind, **figures}], facts, quiet=json)


if __name__ == "__main__":
    harness.run(main)
